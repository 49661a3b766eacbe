"""Errors are values: they can be carried from one process to another."""

import pickle

import pytest

from kvtier import OutOfPages


@pytest.mark.parametrize("what", ["device pages", "window pages"])
def test_out_of_pages_travels_between_processes(what: str) -> None:
    for capacity, held in ((None, 0), (9, 2), (5, 2)):
        error = OutOfPages(4, 3, what, capacity, held)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is OutOfPages
        assert (again.needed, again.available, again.capacity) == (4, 3, capacity)
        assert again.never_fits == (capacity == 5)
        assert str(again) == str(error) and f"needed 4 {what}" in str(again)


@pytest.mark.parametrize(
    ("capacity", "held", "said"),
    [
        (None, 0, "needed 6 device pages, 3 could be freed; release leases or retry later"),
        (9, 3, "needed 6 device pages, 3 could be freed; release leases or retry later"),
        (5, 0, "needed 6 device pages, which can never fit: there are 5 in all; take fewer"),
        (8, 3, "needed 6 device pages beside the 3 already held, which can never fit: there are 8"),
    ],
)
def test_out_of_pages_says_what_can_never_fit(capacity: int | None, held: int, said: str) -> None:
    error = OutOfPages(6, 3, capacity=capacity, held=held)
    assert str(error).startswith(said)
    assert error.never_fits == ("never" in said)
    assert ("retry later" in str(error)) != ("raise gpu_bytes" in str(error))


@pytest.mark.parametrize(
    ("what", "sized_by"), [("device pages", "gpu_bytes"), ("window pages", "max_leases")]
)
def test_out_of_pages_names_the_size_that_its_pages_go_by(what: str, sized_by: str) -> None:
    assert str(OutOfPages(6, 3, what, 5)).endswith(f"at once, or raise {sized_by}")
