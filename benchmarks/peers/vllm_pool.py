"""vLLM's prefix cache: block hashing, the block pool, and the longest-hit search.

The search takes block hashes, which vLLM computes once per request; figures named ``vllm`` leave
the hashing out, those named ``vllm+hash`` count it in.
"""

import os
import sys
from functools import partial
from typing import Any

from benchmarks.peers.common import emit, options, quiet_imports
from benchmarks.workload import Ids, Workload

quiet_imports()

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

SAMPLING = SamplingParams(max_tokens=1)
HASHED = 500  # requests kept as token lists for the `vllm+hash` figures


def run(block: int, work: Workload) -> None:
    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(block, hash_fn)

    def request(index: int, ids: Ids) -> Any:
        made = Request(str(index), ids.tolist(), SAMPLING, None)
        made.block_hashes = hasher(made)
        return made

    per_request = work.length // block
    pool = BlockPool(work.sequences * per_request + 2, True, block)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)

    def search(hashes: Any) -> Any:
        return FullAttentionManager.find_longest_cache_hit(
            hashes, work.length, [0], pool, spec, False, block
        )

    def insert(new: Any) -> None:
        found, _ = search(new.block_hashes)
        held = list(found[0])
        pool.touch(held)
        blocks = held + pool.get_new_blocks(per_request - len(held))
        pool.cache_full_blocks(new, blocks, len(held), per_request, block, 0)
        pool.free_blocks(reversed(blocks))

    def hash_and_search(waiting: Any) -> None:
        search(hasher(waiting))

    stored = [request(i, ids) for i, ids in enumerate(work.stored())]
    out = partial(emit, page=block, peer="vllm")
    out("peer.insert_us", [partial(insert, r) for r in stored])
    assert search(stored[-1].block_hashes)[1] == work.length
    out("peer.match_full_us", [partial(search, r.block_hashes) for r in stored])
    half = [request(i, ids).block_hashes for i, ids in enumerate(work.half_hits())]
    assert search(half[-1])[1] == work.shared
    out("peer.match_prefix_us", [partial(search, h) for h in half])
    missing = [request(i, ids).block_hashes for i, ids in enumerate(work.misses())]
    out("peer.miss_us", [partial(search, h) for h in missing])
    for waiting in stored[:HASHED]:
        waiting.block_hashes = []
    out(
        "peer.match_full_us",
        [partial(hash_and_search, r) for r in stored[:HASHED]],
        peer="vllm+hash",
    )


if __name__ == "__main__":
    wanted, _ = options(__doc__)
    for size in (64, 256):
        try:
            run(size, wanted)
        except Exception as error:  # noqa: BLE001  a peer's own failure is reported, not ours
            print(f"vllm, page {size}: {error!r}", file=sys.stderr)
    sys.stdout.flush()
    os._exit(0)  # its background threads would keep the process
