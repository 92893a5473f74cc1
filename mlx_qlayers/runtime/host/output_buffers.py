"""Outputs: memory that a kernel writes and that MLX then owns.

A large output is an array of MLX's from the start, written in place. To make one costs a round
trip to the thread that evaluates, more than copying a small output does: those are written to
memory of our own, which MLX copies through DLPack, without a Python object for each element.
"""

from __future__ import annotations

import ctypes
import io
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, cast

import mlx.core as mx

from . import array_memory as memory

# Below this many bytes a copy is cheaper than an evaluation.
SMALL = 1 << 16

_LARGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14

# Type codes of DLPack 0.8.
_CODES = {
    mx.bool_: 6,
    mx.uint8: 1,
    mx.uint16: 1,
    mx.uint32: 1,
    mx.uint64: 1,
    mx.int8: 0,
    mx.int16: 0,
    mx.int32: 0,
    mx.int64: 0,
    mx.float16: 2,
    mx.float32: 2,
    mx.bfloat16: 4,
    mx.complex64: 5,
}
_CPU = 1


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


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Scratch:
    """Memory of a small output, at an address, in the form that MLX copies arrays from."""

    __slots__ = ("_shape", "_tensor", "address", "memory")

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype) -> None:
        ndim = len(shape)
        self.memory = (ctypes.c_char * (prod(shape) * dtype.size))()
        self.address = ctypes.addressof(self.memory)
        self._shape = (ctypes.c_int64 * max(ndim, 1))(*shape)
        self._tensor = _Tensor(
            data=self.address,
            device_type=_CPU,
            ndim=ndim,
            code=_CODES[dtype],
            bits=8 * dtype.size,
            lanes=1,
            shape=ctypes.addressof(self._shape),
        )

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


class _Nothing(io.RawIOBase):
    """A .npy file of so many bytes, whose data is never written to the memory it is read into."""

    def __init__(self, size: int) -> None:
        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}"
        text += " " * (-(len(text) + 11) % 64) + "\n"
        self._head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._at if whence == 1 else 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._head[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(buffer)
        return len(buffer)


def untouched(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array of MLX's that holds anything, not evaluated yet.

    MLX makes arrays only by filling them. On fresh memory that takes longer than a fast kernel,
    since the system maps page by page; a file that copies no byte leaves that to the kernel.
    """
    size = prod(shape) * dtype.size
    flat = cast(Any, mx.load)(_Nothing(size), format="npy", stream=mx.cpu)
    return flat.view(dtype).reshape(shape)


@cache
def _advise() -> Any:
    return ctypes.CDLL(None).madvise


def map_in_large_pages(array: mx.array) -> None:
    """Ask Linux to map an output that nobody wrote yet in pages of 2 MB.

    Memory of this size is fresh from the system each time. Mapping it in pages of 4 KB, as the
    kernel writes to them, can take longer than the kernel; elsewhere the hint is not needed.
    """
    if array.nbytes < 2 * _LARGE_PAGE or sys.platform != "linux":
        return
    address = memory.locate(array)
    begin = -(-address // _LARGE_PAGE) * _LARGE_PAGE
    length = address + array.nbytes - begin
    _advise()(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)


class Outputs:
    """What launches write to: memory for small outputs, used again, and new arrays for the others.

    Args:
        shapes: one for each.
        dtypes: one for each.
        value: what they hold at first, or None for anything.

    Attributes:
        small: the small ones by number.
        reused: the small ones in order.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype], value: float | None
    ) -> None:
        self.small: dict[int, Scratch] = {}
        self._large: dict[int, Callable[[], mx.array]] = {}
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            size = prod(shape) * dtype.size
            if value is None and 0 < size < SMALL:
                self.small[i] = Scratch(shape, dtype)
            elif value is None and size:
                self._large[i] = partial(untouched, shape, dtype)
            else:
                start = mx.array(value or 0, dtype)
                self._large[i] = partial(mx.full, shape, start, stream=mx.cpu)
        self.reused: list[mx.array | Scratch] = list(self.small.values())

    def prepare(self) -> list[mx.array | Scratch]:
        """What the next launch writes to; :func:`finished` makes arrays of it."""
        large = {i: make() for i, make in self._large.items()}
        mx.eval(list(large.values()))
        for array in large.values():
            map_in_large_pages(array)
        both: dict[int, mx.array | Scratch] = {**self.small, **large}
        return [both[i] for i in range(len(both))]


def finished(made: Sequence[mx.array | Scratch]) -> list[mx.array]:
    """The outputs, once they are written."""
    return [mx.array(cast(Any, x)) if isinstance(x, Scratch) else x for x in made]
