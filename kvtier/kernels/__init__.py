"""Kernels over paged rows, and the table that says which backend runs which.

The references in plain torch are public: they say what every other backend must do.
"""

from kvtier.kernels.case import Case, Load
from kvtier.kernels.compress import ClosedEntries, compress
from kvtier.kernels.fused import (
    LatentRope,
    compress_write,
    index_query,
    write_latent,
    write_normed,
)
from kvtier.kernels.index import index_topk
from kvtier.kernels.mla import (
    HeadDims,
    PagedBatch,
    absorbed,
)
from kvtier.kernels.mla_sparse import mla_sparse, mla_sparse_materialised
from kvtier.kernels.prefill import (
    Workspace,
    check_budget,
    materialised,
    materialised_sdpa,
    row_bytes,
    workspace_rows,
)
from kvtier.kernels.prefill_plan import PrefillPlan, Span, plan_chunks, plan_of
from kvtier.kernels.query import (
    head_norm_rope,
    inverse_rope,
    norm_rope,
    quantise_query,
    rms_norm,
    rope,
)
from kvtier.kernels.records import RECORDS, Record, read_records, write_records
from kvtier.kernels.reference import attend, gather_rows, merge, write_rows
from kvtier.kernels.slots import (
    c4_slots,
    c128_slots,
    closed_entries,
    entry_slots,
    token_positions,
    token_slots,
    window_slots,
)
from kvtier.kernels.sparse import apply_sink, sparse_attend
from kvtier.kernels.table import OPERATIONS, Kernel, choices, select, select_all, table

__all__ = [
    "OPERATIONS",
    "RECORDS",
    "Case",
    "ClosedEntries",
    "HeadDims",
    "Kernel",
    "LatentRope",
    "Load",
    "PagedBatch",
    "PrefillPlan",
    "Record",
    "Span",
    "Workspace",
    "absorbed",
    "apply_sink",
    "attend",
    "c4_slots",
    "c128_slots",
    "check_budget",
    "choices",
    "closed_entries",
    "compress",
    "compress_write",
    "entry_slots",
    "gather_rows",
    "head_norm_rope",
    "index_query",
    "index_topk",
    "inverse_rope",
    "materialised",
    "materialised_sdpa",
    "merge",
    "mla_sparse",
    "mla_sparse_materialised",
    "norm_rope",
    "plan_chunks",
    "plan_of",
    "quantise_query",
    "read_records",
    "rms_norm",
    "rope",
    "row_bytes",
    "select",
    "select_all",
    "sparse_attend",
    "table",
    "token_positions",
    "token_slots",
    "window_slots",
    "workspace_rows",
    "write_latent",
    "write_normed",
    "write_records",
    "write_rows",
]
