"""Making the parts of a cache from its configuration.

Whatever cannot work is refused here, with the field, the value and the remedy.  Owns nothing: the
cache closes what it was given.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvtier.config import CacheConfig
from kvtier.core.geometry import Geometry
from kvtier.core.machine import CacheCore
from kvtier.errors import ConfigError
from kvtier.layouts.base import Layout
from kvtier.seams import Store, Transfer
from kvtier.sizing import geometry_for
from kvtier.types import Tier

if TYPE_CHECKING:
    from kvtier.data.transfer import DeviceTransfer

__all__ = ["check_parts", "geometry_of", "make_core", "make_transfer", "open_store"]


def check_parts(
    layout: Layout,
    config: CacheConfig,
    model: bytes | str,
    transfer: Transfer | None,
    stores: Mapping[Tier, Store],
) -> None:
    """Raises ConfigError unless these could make a cache together."""
    if not isinstance(layout, Layout):
        raise ConfigError(f"layout must be a Layout, as kvtier.layouts makes it, got {layout!r}")
    if not isinstance(config, CacheConfig):
        raise ConfigError(f"config must be a CacheConfig, got {config!r}")
    if not isinstance(model, str | bytes):
        raise ConfigError(f"model must be str or bytes, got {model!r}")
    if not model:
        raise ConfigError("model must name the weights; without a name any would match")
    if others := set(stores) - {Tier.DISK}:
        raise ConfigError(f"stores may hold Tier.DISK only, got {sorted(others)}")
    if stores and config.disk_path is not None:
        raise ConfigError("give the disk tier as disk_path or in stores, not both")
    if stores and not config.cpu_bytes:
        raise ConfigError("a disk tier needs cpu_bytes: pages pass through host memory")
    if transfer is not None and config.disk_path is not None:
        raise ConfigError(
            "a transfer of your own reads and writes a store of your own: pass that as "
            "stores={Tier.DISK: store} instead of disk_path"
        )


def open_store(layout: Layout, config: CacheConfig, chain: bytes) -> Store:
    """The default disk tier."""
    from kvtier.stores.lmdb_store import LmdbStore

    assert config.disk_path is not None
    assert isinstance(config.disk_bytes, int)
    return LmdbStore(
        config.disk_path,
        fingerprint=chain,
        rank=config.rank,
        world=config.world,
        frame_bytes=layout.frame_bytes(),
        limit_bytes=config.disk_bytes,
        mode=config.disk_mode,
        codec=config.codec,
        checkpoint_frames=layout.checkpoint_frames(),
    )


def geometry_of(layout: Layout, config: CacheConfig, store: Store | None) -> Geometry:
    """The frames of every pool, those of the open store included."""
    if store is not None and store.capacity < 1:
        raise ConfigError(
            f"disk_bytes={config.disk_bytes} would keep nothing: one page takes "
            f"{layout.frame_bytes()} bytes; set more, or leave out disk_bytes and disk_path"
        )
    return geometry_for(layout, config, disk_frames=0 if store is None else store.capacity)


def make_core(
    geometry: Geometry, config: CacheConfig, chain: bytes, store: Store | None
) -> CacheCore:
    """The core, knowing what the store holds."""
    return CacheCore(
        geometry,
        chain=chain,
        eviction=config.eviction,
        checkpoints=config.checkpoints,
        entries=None if store is None else store.scan(),
        read_only_disk=config.disk_mode == "read",
        store_after_hits=config.store_after_hits,
        max_pinned=config.max_pinned,
    )


def make_transfer(
    layout: Layout, geometry: Geometry, device: str, store: Store | None, config: CacheConfig
) -> "DeviceTransfer":
    """The default data plane."""
    # Late, as the store's import is: `import kvtier` leaves torch out.
    import torch

    from kvtier.data.transfer import DeviceTransfer

    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r} is none: say "cuda", "cuda:1" or "cpu"') from error
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={device!r} cannot hold pages: say "cuda", "cuda:1" or "cpu"')
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f'device={device!r}, but torch sees no GPU; device="cpu" keeps the device pool in '
            "plain memory"
        )
    try:
        return DeviceTransfer(layout, geometry, device=device, store=store, config=config)
    except (MemoryError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"gpu_bytes={config.gpu_bytes} and cpu_bytes={config.cpu_bytes} could not be taken on "
            f"{device!r}: {error}"
        ) from error
