"""The control plane: matching, leasing, inserting, evicting, and the bookkeeping of a decode step.

Runs the real ``Cache`` over a data plane that ends every operation at once and moves nothing.
Single calls are timed, one thread, garbage collector off; peers are given the same token
sequences by ``benchmarks.peers`` in their own environment.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness import ROOT, Result, measure, summarise
from benchmarks.workload import VOCABULARY, Ids, Workload
from kvtier import Cache, CacheConfig, Lease, Op, OpKind, Record, Tier, TokenBuffer, pack
from kvtier.core.keys import ANONYMOUS
from kvtier.core.tree import RadixTree
from kvtier.layouts import Layout, mla
from kvtier.seams import ENTRY, Read

__all__ = ["run"]

PAGES = (64, 256)
LONG = 131_072
LEAVES = {64: (1_000, 100_000, 1_000_000), 256: (1_000, 100_000)}
PEERS = ("sglang_tree", "vllm_pool")


class Instant:
    """A ``Transfer`` whose operations end the moment they are started."""

    def fence(self, stream: object | None) -> None:
        pass

    def start(
        self,
        op: Op,
        *,
        packed: Callable[[], None],
        done: Callable[[int, BaseException | None], None],
    ) -> None:
        if op.kind is OpKind.PACK:
            packed()
        done(len(op.parts), None)

    def close(self) -> None:
        pass


class Index:
    """A ``Store`` that holds ``records`` first pages nobody asks for: what a miss looks up in."""

    capacity = 1 << 20

    def __init__(self, records: int) -> None:
        rng = np.random.default_rng(0)
        self._entries = np.zeros(records, ENTRY)
        self._entries["key"] = np.frombuffer(rng.bytes(16 * records), "V16")
        self._entries["depth"] = 1
        self._entries["frames"] = 1
        self._entries["tick"] = np.arange(records)

    def put_group(self, records: Sequence[Record]) -> None:
        raise AssertionError("nothing is stored here")

    def read_into(self, reads: Sequence[Read]) -> list[bool]:
        return [False] * len(reads)

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def touch(self, ticks: Sequence[tuple[bytes, int]]) -> None:
        pass

    def scan(self) -> npt.NDArray[np.void]:
        return self._entries

    def close(self) -> None:
        pass


def run(quick: bool, peers: Path | None = None) -> list[Result]:
    """Every control-plane figure at both page sizes; with the peers' if ``peers`` names an
    interpreter that has them."""
    work = Workload.of_size(quick=quick)
    results = [_pack_list(work, 50 if quick else 500)]
    for page in PAGES:
        results += _cache(page, work, quick=quick)
        results.append(_insert(page, work))
        results.append(_decode(page, steps=64 if quick else 512))
        results.append(_long_match(page, 100 if quick else 1_000))
        results += _evict_flat(page, (1_000, 10_000) if quick else LEAVES[page])
    if peers is None:
        return results
    theirs = _peers(peers, quick=quick)
    return [_beside(result, theirs) for result in results] + theirs


# ------------------------------------------------------------------ ours


def _layout(page: int) -> Layout:
    return mla(layers=1, latent_dim=8, rope_dim=8, page_tokens=page)


def _open(page: int, pages: int, *, disk: bool = False, leases: int = 256) -> Cache:
    layout = _layout(page)
    config = CacheConfig(
        gpu_bytes=pages * layout.page_bytes(),
        cpu_bytes="1MiB" if disk else 0,  # pages reach the disk through host memory
        max_leases=leases,
    )
    stores = {Tier.DISK: Index(100_000)} if disk else {}
    return Cache(layout, config, model="benchmark", device="cpu", transfer=Instant(), stores=stores)


def _serve(cache: Cache, tokens: TokenBuffer) -> None:
    """What a server does with a prompt, the model left out."""
    with cache.lease(tokens) as lease:
        known = lease.cached_tokens
        lease.reserve(len(tokens) - known)
        lease.commit(tokens[known:])


def _longer(ids: Ids) -> TokenBuffer:
    """The sequence and one token more, as a match never includes the last one."""
    return pack(np.append(ids, np.int32(7)))


def _time(name: str, calls: Sequence[Callable[[], object]], **params: int) -> Result:
    return summarise(name, measure(calls), unit="us", params=params)


def _cache(page: int, work: Workload, *, quick: bool) -> list[Result]:
    pages = work.sequences * (work.length - work.shared) // page + work.groups * work.shared // page
    stored = [pack(ids) for ids in work.stored()]
    queries = [_longer(ids) for ids in work.stored()]
    half = [pack(ids) for ids in work.half_hits()]
    misses = [pack(ids) for ids in work.misses()]
    out = []
    with _open(page, pages + 2 * work.length // page) as cache:
        out.append(_time("serve_us", [partial(_serve, cache, t) for t in stored], page=page))
        assert cache.match(queries[0]).tokens == cache.match(queries[-1]).tokens == work.length
        assert cache.match(half[-1]).tokens == work.shared
        assert cache.match(misses[-1]).tokens == 0
        out.append(_time("match_full_us", [partial(cache.match, q) for q in queries], page=page))
        out.append(_time("match_prefix_us", [partial(cache.match, q) for q in half], page=page))
        out.append(_time("miss_us", [partial(cache.match, q) for q in misses], page=page))

        def lease_and_release(tokens: TokenBuffer) -> None:
            cache.lease(tokens).release()

        out.append(
            _time("lease_full_us", [partial(lease_and_release, q) for q in queries], page=page)
        )
        free = cache.stats().tiers[Tier.GPU].free
        bites = 16 if quick else 128
        bite = partial(cache.evict, Tier.GPU, work.length // page)
        out.append(_time("evict4k_us", [bite] * bites, page=page))
        freed = cache.stats().tiers[Tier.GPU].free - free
        assert freed == bites * (work.length // page)
    with _open(page, 64, disk=True) as cache:
        out.append(_time("miss_disk_us", [partial(cache.match, q) for q in misses], page=page))
    return out


def _insert(page: int, work: Workload) -> Result:
    tree = RadixTree(page)
    root = tree.root(ANONYMOUS)
    calls = [partial(tree.extend, root, pack(ids).data, 0) for ids in work.stored()]
    result = _time("insert_us", calls, page=page)
    unique = work.sequences * (work.length - work.shared) + work.groups * work.shared
    assert tree.num_nodes <= unique // page
    return result


def _evict_flat(page: int, leaves: Sequence[int]) -> list[Result]:
    """Freeing 4,096 tokens when every page is a leaf of its own."""
    out = []
    rng = np.random.default_rng(1)
    per_bite = 4_096 // page
    for count in leaves:
        with _open(page, count + 2) as cache:
            for _ in range(0, count, 1_000):
                for ids in rng.integers(0, VOCABULARY, (1_000, page), dtype=np.int32):
                    _serve(cache, pack(ids))
            bites = min(64, count // per_bite // 2)
            bite = partial(cache.evict, Tier.GPU, per_bite)
            out.append(_time("evict4k_us", [bite] * bites, page=page, leaves=count))
    return out


def _long_match(page: int, times: int) -> Result:
    ids = np.random.default_rng(2).integers(0, VOCABULARY, LONG + 1, dtype=np.int32)
    tokens = pack(ids)
    with _open(page, LONG // page + 2) as cache:
        with cache.lease(tokens) as lease:
            for start in range(0, LONG, 8_192):  # as chunked prefill would
                lease.reserve(8_192)
                lease.commit(tokens[start : start + 8_192])
        assert cache.match(tokens).tokens == LONG
        return _time("match_128k_us", [partial(cache.match, tokens)] * times, page=page)


def _decode(page: int, steps: int, batch: int = 256, context: int = 1_000) -> Result:
    rng = np.random.default_rng(3)
    pages = batch * ((context + steps) // page + 2)
    with _open(page, pages, leases=batch) as cache:
        leases: list[Lease] = []
        for ids in rng.integers(0, VOCABULARY, (batch, context), dtype=np.int32):
            lease = cache.lease(ids)
            lease.reserve(context)
            lease.commit(ids)
            leases.append(lease)
        drawn = rng.integers(0, VOCABULARY, (steps, batch)).tolist()

        def step(tokens: list[int]) -> None:
            with cache.step([(lease, [t]) for lease, t in zip(leases, tokens, strict=True)]) as s:
                assert s.kv_lens is not None
                assert s.slot_mapping["latent"] is not None

        result = _time("decode_step_us", [partial(step, t) for t in drawn], page=page, batch=batch)
        assert leases[-1].num_tokens == context + steps
        for lease in leases:
            lease.release()
        return result


def _pack_list(work: Workload, times: int) -> Result:
    lists = [ids.tolist() for ids, _ in zip(work.stored(), range(times), strict=False)]
    return _time("pack_list_us", [partial(pack, each) for each in lists], tokens=work.length)


# ------------------------------------------------------------------ theirs


def _peers(python: Path, *, quick: bool) -> list[Result]:
    """The peers' figures; a peer that does not run is named and left out."""
    out: list[Result] = []
    for peer in PEERS:
        command = [str(python), "-W", "ignore", "-m", f"benchmarks.peers.{peer}"]
        done = subprocess.run(
            command + ["--quick"] * quick, cwd=ROOT, capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        out += [Result(**json.loads(line)) for line in lines]
        if done.returncode or not lines:
            print(f"{peer} did not run: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return out


def _beside(ours: Result, theirs: Sequence[Result]) -> Result:
    """``ours`` beside the fastest peer at the same page size."""
    if "leaves" in ours.params:
        return ours
    same = [
        t.median
        for t in theirs
        if t.name == f"peer.{ours.name}" and t.params["page"] == ours.params.get("page")
    ]
    return ours.against(min(same, default=None))
