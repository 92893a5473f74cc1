"""Addresses of arrays, and outputs that change hands."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host.array_memory import extent, locate, readable, strides
from mlx_qlayers.runtime.host.output_buffers import SMALL, Outputs, Scratch, finished


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


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages")
def test_large_outputs_are_mapped_in_large_pages() -> None:
    (made,) = Outputs([(1 << 24,)], [mx.float32], None).prepare()
    middle = locate(made) + (1 << 25)
    regions = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    spans = {tuple(int(a, 16) for a in r.split(" ")[0].split("-")): r for r in regions if r}
    (flags,) = (
        re.findall("^VmFlags:.*", region, re.M)
        for (begin, end), region in spans.items()
        if begin <= middle < end
    )
    assert "hg" in flags[0].split()


def test_strides_count_elements() -> None:
    assert strides(mx.zeros((3, 5)).T) == [1, 5]
    assert strides(mx.broadcast_to(mx.zeros((1, 4)), (3, 4))) == [0, 1]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.uint8, mx.int64, mx.bool_])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (SMALL,), (0, 4)])
def test_outputs_change_hands(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    outputs = Outputs([shape], [dtype], None)
    for seed in range(2):
        (made,) = outputs.prepare()
        values = np.random.default_rng(seed).integers(0, 2, shape)
        wanted = mx.array(values).astype(dtype)
        mx.eval(wanted)
        address = made.address if isinstance(made, Scratch) else locate(made)
        ctypes.memmove(address, locate(wanted), wanted.nbytes)
        (found,) = finished([made])
        assert found.shape == shape and found.dtype == dtype and mx.array_equal(found, wanted)


def test_scratch_is_copied() -> None:
    scratch = Scratch((2,), mx.float32)
    first = mx.array(scratch)  # type: ignore[arg-type]
    ctypes.c_float.from_buffer(scratch.memory).value = 5
    assert first.tolist() == [0, 0]


def test_a_value_to_start_from() -> None:
    outputs = Outputs([(3,), (2,)], [mx.uint32, mx.float16], 2.0)
    for _ in range(2):
        found = finished(outputs.prepare())
        assert [x.tolist() for x in found] == [[2, 2, 2], [2.0, 2.0]]
        assert [x.dtype for x in found] == [mx.uint32, mx.float16]


def test_outputs_stay_in_order() -> None:
    shapes = [(SMALL,), (2,), (0,), (SMALL,), (3,)]
    made = Outputs(shapes, [mx.int32] * 5, None).prepare()
    assert [x.shape for x in finished(made)] == shapes
