"""Addresses of arrays without copies, through Python's buffer protocol."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

# A view of contiguous memory, at whose address that is; an exception where it is none.
view: Any = ctypes.c_char.from_buffer
STRIDED = 0x18
_CONTIGUOUS = 0x38
_WRITABLE = 0x1


class PyBuffer(ctypes.Structure):
    """Python's ``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Of an object, the address of a PyBuffer, and flags; and of that address alone.
get_buffer: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
release_buffer: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
    ("PyBuffer_Release", ctypes.pythonapi)
)


@dataclass
class Buffer:
    """Memory that a kernel gets as one argument."""

    address: int
    bytes: int
    writable: bool = False
    initialised: bool = True  # whether it holds values before the launch
    origin: int = 0  # where the array's first element is; not 0 only with negative strides
    keep: Any = None  # what owns the memory


def readable(array: mx.array, contiguous: bool) -> mx.array:
    """``array`` itself, or a copy where its rows must lie one after another and do not."""
    try:
        if contiguous and array.size:
            view(array)
        return array
    except TypeError:
        return mx.contiguous(array, stream=mx.cpu)


def locate(value: mx.array) -> int:
    """The address of the first element of an array, which is evaluated now."""
    if not value.size:
        return 0
    try:
        return ctypes.addressof(view(value))
    except TypeError:
        found = extent(value)
        return found.address + found.origin


def strides(array: mx.array) -> list[int]:
    """An array's strides in elements."""
    step = memoryview(cast(Any, array)).strides
    return [s // array.itemsize for s in step or ()]


def extent(value: Any, *, writable: bool = False, initialised: bool = True) -> Buffer:
    """The memory that an ``mx.array``, or anything with a buffer, lies in, gaps included."""
    if isinstance(value, Buffer):
        return value
    raw = PyBuffer()
    flags = STRIDED if isinstance(value, mx.array) else _CONTIGUOUS
    get_buffer(value, ctypes.addressof(raw), flags | (_WRITABLE if writable else 0))
    low, high = 0, raw.len
    if raw.len and raw.strides and raw.ndim:
        steps = [(raw.shape[i] - 1) * raw.strides[i] for i in range(raw.ndim)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + raw.itemsize
    found = Buffer((raw.buf or 0) + low, high - low, writable, initialised, -low, value)
    release_buffer(ctypes.addressof(raw))
    return found
