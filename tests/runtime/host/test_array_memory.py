"""Where arrays lie in memory."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host.array_memory import extent, locate, readable, strides


def test_an_array_lies_where_it_is_said_to() -> None:
    x = mx.arange(12, dtype=mx.int32)
    assert (ctypes.c_int32 * 12).from_address(locate(x))[:] == list(range(12))
    row = x.reshape(3, 4)[1]
    mx.eval(row)
    assert ctypes.c_int32.from_address(locate(row)).value == 4
    assert readable(x, True) is x and locate(mx.zeros((0,))) == 0


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::-2], np.s_[1:, 2], np.s_[::2, 1:]])
def test_extent_of_a_view(index: object) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    view = mx.array(x)[index]  # type: ignore[index]
    found = extent(view)
    values = np.frombuffer(ctypes.string_at(found.address, found.bytes), np.float32)
    first = np.array(view).ravel()
    assert values.min() == first.min() and values.max() == first.max()
    assert values[found.origin // 4] == first[0]
    assert locate(view) == found.address + found.origin
    assert np.array_equal(np.array(readable(view, True)), np.array(view))
    assert readable(view, False) is view


def test_strides_count_elements() -> None:
    assert strides(mx.zeros((3, 5)).T) == [1, 5]
    assert strides(mx.broadcast_to(mx.zeros((1, 4)), (3, 4))) == [0, 1]
