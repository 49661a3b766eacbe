"""Draft weights from checkpoints as they are published, which transformers leaves out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtier_deepseek import DSpark, Mtp, StreamMtp, UnsupportedModel
from kvtier_deepseek.drafts.dspark import DSparkModule
from kvtier_deepseek.drafts.mtp import MtpModule
from tests.adapter.drafts_kit import draft_of, model_of
from tests.adapter.models import tiny_model

ATTENTION = [
    "attn.attn_sink",
    "attn.kv_norm.weight",
    "attn.q_norm.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn_norm.weight",
    "ffn_norm.weight",
    "ffn.gate.bias",
    "ffn.gate.weight",
    "ffn.shared_experts.w1.weight",
    "ffn.shared_experts.w2.weight",
    "ffn.shared_experts.w3.weight",
    "hc_attn_base",
    "hc_attn_fn",
    "hc_attn_scale",
    "hc_ffn_base",
    "hc_ffn_fn",
    "hc_ffn_scale",
] + [f"ffn.experts.{i}.w{j}.weight" for i in range(4) for j in (1, 2, 3)]
HC_HEAD = ["hc_head_base", "hc_head_fn", "hc_head_scale", "norm.weight"]
V3 = [
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
] + [f"mlp.experts.{i}.{p}_proj.weight" for i in range(4) for p in ("gate", "up", "down")]
NAMES = {
    "v3": [f"model.layers.2.{name}" for name in V3],
    "mtp": [
        f"mtp.0.{name}"
        for name in [
            *ATTENTION,
            *HC_HEAD,
            "e_proj.weight",
            "h_proj.weight",
            "enorm.weight",
            "hnorm.weight",
        ]
    ],
    "dspark": [
        *(f"mtp.{i}.{name}" for i in range(3) for name in ATTENTION),
        *(f"mtp.2.{name}" for name in HC_HEAD),
        *("mtp.0.main_proj.weight", "mtp.0.main_norm.weight"),
        *(f"mtp.2.markov_head.markov_w{i}.weight" for i in (1, 2)),
    ],
}
"""As the released checkpoints have them, written down from their indexes."""
# What is another name here, by the rules of the published inference code.
V4_RULES = [
    (r"hc_(attn|ffn)_(\w+)", r"\1_hc.\2"),
    (r"attn_norm", "input_layernorm"),
    (r"ffn_norm", "post_attention_layernorm"),
    (r"attn\.attn_sink", "self_attn.sinks"),
    (r"attn\.q_norm", "self_attn.q_a_norm"),
    (r"attn\.kv_norm", "self_attn.kv_norm"),
    (r"attn\.w(\w+?)(_[ab])?\.weight", r"self_attn.\1\2_proj.weight"),
    (r"ffn\.gate\.bias", "mlp.gate.e_score_correction_bias"),
    (r"ffn\.gate\.weight", "mlp.gate.weight"),
    (r"ffn\.shared_experts\.w1", "mlp.shared_experts.gate_proj"),
    (r"ffn\.shared_experts\.w2", "mlp.shared_experts.down_proj"),
    (r"ffn\.shared_experts\.w3", "mlp.shared_experts.up_proj"),
]


def tensor_of(module: nn.Module, kind: str, name: str) -> Tensor:
    """The tensor that a checkpoint would have under ``name``."""
    state = module.state_dict()
    if kind == "v3":
        rest, block = name.removeprefix("model.layers.2."), "block."
        if rest == "shared_head.norm.weight":
            return state["norm.weight"]
        if rest in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            return state[rest]
        parts = {"gate": ("gate_up", 0), "up": ("gate_up", 1), "down": ("down", None)}
        pattern = r"mlp\.experts\.(\d)\.(gate|up|down)_proj\.weight"
    else:
        _, number, rest = name.split(".", 2)
        block = "block." if kind == "mtp" else f"blocks.{number}."
        if rest in HC_HEAD[:3]:
            return state[f"hc_head.{rest.removeprefix('hc_head_').join(['hc_', ''])}"]
        if (own := rest.removeprefix("markov_head.")) in state:
            return state[own]
        parts = {"1": ("gate_up", 0), "3": ("gate_up", 1), "2": ("down", None)}
        pattern = r"ffn\.experts\.(\d)\.w(\d)\.weight"
    if found := re.fullmatch(pattern, rest):
        which, half = parts[found[2]]
        expert = state[f"{block}mlp.experts.{which}_proj"][int(found[1])]
        return expert if half is None else expert.chunk(2)[half]
    if kind != "v3":
        for old, new in V4_RULES:
            if re.match(old, rest):
                rest = re.sub(f"^{old}", new, rest)
                break
    return state[block + rest]


def checkpoint(path: Path, module: nn.Module, kind: str, **changes: Tensor | None) -> Path:
    from safetensors.torch import save_file

    tensors = {name: tensor_of(module, kind, name).clone() for name in NAMES[kind]}
    for name, tensor in changes.items():
        for key in [k for k in tensors if k.endswith(name)]:
            del tensors[key]
            if tensor is not None:
                tensors[key] = tensor
    tensors["model.embed_tokens.weight"] = torch.zeros(2, 2)
    names = sorted(tensors)
    files = {"one": names[::2], "two": names[1::2]}
    for file, keys in files.items():
        save_file({key: tensors[key].contiguous() for key in keys}, path / f"{file}.safetensors")
    index = {"weight_map": {k: f"{f}.safetensors" for f, keys in files.items() for k in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def case(kind: str) -> tuple[Any, Any, Any]:
    model = model_of("v3" if kind == "v3" else "v4")
    module = draft_of(model, "dspark" if kind == "dspark" else "mtp").module
    return model, {"v3": Mtp, "mtp": StreamMtp, "dspark": DSpark}[kind], module


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("indexed", [True, False])
def test_speculative_weights_are_read_by_their_published_names(
    kind: str, indexed: bool, tmp_path: Path
) -> None:
    model, draft, module = case(kind)
    checkpoint(tmp_path, module, kind)
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    loaded = draft.load(model, tmp_path).module.state_dict()
    assert loaded.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("kind", NAMES)
def test_speculative_weights_that_are_not_there(kind: str, tmp_path: Path) -> None:
    model, draft, module = case(kind)
    gone = {"v3": "hnorm.weight", "mtp": "0.attn.wkv.weight", "dspark": "markov_w2.weight"}[kind]
    checkpoint(tmp_path, module, kind, **{gone: None})
    with pytest.raises(UnsupportedModel, match=re.escape(gone)):
        draft.load(model, tmp_path)
    checkpoint(tmp_path, module, kind, **{gone: torch.zeros(3, 5)})
    with pytest.raises(UnsupportedModel, match=r"\(3, 5\)"):
        draft.load(model, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UnsupportedModel, match="no draft weights"):
        draft.load(model, empty)


def test_speculative_weights_in_fp8(tmp_path: Path) -> None:
    """Blocks of 128 by 128 with a scale each; packed integers are refused by name."""
    from safetensors.torch import load_file, save_file

    model, draft, module = case("v3")
    path = checkpoint(tmp_path, module, "v3")
    name = "model.layers.2.eh_proj.weight"
    wide = tiny_model("v3", hidden_size=160)
    big = MtpModule(wide)
    assert big.eh_proj.weight.shape == (160, 320)
    for file in ("one", "two"):
        tensors = load_file(path / f"{file}.safetensors")
        tensors = {k: v for k, v in tensors.items() if k != name}
        if file == "one":
            tensors[name] = module.eh_proj.weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.tensor([[0.5]])
        save_file(tensors, path / f"{file}.safetensors")
    (path / "model.safetensors.index.json").unlink()
    got = draft.load(model, path).module.eh_proj.weight
    want = module.eh_proj.weight.to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(got, want)
    tensors = load_file(path / "one.safetensors")
    tensors[name] = torch.zeros(32, 64, dtype=torch.int8)
    save_file(tensors, path / "one.safetensors")
    with pytest.raises(UnsupportedModel, match=r"eh_proj.weight is packed torch.int8"):
        draft.load(model, path)


def test_speculative_scales_are_of_blocks() -> None:
    from kvtier_deepseek.drafts.weights import _scaled

    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    got = _scaled(torch.ones(130, 300), scales)
    assert got[127].unique_consecutive().tolist() == [1.0, 2.0, 4.0]
    assert got[128].unique_consecutive().tolist() == [8.0, 16.0, 32.0]
    assert got[0, 127:129].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dspark_noise_token_id", 97, "dspark_noise_token_id is 97"),
        ("dspark_target_layer_ids", [9], "dspark_target_layer_ids"),
        ("dspark_block_size", None, "dspark_block_size"),
    ],
)
def test_speculative_blocks_need_their_fields(field: str, value: Any, says: str) -> None:
    model = model_of("v4")
    was = getattr(model.config, field)
    setattr(model.config, field, value)
    try:
        with pytest.raises(UnsupportedModel, match=says):
            DSparkModule(model)
    finally:
        setattr(model.config, field, was)


def test_speculative_drafts_of_other_models() -> None:
    v2, v3, v4 = (model_of(layout) for layout in ("v2", "v3", "v4"))
    for draft, model in ((Mtp, v2), (Mtp, v4), (StreamMtp, v3), (DSpark, v3)):
        with pytest.raises(UnsupportedModel, match="has no"):
            draft(model, nn.Module())  # type: ignore[arg-type]
