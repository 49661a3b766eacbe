"""Where page records are kept outside memory; ``kvtier.seams.Store`` is the contract."""

from kvtier.stores.lmdb_store import LmdbStore

__all__ = ["LmdbStore"]
