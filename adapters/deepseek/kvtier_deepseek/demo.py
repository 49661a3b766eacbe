"""``kvtier demo``: two conversations about a book, served from device, host and disk.

Small DeepSeek models, V3 and V4 unless another is asked for, with random weights and a byte
tokenizer; tiers so small that the device and the host must evict.  Half way the process ends, and a
new one goes on from what is on disk.  Every generated token is compared with plain ``generate()``
of an untouched copy of the model.
"""

import argparse
import copy
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from multiprocessing import get_context
from os import getpid
from pathlib import Path
from shutil import get_terminal_size
from time import perf_counter
from typing import Any

import torch

from kvtier import Cache, CacheConfig, KVTierError, Tier
from kvtier_deepseek.attach import attach
from kvtier_deepseek.config import layout_for
from kvtier_deepseek.runner import Generation, generate

__all__ = ["main"]

NEW_TOKENS = 16
SEED = 20
OPENING = "You read a book aloud with a friend, and say after each passage what you make of it.\n"
READERS = ("Ann", "Ben")
PASSAGES = 16
TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)
DEFAULT = ("v3", "v4")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played with one architecture."""

    title: str
    first: str
    """Whose turn it is, before the process ends."""
    second: str
    """And after."""
    longest: int
    """Tokens that the longest prompt comes to, at least."""
    layout: Mapping[str, Any]
    device_bytes: int | str
    """Room for about one conversation."""
    host_bytes: int | str
    """Room for less than both."""


# Dense pages are 49,152 bytes here.
_DENSE = Scene(
    title="",
    first="AABABBABABAB",
    second="ABAB",
    longest=3000,
    layout={"page_tokens": 64, "dtype": torch.float32},
    device_bytes="2250KiB",
    host_bytes="2700KiB",
)
SCENES = {
    "v2": replace(_DENSE, title="DeepSeek-V2"),
    "v3": replace(_DENSE, title="DeepSeek-V3"),
    # Shorter: plain ``generate()`` scores every token against every other with every index head.
    "v32": replace(
        _DENSE,
        title="DeepSeek-V3.2",
        first="AABBAB",
        second="AB",
        longest=1700,
        layout={**_DENSE.layout, "index_record": "dense"},
        device_bytes="1900KiB",
        host_bytes="1900KiB",
    ),
    # Plain float32 records, so that tokens can be compared; real ones round keys to fp8.
    "v4": Scene(
        title="DeepSeek-V4",
        first="AABABBAB",
        second="ABA",
        longest=2500,
        layout={"record": "fp32", "index_record": "fp32"},
        device_bytes="5200KiB",
        host_bytes="1680KiB",
    ),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One line of the table."""

    process: int
    reader: str
    result: Generation
    equal: bool
    """Whether every token is the one that plain ``generate()`` gives."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one process did; travels back to the one that started it."""

    turns: list[Turn]
    transcripts: dict[str, list[int]]
    device_evictions: int
    host_evictions: int
    reference_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.  0 if all tokens are right and every tier has restored some, 1 if not, 2 if it
    could not run."""
    parser = argparse.ArgumentParser(
        prog="kvtier demo", description=(__doc__ or "").replace("``", "")
    )
    parser.add_argument("--arch", choices=(*SCENES,), help="one of them only")
    parser.add_argument("--dir", type=Path, help="keep the disk tier here (default: temporary)")
    options = parser.parse_args(argv)
    if options.dir and options.dir.exists() and not options.dir.is_dir():
        print(f"kvtier demo: {options.dir} is not a directory", file=sys.stderr)
        return 2
    held = nullcontext(options.dir) if options.dir else tempfile.TemporaryDirectory()
    with held as directory:
        for number, arch in enumerate([options.arch] if options.arch else DEFAULT):
            print("\n" * (number > 0), end="")
            if status := _play(arch, Path(directory)):
                return status
    return 0


def _play(arch: str, directory: Path) -> int:
    """Both halves of a scene; exit status."""
    scene = SCENES[arch]
    print(f"A random {scene.title} model; disk tier in {directory}\n")
    transcripts = {reader: list(OPENING.encode()) for reader in READERS}
    try:
        first = _in_a_process(arch, directory, scene.first, transcripts, 0)
        print("\nThat process has ended; a new one opens the same directory.\n")
        second = _in_a_process(arch, directory, scene.second, first.transcripts, len(scene.first))
    except (KVTierError, OSError, ImportError) as error:
        print(f"kvtier demo: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print("kvtier demo: the process that served was killed", file=sys.stderr)
        return 2
    return _verdict(scene, first, second)


def _in_a_process(
    arch: str, directory: Path, order: str, transcripts: dict[str, list[int]], passage: int
) -> Served:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        served = pool.submit(serve, arch, directory, order, transcripts, passage).result()
    _print_table(served)
    return served


def serve(
    arch: str, directory: Path, order: str, transcripts: dict[str, list[int]], passage: int
) -> Served:
    """Play the turns of ``order`` from the given passage of the book on, in this process."""
    torch.set_num_threads(1)  # tensors are small: more would wait for one another
    scene = SCENES[arch]
    model = make_model(arch)
    plain = copy.deepcopy(model)
    layout = layout_for(model.config, **scene.layout)
    passages = _passages(PASSAGES)[passage:]
    transcripts = {reader: list(tokens) for reader, tokens in transcripts.items()}
    turns: list[Turn] = []
    reference_s = 0.0
    bar = _Bar(len(order))
    sizes = CacheConfig(
        gpu_bytes=scene.device_bytes,
        cpu_bytes=scene.host_bytes,
        disk_bytes="64MiB",
        disk_path=directory,
        max_leases=1,
    )
    with (
        Cache(layout, sizes, model=f"demo-{arch}-{SEED}", device="cpu") as cache,
        attach(model, cache) as adapter,
    ):
        for number, (initial, text) in enumerate(zip(order, passages, strict=False)):
            reader = next(name for name in READERS if name.startswith(initial))
            prompt = transcripts[reader] + list(f"{reader}: {text}\nYou: ".encode())
            bar.turn(number, reader, len(prompt) + NEW_TOKENS)
            result = generate(
                adapter, cache, prompt, NEW_TOKENS, chunk=256, label=reader, progress=bar.tokens
            )
            bar.show("comparing with generate()")
            started = perf_counter()
            expected = _plain_tokens(plain, prompt)
            reference_s += perf_counter() - started
            turns.append(Turn(getpid(), reader, result, list(result.tokens) == expected))
            transcripts[reader] = [*prompt, *result.tokens, *b"\n"]
        bar.close()
        cache.flush().result()
        tiers = cache.stats().tiers
    return Served(
        turns,
        transcripts,
        tiers[Tier.GPU].evictions,
        tiers[Tier.CPU].evictions,
        reference_s,
    )


def make_model(arch: str) -> Any:
    """A small model of the architecture, with the same random weights in every process."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the demo needs transformers: pip install 'kvtier[deepseek]'") from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    model: Any
    if arch == "v4":
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**_V4))
    elif arch == "v32":
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**_V32))
    elif arch == "v3":
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_DENSE_SIZES))
    else:
        model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**_DENSE_SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):  # zero by default
                parameter.normal_(0, 0.5)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to
                buffer.copy_(torch.randint(0, _V4["n_routed_experts"], buffer.shape))
    return model.eval()


_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DENSE_SIZES: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# As many index heads as it takes for scores not to be exactly zero, and tie.
_V32: dict[str, Any] = {
    **_DENSE_SIZES,
    "attn_implementation": "eager",
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 256,
}
# One layer of each kind; windows and groups as in the released models, heads smaller.
_V4: dict[str, Any] = {
    **_COMMON,
    "attn_implementation": "eager",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "sliding_window": 128,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def _passages(count: int) -> list[str]:
    """The book in ``count`` pieces of about equal length, cut between words."""
    words = files("kvtier_deepseek").joinpath("data/alice.txt").read_text("utf-8").split()
    cuts = [len(words) * i // count for i in range(count + 1)]
    return [" ".join(words[a:b]) for a, b in pairwise(cuts)]


def _plain_tokens(plain: Any, prompt: list[int]) -> list[int]:
    """What ``generate()`` of a model that no adapter has touched appends."""
    ids = torch.tensor([prompt])
    out = plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


class _Bar:
    """A progress bar: one line that is written over on a terminal, one line per turn elsewhere."""

    WIDTH = 32

    def __init__(self, turns: int) -> None:
        self._turns, self._turn, self._reader, self._goal = turns, 0, "", 1
        self._live = sys.stderr.isatty()

    def turn(self, turn: int, reader: str, goal: int) -> None:
        """Turn number ``turn`` begins; ``goal`` tokens will be in the cache at its end."""
        self._turn, self._reader, self._goal = turn, reader, goal
        self._write("starting", 0.0, end="\n")

    def tokens(self, done: int) -> None:
        """``done`` of the turn's tokens are in the cache."""
        if self._live:
            self._write(f"{done:5d} tokens", min(done / self._goal, 1.0))

    def show(self, text: str) -> None:
        if self._live:
            self._write(text, 1.0)

    def close(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
        else:
            sys.stderr.write("100%  done\n")
        sys.stderr.flush()

    def _write(self, text: str, done: float, end: str = "") -> None:
        share = (self._turn + done) / self._turns
        bar = ("#" * round(share * self.WIDTH)).ljust(self.WIDTH, ".")
        line = f"[{bar}] {share:4.0%}  turn {self._turn + 1}/{self._turns}  {self._reader}  {text}"
        if self._live:  # cut to the terminal: what wraps is not written over
            sys.stderr.write("\r" + line[: get_terminal_size().columns - 1] + "\x1b[K")
        else:
            sys.stderr.write(line + end)
        sys.stderr.flush()


def _print_table(served: Served) -> None:
    print("process  turn  reader  prompt  device  host  disk  computed    time  tokens")
    for number, turn in enumerate(served.turns, start=1):
        r = turn.result
        tiers = "  ".join(
            f"{r.restored.get(tier, 0):{width}d}"
            for tier, width in zip(TIERS, (6, 4, 4), strict=True)
        )
        print(
            f"{turn.process:7d}  {number:4d}  {turn.reader:6s}  {r.prompt_tokens:6d}  {tiers}  "
            f"{r.computed:8d}  {r.seconds:5.2f} s  {'equal' if turn.equal else 'DIFFERENT'}"
        )


def _verdict(scene: Scene, first: Served, second: Served) -> int:
    turns = first.turns + second.turns
    restored = {t: sum(turn.result.restored.get(t, 0) for turn in turns) for t in TIERS}
    after_restart = sum(turn.result.restored.get(Tier.DISK, 0) for turn in second.turns)
    prompts = sum(turn.result.prompt_tokens for turn in turns)
    computed = sum(turn.result.computed for turn in turns)
    longest = max(turn.result.prompt_tokens for turn in turns)
    ours = sum(turn.result.seconds for turn in turns)
    print(
        f"\n{prompts} prompt tokens in {len(turns)} turns, the longest {longest}: "
        f"{computed} computed,\n"
        f"{restored[Tier.GPU]} restored from the device, {restored[Tier.CPU]} from the host, "
        f"{restored[Tier.DISK]} from disk\n({after_restart} of them after the restart).\n"
        f"{first.device_evictions + second.device_evictions} pages left the "
        f"device and {first.host_evictions + second.host_evictions} the host on the way.\n"
        f"{ours:.1f} s here, {first.reference_s + second.reference_s:.1f} s by plain generate()."
    )
    checks = {
        "every generated token equals plain generate()": all(turn.equal for turn in turns),
        "device, host and disk each restored tokens": min(restored.values()) > 0,
        "the new process restored from disk": after_restart > 0,
        "device and host evicted": first.device_evictions > 0 and first.host_evictions > 0,
        f"the conversations are over {scene.longest:,} tokens long": longest > scene.longest,
        "two processes served": len({turn.process for turn in turns}) == 2,
    }
    for what, holds in checks.items():
        print(f"  {'ok    ' if holds else 'FAILED'}  {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
