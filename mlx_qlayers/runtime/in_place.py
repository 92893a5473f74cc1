"""Whether arrays are still what they were: MLX changes them in place, too.

``a *= 3`` and ``a[i] = b`` leave the Python object where it is and let it stand for another array.
Constants of a compiled graph, and arrays that were computed of it ahead (``1 + weight``, matrices
side by side), are then out of date, and no comparison of Python objects tells. One ``take`` of
NumPy's of the pointers in the objects does, for the 650 arrays of a 7B model in 3 microseconds,
where a memoryview of each takes 320 and has no address.

An ``mx.array`` of Python holds a pointer to what it stands for, and ``copy.copy`` of it holds the
same one. While that copy lives no other array can have that pointer: who finds it again finds the
same array. Where in the object it is, is found out at first use, and each array's copy proves it.

Nobody can see writes to memory that NumPy shares (``np.array(a, copy=False)[:] = 0``): the array
is the same. Constants follow it, and so do views such as :func:`.arena.side_by_side` makes; only
what was computed ahead does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx

# NumPy is imported where it is used: the import of this package does not wait for it.
_WORD = "<u8"


class Held:
    """Arrays with their memory, and whether they still stand for the same values."""

    def __init__(self, arrays: Iterable[mx.array]) -> None:
        self.arrays = [*{id(a): a for a in arrays}.values()]
        self.copies = [copy.copy(a) for a in self.arrays]
        self.memory, self.at = _pointers(self.arrays)
        self.before = self.memory.take(self.at).tobytes()
        memory, at = _pointers(self.copies)
        # Of an array that is laid out otherwise this is something else.
        known = memory.take(at).tobytes() == self.before
        self.is_known = known and (_offset() > 0 or not self.arrays)

    def same(self) -> bool:
        """Whether none was changed in place, as far as that can be told."""
        return self.is_known and self.memory.take(self.at).tobytes() == self.before

    def restore(self) -> None:
        """Let those that were changed in place stand for what they did."""
        import numpy as np

        now, before = (
            np.frombuffer(words, _WORD)
            for words in (self.memory.take(self.at).tobytes(), self.before)
        )
        for i in np.flatnonzero(now != before):
            self.arrays[i][...] = self.copies[i]


class _Memory:
    """Words of this process, for NumPy to read those that are asked for."""

    def __init__(self, address: int, words: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (words,),
            "typestr": _WORD,
            "version": 3,
        }


def _pointers(arrays: list[mx.array]) -> tuple[Any, Any]:
    """Memory as one array, and where in it the pointers of some arrays are."""
    import numpy as np

    if not arrays:
        return np.zeros(0, _WORD), np.zeros(0, np.intp)
    at = np.array([id(a) + _offset() for a in arrays], np.intp)
    first = at.min()
    return _words(int(first), int(at.max() - first) // 8 + 1), (at - first) // 8


def _words(address: int, count: int) -> Any:
    import numpy as np

    return np.asarray(_Memory(address, count))


@cache
def _offset() -> int:
    """The byte of an ``mx.array`` at which its pointer is; 0 if it has none."""
    import numpy as np

    x, y = mx.zeros(1), mx.zeros(1)
    words = mx.array.__basicsize__ // 8

    def read(*arrays: mx.array) -> list[Any]:
        return [_words(id(a), words).copy() for a in arrays]

    one, same, other = read(x, copy.copy(x), y)
    held = copy.copy(x)
    x += 1
    (changed,) = read(x)
    found = (one == same) & (one != other) & (one != changed)
    del held
    return int(8 * np.flatnonzero(found)[0]) if found.any() else 0
