"""V3.2's rows and keys in every tier: hits at any boundary, packed bytes, tiny pools, drafts."""

import sys
from functools import cache as memo
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier import Cache, Tier
from kvtier.kernels import RECORDS, write_records
from kvtier.layouts import mla_indexed
from kvtier_deepseek import NGram, attach, speculate
from tests.adapter.drafts_kit import Forced
from tests.adapter.models import full_logits, hf_greedy, random_tokens
from tests.adapter.swa_kit import (
    cut,
    every_boundary_of_every_tier,
    feed,
    near,
    poison_free,
    run,
)
from tests.adapter.test_swa_parity import rounded_latent
from tests.adapter.v32_kit import LOGITS, PACKED, new_model, open_cache, v32_model
from tests.device.byte_model import DeviceModel, prompt, sized

TOPK = 8
LENGTH = 45


@memo
def wanted(tokens: tuple[int, ...]) -> Tensor:
    return full_logits(v32_model(index_topk=TOPK), [*tokens])


def test_resume_from_every_boundary_of_every_tier(tmp_path: Path) -> None:
    model, tokens = v32_model(index_topk=TOPK), random_tokens(LENGTH)
    opened = partial(open_cache, model, tmp_path, gpu=60, cpu=150)
    every_boundary_of_every_tier(model, opened, tokens, wanted(tuple(tokens)), LOGITS)


def test_tiny_pools(tmp_path: Path) -> None:
    """Four conversations through a device of little more than one, and a host of two."""
    model = v32_model(index_topk=TOPK)
    prompts = [random_tokens(30, seed) for seed in range(4)]
    seen = dict.fromkeys(Tier, 0)
    with (
        open_cache(model, tmp_path, gpu=8, cpu=12, max_leases=2) as cache,
        attach(model, cache) as adapter,
    ):
        for _ in range(3):
            for i, prompt in enumerate(prompts):
                with cache.lease(prompt) as lease:
                    done = lease.ready.result(timeout=300)
                    poison_free(cache)
                    got = run(cache, adapter, lease, prompt, cut(len(prompt), 11, done))
                    near(got, full_logits(model, prompt)[done:], LOGITS)
                    for tier, n in lease.restored.items():
                        seen[tier] += n
                prompts[i] = [*prompt, *random_tokens(5, i)]
                cache.flush().result(timeout=300)
                cache.check()
    assert seen[Tier.CPU] > 0 and seen[Tier.DISK] > 0, seen


def test_forks_and_pauses() -> None:
    model, trunk = v32_model(index_topk=TOPK), random_tokens(21, 1)
    tails = [random_tokens(9, 2), random_tokens(9, 3)]
    with open_cache(model, cpu=60) as cache, attach(model, cache) as adapter:
        one = cache.lease([])
        feed(cache, adapter, (one, trunk))
        one.pause().result(timeout=300)
        poison_free(cache)
        assert one.resume().result(timeout=300) == 21
        with one, one.fork() as two:
            two.ready.result(timeout=300)
            got = feed(cache, adapter, (one, tails[0]), (two, tails[1]))
            for logits, tail in zip(got, tails, strict=True):
                near(logits, wanted(tuple(trunk + tail))[21:], LOGITS)


def test_keys_are_written_where_nothing_is_chosen_yet() -> None:
    """A first chunk shorter than ``index_topk`` is chosen from by later queries."""
    model, tokens = v32_model(index_topk=TOPK), random_tokens(20)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        feed(cache, adapter, (lease, tokens[:TOPK]))
        slots = torch.from_numpy(lease.slot_mapping(0, TOPK)["index"].astype("int64"))
        pool: Any = cache._pool
        assert pool.rows("index", 1)[slots].isfinite().all()


@pytest.mark.parametrize("broken", ["latent", "index"])
def test_every_component_is_read(broken: str) -> None:
    model, tokens = v32_model(index_topk=TOPK), random_tokens(30)
    with open_cache(model) as cache, attach(model, cache) as adapter, cache.lease([]) as lease:
        feed(cache, adapter, (lease, tokens[:20]))
        pool: Any = cache._pool
        for (name, _), storage in pool._storage.items():
            if name == broken:  # of keys, half are turned around
                values = storage.view(torch.float32)
                values[::2] *= -1
        (got,) = feed(cache, adapter, (lease, tokens[20:21]))
    assert (got[0] - full_logits(model, tokens[:21])[20]).abs().max() > 1e-3


class TestPacked:
    """B2: 656 and 132 bytes a token and layer."""

    def test_bytes_in_pages(self) -> None:
        """What the model's own submodules make of each token, packed by the reference."""
        model, tokens = v32_model(**PACKED, index_topk=TOPK), random_tokens(20)
        kept: dict[tuple[int, str], Tensor] = {}

        def keep(layer: int, name: str) -> Any:
            return lambda _, __, out: kept.update({(layer, name): out})

        hooks = []
        for i, layer in enumerate(model.model.layers):
            m = layer.self_attn
            for name, module in (
                ("latent", m.kv_a_layernorm),
                ("rope", m.kv_a_proj_with_mqa),
                ("key", m.indexer.k_norm),
            ):
                hooks.append(module.register_forward_hook(keep(i, name)))
        with (
            open_cache(model, record="fp8", index_record="fp8") as cache,
            attach(model, cache) as adapter,
            cache.lease([]) as lease,
        ):
            run(cache, adapter, lease, tokens, [20])
            slots = torch.from_numpy(lease.slot_mapping(0, 20)["latent"].astype("int64"))
            pool: Any = cache._pool
            turns = model.model.rotary_emb(torch.zeros(1), torch.arange(20)[None])
            home = sys.modules[type(model).__module__]
            for i in range(2):
                rope = kept[i, "rope"][..., 512:].unsqueeze(1)
                _, rope = home.apply_rotary_pos_emb_interleave(rope, rope, *turns)
                row = torch.cat((kept[i, "latent"][0], rope[0, 0]), dim=-1)
                key = kept[i, "key"].unsqueeze(1)
                _, turned = home.apply_rotary_pos_emb(key[..., :64], key[..., :64], *turns)
                key = torch.cat((turned[0, 0], key[0, 0, :, 64:]), dim=-1)
                for name, values, record in (
                    ("latent", row, "mla_fp8"),
                    ("index", key, "index_fp8"),
                ):
                    got = pool.rows(name, i)
                    expected = torch.full_like(got, 0xFF)
                    write_records(expected, slots, values, RECORDS[record])
                    assert torch.equal(got, expected)  # and nothing beside them
        for hook in hooks:
            hook.remove()

    def test_logits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """AT-3.7: HF's own code with rows rounded as they are packed; everything is chosen, so
        keys do not matter."""
        model, tokens = new_model(**PACKED), random_tokens(40)
        plain = full_logits(model, tokens)
        home = sys.modules[type(model).__module__]
        turn = home.apply_rotary_pos_emb_interleave

        def turned(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            query, key = turn(query, key, *rest)
            return query, key.bfloat16().float()

        hooks = [
            layer.self_attn.kv_a_layernorm.register_forward_hook(
                lambda *args: rounded_latent(args[2])
            )
            for layer in model.model.layers
        ]
        with monkeypatch.context() as patch:
            patch.setattr(home, "apply_rotary_pos_emb_interleave", turned)
            want = full_logits(model, tokens)
        for hook in hooks:
            hook.remove()
        with (
            open_cache(model, record="fp8", index_record="fp8") as cache,
            attach(model, cache) as adapter,
            cache.lease([]) as lease,
        ):
            got = run(cache, adapter, lease, tokens, [13, 1, 1, 25])
        # A value on the edge between two codes may fall to either side: most logits are equal.
        off = (got - want).abs().amax(-1)
        assert off.median() <= 2e-5
        assert off.quantile(0.9) <= 0.1 * (plain - want).abs().amax(-1).median()

    def test_most_of_a_selection_survives_packed_keys(self) -> None:
        """What fp8 keys and queries choose is nearly what float32 ones do."""
        model, tokens = v32_model(**PACKED, index_topk=TOPK), random_tokens(60)
        picked: dict[str, list[list[int]]] = {}
        for record in ("dense", "fp8"):
            with (
                open_cache(model, index_record=record) as cache,
                attach(model, cache) as adapter,
                cache.lease([]) as lease,
            ):
                first, heard = adapter._family.layers[0], []
                select = type(first)._select

                def listen(layer: Any, run: Any, *rest: Any) -> Tensor:
                    slots: Tensor = select(layer, run, *rest)  # noqa: B023
                    if layer.index == 0:
                        heard.append(slots)  # noqa: B023
                    return slots

                type(first)._select = listen
                try:
                    feed(cache, adapter, (lease, tokens))
                finally:
                    type(first)._select = select
                picked[record] = heard[0][TOPK:].tolist()
        same = [len({*a} & {*b}) for a, b in zip(picked["dense"], picked["fp8"], strict=True)]
        assert sum(same) > 0.9 * TOPK * len(same)
        assert picked["dense"] != picked["fp8"]

    def test_resume_equals_recompute(self, tmp_path: Path) -> None:
        """Bytes come back from the disk as they were, so logits of what follows are the same."""
        model, tokens = v32_model(**PACKED, index_topk=TOPK), random_tokens(40)
        options: dict[str, Any] = {"record": "fp8", "index_record": "fp8", "cpu": 60}
        with open_cache(model, tmp_path, **options) as cache, attach(model, cache) as adapter:
            with cache.lease([]) as lease:
                want = run(cache, adapter, lease, tokens, [24, 16])
            cache.flush().result(timeout=300)
        with open_cache(model, tmp_path, **options) as cache, attach(model, cache) as adapter:
            with cache.lease(tokens, max_reuse=24) as lease:
                assert lease.ready.result(timeout=300) == 24
                assert lease.restored[Tier.DISK] == 24
                poison_free(cache)
                assert torch.equal(run(cache, adapter, lease, tokens, [16]), want[24:])


def test_bytes_of_both_components_are_those_of_their_tokens(tmp_path: Path) -> None:
    """B7, the byte model: packed rows and keys, planes apart, in every tier."""
    layout = mla_indexed(layers=2, latent_dim=512, rope_dim=64, record="fp8", page_tokens=8)
    config = sized(layout, gpu=30, cpu=60, disk_path=tmp_path, disk_bytes="1GiB")
    tokens = prompt(59)
    with Cache(layout, config, model="bytes", device="cpu") as cache:
        model = DeviceModel(cache)
        model.pool.poison_all()
        with cache.lease(tokens) as lease:
            model.prefill(lease, tokens, chunk=5)
            for i in range(10):
                model.feed(lease, [i], rejected=i % 4)
                model.poison()
                model.check(lease)
        cache.flush().result(timeout=300)
        for tiers in ((), (Tier.GPU,), (Tier.GPU, Tier.CPU)):
            model.evict(*tiers)
            with cache.lease(tokens) as lease:
                assert lease.ready.result(timeout=300) == 56
                assert model.check(lease) == 2 * 2 * 56
            cache.flush().result(timeout=300)
        cache.check()


@pytest.mark.parametrize("accepted", range(4))
def test_speculative_tokens_are_those_of_plain_decoding(accepted: int) -> None:
    """Greedy verification of drafts of which as many as that, round by round, are right."""
    model, prompt = v32_model(index_topk=TOPK), random_tokens(21, 3)
    want = hf_greedy(model, prompt, 40)
    with open_cache(model, gpu=60, max_draft=4) as cache, attach(model, cache) as adapter:
        forced = Forced(NGram(), [*prompt, *want, *[0] * 5], lambda i: (i + accepted) % 5)
        got = speculate(adapter, cache, prompt, 40, proposer=forced)
        assert list(got.tokens) == want
        assert 0 < forced.rounds < 40
        cache.check()
