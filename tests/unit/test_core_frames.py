"""Frame pools and counted private frames: nothing is taken or given twice."""

import pytest

from kvtier.core.frames import FramePool
from kvtier.core.operations import PrivateFrames


def test_every_frame_is_taken_once() -> None:
    pool = FramePool(5)
    taken = [*pool.take(2), *pool.take(), *pool.take(2)]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.free == 0 and pool.taken() == set(taken)


def test_none_is_nothing() -> None:
    pool = FramePool(0)
    assert pool.take(0) == () and pool.free == 0
    pool.give(())


def test_last_given_is_first_taken() -> None:
    pool = FramePool(4)
    pool.take(4)
    pool.give([2])
    pool.give([1])
    assert set(pool.take(2)) == {1, 2} and pool.free == 0
    pool.give([3])
    pool.give([0])
    assert pool.take() == (0,)


def test_giving_twice_raises() -> None:
    pool = FramePool(3)
    (frame,) = pool.take()
    pool.give([frame])
    with pytest.raises(AssertionError, match="I1: a frame given back twice"):
        pool.give([frame])
    with pytest.raises(AssertionError, match="I1"):
        pool.give([next(iter({0, 1, 2} - {frame}))])


def test_taking_too_many_raises() -> None:
    pool = FramePool(2)
    with pytest.raises(AssertionError, match="I1: taking more"):
        pool.take(3)
    assert pool.free == 2


def test_private_frames_are_counted() -> None:
    pool = FramePool(3)
    private = PrivateFrames(pool)
    (frame,) = private.take(1)
    private.hold(frame)
    private.drop(frame)
    assert pool.free == 2
    private.drop(frame)
    assert pool.free == 3 and not private.refs


def test_adopted_frames_are_the_trees() -> None:
    private = PrivateFrames(FramePool(3))
    one, two = private.take(2)
    private.adopt(one)
    assert private.refs == {two: 1} and private.pool.free == 1
    private.hold(two)
    with pytest.raises(AssertionError, match="I1: adopting a page that others hold"):
        private.adopt(two)
