"""The data plane: frames on the device and the host, and what moves their bytes."""

from kvtier.data.device import DevicePool
from kvtier.data.host import HostArena
from kvtier.data.transfer import DeviceTransfer

__all__ = ["DevicePool", "DeviceTransfer", "HostArena"]
