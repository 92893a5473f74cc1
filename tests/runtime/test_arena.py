"""Launches of a graph give one array, and take what lies in one, with the same numbers."""

import mlx.core as mx
import pytest
from devices import has_device
from machine import zeros

from mlx_qlayers.runtime.arena import arena, places, side_by_side, still_there
from mlx_qlayers.runtime.backend import Mode, mode, use_backend

from .kernels import AFFINE, ROOTS

X = mx.arange(40, dtype=mx.float32)
SCALAR, BIAS = mx.array(2.0), mx.array([1.0, 2.0, 3.0])


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    """Launches of the host backend share arrays."""
    has_device(monkeypatch, "host", launches_views=True)


def chain(x: mx.array = X) -> list[mx.array]:
    """Two outputs, of which the first goes into another kernel."""
    sizes = {"grid": (40, 1, 1), "threadgroup": (8, 1, 1)}
    root, exact = ROOTS([x], output_shapes=[(5, 8)] * 2, **sizes)
    values = {"T": mx.float32, "N": 3, "NEGATE": False}
    (y,) = AFFINE([root, SCALAR, BIAS], template=values, output_shapes=[(40,)], **sizes)
    return [root, exact, y]


@pytest.mark.parametrize("apart", [False, True])
def test_arrays_in_one_hold_the_same_numbers(apart):
    with use_backend("host"):
        plain = chain()
        with mode(Mode.INFERENCE), arena([mx.zeros((5, 8), mx.bool_)] * apart):
            shared = chain()
            assert places(shared[:2]) == ((None, None) if apart else ((0, 0), (0, 256)))
    for one, other in zip(plain, shared, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) and mx.array_equal(one, other)


def test_an_array_that_was_written_into_lies_by_itself():
    arrays = [mx.array([1.0, mx.nan]), mx.ones((3, 4), mx.float16), mx.arange(9)]
    found = side_by_side(arrays)
    assert still_there(found) == found
    arrays[1] += 1
    assert [each.y is arrays[i] for each, i in zip(still_there(found), (0, 2), strict=True)]


def test_a_kernel_finds_an_array_beside_another():
    x = mx.array(X)
    given = side_by_side([mx.ones(3), x])
    with use_backend("host"):
        plain = chain(x)
        with mode(Mode.INFERENCE), arena([], given):
            shared = chain(x)
    assert all(mx.array_equal(*pair) for pair in zip(plain, shared, strict=True))


def test_kernels_are_the_same_for_any_number_of_rows(machine, monkeypatch):
    made = []

    def chains(count: int) -> list[mx.array]:
        sizes = {"grid": (32 * count, 1, 1), "threadgroup": (8, 1, 1)}
        x = mx.arange(32.0 * count).reshape(count, 32)
        root, exact = ROOTS([x], output_shapes=[(count, 32)] * 2, **sizes)
        values = {"T": mx.float32, "N": 3, "NEGATE": False}
        (y,) = AFFINE([root, SCALAR, BIAS], template=values, output_shapes=[(count, 32)], **sizes)
        return [root, exact, y]

    with use_backend("host"):
        for count in (1, 3, 8):
            plain = chains(count)
            with mode(Mode.INFERENCE), arena([]):
                shared = chains(count)
            assert all(mx.array_equal(*pair) for pair in zip(plain, shared, strict=True))
    machine.nvidia()
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda name, **_: made.append(name) or zeros)
    with use_backend("cuda"), mode(Mode.INFERENCE):
        for count in (1, 3, 8):
            with arena([]):
                chains(count)
    assert len(made) == 2


def test_nothing_is_shared_where_a_derivative_may_be_taken():
    with use_backend("host"), arena([]):
        assert places(chain()) == (None, None, None)
