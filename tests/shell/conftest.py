"""A cache over ``ManualTransfer``, checked and closed after every test."""

from collections.abc import Iterator

import pytest

import kvtier
from kvtier.testing import ManualTransfer
from tests.shell.kit import make


@pytest.fixture
def parts() -> Iterator[tuple[kvtier.Cache, ManualTransfer]]:
    cache, transfer = make()
    yield cache, transfer
    if not cache.closed:
        cache.check()
        transfer.finish_all()
        cache.check()
        assert not cache.leases(), "the test left leases open"
        cache.close()


@pytest.fixture
def cache(parts: tuple[kvtier.Cache, ManualTransfer]) -> kvtier.Cache:
    return parts[0]


@pytest.fixture
def transfer(parts: tuple[kvtier.Cache, ManualTransfer]) -> ManualTransfer:
    return parts[1]
