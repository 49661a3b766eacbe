"""Kernels over paged rows, and the table that says which backend runs which.

The references in plain torch are public: they say what every other backend must do.
"""

from kvtier.kernels.mla import (
    HeadDims,
    PagedBatch,
    absorbed,
    materialised,
    materialised_sdpa,
    workspace_rows,
)
from kvtier.kernels.reference import attend, gather_rows, merge, write_rows
from kvtier.kernels.table import OPERATIONS, Case, Kernel, select, select_all, table

__all__ = [
    "OPERATIONS",
    "Case",
    "HeadDims",
    "Kernel",
    "PagedBatch",
    "absorbed",
    "attend",
    "gather_rows",
    "materialised",
    "materialised_sdpa",
    "merge",
    "select",
    "select_all",
    "table",
    "workspace_rows",
    "write_rows",
]
