"""Choosing entries on a GPU: one layer's ``index_topk``, scores, choice and slots together.

Every size is a CUDA graph of calls over several sets of random inputs, which together are larger
than the L2 cache where there are few queries.  What is chosen is compared with the reference
first: ``equal`` is the share of the entries that both have chosen, which sums in another order may
keep from being 1.  Sizes are V3.2's, which scores every token, and V4's, which scores one entry of
four.  Without a GPU only toy sizes of the reference are of use, and tested.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention_parts import PAGE, ROTATE_BYTES, Call, paged_batch
from benchmarks.bench_attention import TURNS, called, replayed
from benchmarks.harness import Result, summarise
from kvtier.kernels import RECORDS, Case, Record, select, write_records

__all__ = ["Size", "measure", "run"]

HEADS, DIM = 64, 128
"""Of an index query, V3.2's and V4's alike."""
MOST_SETS = 32
LEAST_EQUAL = 0.999
"""Less than this is no matter of rounding."""


@dataclass(frozen=True, slots=True)
class Size:
    """``queries`` new tokens in each of ``sequences``, behind as many tokens that ``entries`` of
    one in ``ratio`` are there to choose ``topk`` of."""

    sequences: int
    queries: int
    entries: int
    topk: int
    ratio: int = 1

    @property
    def params(self) -> dict[str, int]:
        return {
            "sequences": self.sequences,
            "queries": self.queries,
            "entries": self.entries,
            "topk": self.topk,
        }


SIZES = (
    *(Size(1, 1, entries, 2048) for entries in (4096, 32768, 131072)),
    Size(8, 1, 8192, 2048),
    Size(32, 1, 8192, 2048),
    Size(64, 1, 16384, 2048),
    Size(1, 512, 8192, 2048),
    Size(4, 128, 32768, 2048),
    Size(1, 1, 32768, 512, ratio=4),
    Size(32, 1, 32768, 512, ratio=4),
    Size(1, 1024, 32768, 512, ratio=4),
)
TOY = (Size(2, 1, 24, 8), Size(1, 3, 20, 8, ratio=4))


def run(quick: bool) -> list[Result]:
    """``index_topk_us``: microseconds of a call.  Without a GPU, nothing."""
    if not torch.cuda.is_available():
        print("index: needs a CUDA device")
        return []
    return list(measure(SIZES[::2] if quick else SIZES, "triton", "cuda"))


def measure(sizes: tuple[Size, ...], backend: str, device: str) -> Iterator[Result]:
    """Of every size that does not fail."""
    for size in sizes:
        try:
            yield _measure(size, backend, device)
        except Exception as error:  # noqa: BLE001  one size must not lose the others
            print(f"index {size}: {type(error).__name__}: {error}", flush=True)


def _measure(size: Size, backend: str, device: str) -> Result:
    torch.manual_seed(0)
    record = RECORDS["index_fp8"]
    tokens = size.entries * size.ratio
    batch = paged_batch([(size.queries, tokens)] * size.sequences, PAGE * size.ratio, device)
    pages = int(batch.block_table.max()) + 1
    n = size.sequences * size.queries
    case = Case("index_topk", record.name, (DIM,), torch.bfloat16, device)

    def calls(name: str, sets: int) -> list[Call]:
        choose = select(case, backend=name).run
        options = {"ratio": size.ratio, "topk": size.topk, "record": record, "slots": True}
        torch.manual_seed(1)
        return [
            partial(
                choose,
                torch.randn(n, HEADS, DIM, device=device).to(torch.bfloat16),
                torch.rand(n, HEADS, device=device),
                _pages(record, pages, device),
                batch,
                **options,
            )
            for _ in range(sets)
        ]

    ours = calls(backend, max(2, min(MOST_SETS, ROTATE_BYTES // (pages * record.page_bytes(PAGE)))))
    equal = _equal(ours[0](), calls("torch", 1)[0]())
    timer = replayed if device == "cuda" else called
    samples = timer({backend: ours}, TURNS)[backend]
    result = summarise(
        "index_topk_us", samples, unit="us", params={**size.params, "backend": backend}
    )
    print(f"{size}: {result.median:.1f} us, equal {equal:.4f}", flush=True)
    if equal < LEAST_EQUAL:
        raise ValueError(f"only {equal:.4f} of what is chosen is what the reference chose")
    return result


def _pages(record: Record, pages: int, device: str) -> Tensor:
    out = torch.zeros(pages, record.page_bytes(PAGE), dtype=torch.uint8, device=device)
    slots = torch.arange(pages * PAGE, device=device)
    write_records(out, slots, torch.randn(len(slots), DIM, device=device), record)
    return out


def _equal(ours: Tensor, theirs: Tensor) -> float:
    """Share of slots in both, row by row."""
    both = torch.cat((ours.sort(1).values, theirs.sort(1).values), 1).sort(1).values
    return float((both[:, 1:] == both[:, :-1]).sum() / ours.numel())
