"""Outputs: memory that a kernel writes and that MLX then owns.

MLX has no way to take over memory on a CPU, and makes arrays only by filling them. A small output
is written to memory of our own, which MLX copies through DLPack. A large one is an array of MLX's
from the start: loaded from a file that reads nothing, so that no byte is touched before the kernel
writes it. To load costs a round trip to another thread, which is more than to copy a small output.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx

from .array_memory import view

# Where copying and loading were measured to take the same time: about 60 microseconds.
SMALL = 1 << 19

_LARGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14

# By type codes of DLPack 0.8: letters of .npy files, and dtypes.
_CODES = {
    0: ("i", (mx.int8, mx.int16, mx.int32, mx.int64)),
    1: ("u", (mx.uint8, mx.uint16, mx.uint32, mx.uint64)),
    2: ("f", (mx.float16, mx.float32)),
    4: ("V", (mx.bfloat16,)),
    5: ("c", (mx.complex64,)),
    6: ("b", (mx.bool_,)),
}
_TYPES = {
    dtype: (code, f"{'<' if dtype.size > 1 else '|'}{letter}{dtype.size}")
    for code, (letter, dtypes) in _CODES.items()
    for dtype in dtypes
}
_CPU = 1
_load: Callable[..., Any] = mx.load


class _Tensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.8, without a deleter: Python owns the memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


capsule: Callable[[int, bytes, None], Any] = ctypes.pythonapi.PyCapsule_New
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class SmallOutput(NamedTuple):
    """An output that is copied: ``mx.array(capsule(tensor_address, b"dltensor", None))``."""

    bytes: int
    zero: bool  # whether it starts from zeros
    free: list[Any]  # memory that serves all outputs of about this size, one launch at a time
    block: Callable[[], Any]  # makes more of it
    tensor: _Tensor  # what DLPack says of it, but for where its ``data`` is
    tensor_address: int
    shape: Any  # what ``tensor`` points to


_free: dict[int, list[Any]] = {}


def small_output(shape: tuple[int, ...], dtype: mx.Dtype, value: float | None) -> SmallOutput:
    """The description of an output that is copied; nothing is allocated."""
    size = prod(shape) * dtype.size
    room = 1 << (size - 1).bit_length()
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = _Tensor(
        device_type=_CPU,
        ndim=len(shape),
        code=_TYPES[dtype][0],
        bits=8 * dtype.size,
        lanes=1,
        shape=ctypes.addressof(extents),
    )
    free = _free.setdefault(room, [])
    address = ctypes.addressof(tensor)
    return SmallOutput(size, value == 0, free, ctypes.c_char * room, tensor, address, extents)


class _Unread(io.RawIOBase):
    """A file that reads what is in memory already, by functions of C, which need no GIL."""

    readable: Any = True.__bool__
    seekable: Any = True.__bool__
    readinto: Any = len
    seek: Any = max  # of the offset and 0, which is where it is counted from
    tell: Any = int


# The last files, as many as MLX's threads may still hold.
_files: deque[ref[Any]] = deque(maxlen=16)


@atexit.register
def _wait_for_files() -> None:
    """MLX's threads free files with Python's lock: after the interpreter's end that aborts."""
    end = time.monotonic() + 1
    while any(file() for file in _files) and time.monotonic() < end:
        time.sleep(1e-3)


@cache
def _advise() -> Any:
    return ctypes.CDLL(None).madvise


def npy_header(shape: tuple[int, ...], dtype: mx.Dtype) -> bytes:
    """How a .npy file of such an array begins."""
    extents = "".join(f"{n}, " for n in shape)
    text = f"{{'descr': '{_TYPES[dtype][1]}', 'fortran_order': False, 'shape': ({extents}), }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def large_output(header: bytes) -> tuple[mx.array, int]:
    """An array of MLX's that holds anything, and its address; larger than its header."""
    file = _Unread()
    file.readinto = io.BytesIO(header).readinto
    buffered = io.BufferedReader(file, len(header))
    buffered.peek()
    del file.readinto
    _files.append(ref(buffered))
    array = _load(buffered, format="npy", stream=mx.cpu)
    address = ctypes.addressof(view(array))
    if sys.platform == "linux" and array.nbytes >= 2 * _LARGE_PAGE:
        # Fresh from the system each time: to map it in pages of 4 KB can take longer than a kernel.
        begin = -(-address // _LARGE_PAGE) * _LARGE_PAGE
        length = address + array.nbytes - begin
        _advise()(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return array, address
