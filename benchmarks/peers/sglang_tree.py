"""SGLang's prefix trees: the classic one in Python, the unified one in Python and in Rust."""

import sys
from array import array
from functools import partial
from typing import Any

from benchmarks.peers.common import emit, options, quiet_imports
from benchmarks.workload import Ids, Workload

quiet_imports()

import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

KINDS = {"sglang-rust": "rust", "sglang-unified-py": "python", "sglang-classic-py": ""}


class Allocator:
    """Stands in for the slot allocator: takes back what eviction frees."""

    device = torch.device("cpu")
    freed = 0

    def free(self, slots: Any) -> None:
        self.freed += slots.numel()

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.freed += slots.numel()

    def available_size(self) -> int:
        return 0


def build(kind: str, page: int) -> Any:
    allocator = Allocator()
    if not KINDS[kind]:
        return RadixCache.create_simulated(mock_allocator=allocator, page_size=page)
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=KINDS[kind],
        )
    )


def key(ids: Ids) -> Any:
    packed = array("q")
    packed.frombytes(ids.astype("<i8").tobytes())
    return RadixKey(packed)


def run(kind: str, page: int, work: Workload) -> None:
    cache = build(kind, page)
    slots = torch.arange(work.length, dtype=torch.int64)
    stored = [key(ids) for ids in work.stored()]

    def match(found: Any) -> int:
        return int(cache.match_prefix(MatchPrefixParams(key=found)).device_prefix_len)

    def insert(new: Any) -> None:
        cache.insert(InsertParams(key=new, value=slots))

    out = partial(emit, page=page, peer=kind)
    out("peer.insert_us", [partial(insert, k) for k in stored])
    assert match(stored[-1]) == work.length // page * page
    out("peer.match_full_us", [partial(match, k) for k in stored])
    half = [key(ids) for ids in work.half_hits()]
    assert match(half[-1]) == work.shared // page * page
    out("peer.match_prefix_us", [partial(match, k) for k in half])
    missing = [key(ids) for ids in work.misses()]
    assert match(missing[-1]) == 0
    out("peer.miss_us", [partial(match, k) for k in missing])
    bite = partial(cache.evict, EvictParams(num_tokens=4_096))
    out("peer.evict4k_us", [bite] * 32)


if __name__ == "__main__":
    wanted, quick = options(__doc__)
    for kind in list(KINDS)[: 1 if quick else None]:  # the fastest alone
        for page in (64, 256):
            try:
                run(kind, page, wanted)
            except Exception as error:  # noqa: BLE001  a peer's own failure is reported, not ours
                print(f"{kind}, page {page}: {error!r}", file=sys.stderr)
