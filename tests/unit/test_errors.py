"""Errors are values: they can be carried from one process to another."""

import pickle

import pytest

from kvtier import OutOfPages


@pytest.mark.parametrize("what", ["device pages", "window pages"])
def test_out_of_pages_travels_between_processes(what: str) -> None:
    error = OutOfPages(4, 3, what)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is OutOfPages
    assert (again.needed, again.available) == (4, 3)
    assert str(again) == str(error) and f"needed 4 {what}" in str(again)
