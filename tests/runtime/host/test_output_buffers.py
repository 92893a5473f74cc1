"""Memory that kernels write, as arrays of MLX's."""

from __future__ import annotations

import ctypes
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host.array_memory import locate
from mlx_qlayers.runtime.host.output_buffers import (
    _TYPES,
    SMALL,
    capsule,
    large_output,
    npy_header,
    small_output,
)


def filled(shape: tuple[int, ...], dtype: mx.Dtype, values: mx.array, large: bool) -> mx.array:
    """An output to which a kernel writes some values."""
    if large:
        made, address = large_output(npy_header(shape, dtype))
        ctypes.memmove(address, locate(values), values.nbytes)
        return made
    output = small_output(shape, dtype, None)
    block = output.block()
    ctypes.memmove(block, locate(values), values.nbytes)
    output.tensor.data = ctypes.addressof(block)
    made = mx.array(capsule(output.tensor_address, b"dltensor", None))
    ctypes.memset(block, 0xFF, len(block))
    return made


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
@pytest.mark.parametrize(
    ("large", "shape"),
    [(False, shape) for shape in [(), (7,), (2, 3, 5), (1,) * 9, (300, 41)]]
    + [(True, shape) for shape in [(SMALL,), (7, 300, 251), (1, 700, *(1,) * 9, 800)]],
)
def test_outputs_hold_what_was_written(
    shape: tuple[int, ...], dtype: mx.Dtype, large: bool
) -> None:
    """Two of a kind have memory of their own."""
    kept = []
    for seed in range(2):
        values = mx.array(np.random.default_rng(seed).integers(0, 2, shape)).astype(dtype)
        mx.eval(values)
        kept.append((filled(shape, dtype, values, large), values))
    for made, values in kept:
        assert made.shape == shape and made.dtype == dtype and mx.array_equal(made, values)


def test_a_large_output_takes_no_calls_of_python_functions() -> None:
    """But its own: each would wait for the interpreter in another thread."""
    header, calls = npy_header((SMALL,), mx.float32), []
    large_output(header)
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        large_output(header)
    finally:
        sys.setprofile(None)
    assert calls == ["large_output"]


def test_large_outputs_from_many_threads() -> None:
    header = npy_header((SMALL,), mx.uint8)

    def one(value: int) -> mx.array:
        made, address = large_output(header)
        ctypes.memset(address, value, SMALL)
        return made

    with ThreadPoolExecutor(4) as pool:
        for value, made in enumerate(pool.map(one, range(40))):
            assert made.min().item() == made.max().item() == value


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages")
def test_large_outputs_are_mapped_in_large_pages() -> None:
    made, address = large_output(npy_header((1 << 24,), mx.float32))
    middle = address + made.nbytes // 2
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
