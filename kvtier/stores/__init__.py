"""Where page records are kept outside memory; ``kvtier.seams.Store`` is the contract."""

from kvtier.stores.fsck import FsckReport, StoreInfo, fsck, list_stores
from kvtier.stores.lmdb_store import LmdbStore

__all__ = ["FsckReport", "LmdbStore", "StoreInfo", "fsck", "list_stores"]
