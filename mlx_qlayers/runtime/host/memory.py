"""Addresses of arrays without copies, through Python's buffer protocol."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_view = ctypes.c_char.from_buffer
_address = ctypes.addressof


def contiguous(array: mx.array) -> mx.array:
    """``array`` itself where its rows lie one after another, else a copy for which this holds."""
    try:
        if array.size:
            _view(array)
        return array
    except TypeError:
        copy = mx.contiguous(array)
        mx.eval(copy)
        return copy


def address(array: mx.array) -> int:
    """Where the evaluated elements of a row-contiguous array lie."""
    return _address(_view(array)) if array.size else 0


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@dataclass
class Buffer:
    """Memory that a kernel gets as one argument.

    Attributes:
        address: of the first byte.
        bytes: the length.
        writable: whether the kernel may write.
        initialised: whether it holds values before the launch.
        keep: what owns the memory.
    """

    address: int
    bytes: int
    writable: bool = False
    initialised: bool = True
    keep: Any = None


def buffer_of(value: Any, *, writable: bool = False, initialised: bool = True) -> Buffer:
    """The memory of an ``mx.array`` or of anything with a contiguous buffer."""
    if isinstance(value, Buffer):
        return value
    if isinstance(value, mx.array):
        value = contiguous(value)
        return Buffer(address(value), value.nbytes, writable, initialised, value)
    raw = _PyBuffer()
    flags = 0x38 | (1 if writable else 0)  # C-contiguous, writable where asked
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), ctypes.byref(raw), flags)
    found = Buffer(raw.buf or 0, raw.len, writable, initialised, value)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))
    return found
