"""Launches of a step as a list that the runtime library runs in one call.

Between launches there are norms of rows, and copies of rows into buffers of caches. Arrays that
only the list reads lie in its own memory, at the same addresses in each run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence, Set
from math import prod
from typing import Any

import mlx.core as mx

from ..explain import Row, count
from ..launch import Launch
from . import array_memory as memory
from .bound_launch import Frame, compiled_of
from .output_buffers import SMALL, SmallOutput, capsule, large_output, npy_header, small_output
from .runtime_library import Item, Place, library, place_arrays

_ALIGNMENT = 64
_WORDS = ctypes.sizeof(Item) // 8
_TO, _FROM, _WEIGHT = (getattr(Item, name).offset // 8 for name in ("to", "from", "weight"))
_NORMED = {mx.float32: 1, mx.float16: 2, mx.bfloat16: 3}


class Unlisted(Exception):
    """An array that a list of launches cannot take as it is."""


class LaunchList:
    """A list of launches. A register is a number that stands for an array.

    Args:
        length: how many launches, norms and copies will be added at most.
        arrays: by register, those of a step that was run: the shapes and dtypes of each run.
        fixed: registers whose arrays are the same in each run.
        exported: registers whose arrays a run puts into those that it is given.
    """

    def __init__(
        self, length: int, arrays: Sequence[Any], fixed: Set[int], exported: Set[int]
    ) -> None:
        self._arrays, self._fixed, self._exported = arrays, fixed, exported
        self._items = (Item * length)()
        self._words = (ctypes.c_uint64 * (length * _WORDS)).from_buffer(self._items)
        self._length, self._rows = 0, list[Row]()
        self._frames: dict[int, Frame] = {}
        self._keep: list[Any] = []
        # Registers that are others, reshaped; where those lie that only the list reads.
        self._roots: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._users: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        # The words that hold addresses of what a run is given: where they are, the register of a
        # slice that begins at the row in question, bytes of a row, and what is added to that.
        self._taken: dict[int, list[tuple[int, int, int, int]]] = {}
        # The words of what it gives.
        self._made: dict[int, tuple[list[tuple[Any, int]], SmallOutput | bytes]] = {}
        self._shown: list[tuple[int, int, tuple[int, ...]]] = []
        # Registers (B, H, L, D) that are (B, L, H, D) in memory.
        self._swapped: set[int] = set()

    def add_launch(
        self,
        launch: Launch,
        given: Sequence[int],
        more: Sequence[mx.array],
        first: int,
        swaps: bool = False,
    ) -> None:
        """Add a launch of registers, and of arrays behind them, to registers from the first on.

        Where it ``swaps``, the first one is (B, H, L, D), and (B, L, H, D) in memory.
        """
        if swaps:
            self._swapped.add(first)
        frame = Frame(compiled_of(launch), launch)
        for slot, i, strides in frame.inputs:
            if i < len(given):
                self._take(given[i], frame.addresses, slot)
            else:
                frame.addresses[slot] = self._held(more[i - len(given)])
            if strides is not None:
                frame.addresses[strides.slot] = strides.dense
        for i, (slot, *_) in enumerate(frame.outputs):
            self._make(first + i, frame.addresses, slot)
        self._frames[self._length] = frame
        self._rows += launch.rows("host")
        self._item().launch = frame.raw_address

    def add_norm(self, x: int, weight: int, epsilon: float, target: int) -> None:
        """Add the RMS norm of rows."""
        at, given, item = self._length * _WORDS, self._arrays[x], self._item()
        item.rows, item.width = given.size // given.shape[-1], given.shape[-1]
        item.type, item.epsilon = _NORMED[given.dtype], epsilon
        self._take(x, self._words, at + _FROM)
        self._take(weight, self._words, at + _WEIGHT)
        self._make(target, self._words, at + _TO)

    def add_copy(self, buffer: int, index: int, rows: int) -> None:
        """Add a copy of rows (B, H, L, D) into a buffer (B, H, R, D), from a slice's start on."""
        of, given = self._arrays[buffer], self._arrays[rows]
        row = of.itemsize * of.shape[3]
        heads, length = of.shape[1], given.shape[2]
        targets = self._taken.setdefault(buffer, [])
        if rows not in self._swapped:
            at = self._copy(prod(of.shape[:2]), length * row, of.shape[2] * row)
            self._take(rows, self._words, at + _FROM)
            targets.append((_word(self._words, at + _TO), index, row, 0))
            return
        if (root := self._roots.get(rows, rows)) not in self._places:
            raise Unlisted
        start, _ = self._places[root]
        for i in range(of.shape[0] * length):
            at = self._copy(heads, row, of.shape[2] * row)
            self._words[at + _FROM] = start + i * heads * row
            behind = i // length * heads * of.shape[2] + i % length
            targets.append((_word(self._words, at + _TO), index, row, behind * row))

    def _copy(self, rows: int, width: int, stride: int) -> int:
        """Add a copy of rows of so many bytes, and give its first word."""
        at, item = self._length * _WORDS, self._item()
        item.rows, item.width, item.stride = rows, width, stride
        return at

    def add_swap(self, x: int, target: int) -> None:
        """Let a register be another with its second and third axis exchanged."""
        self._view(x, target)
        if x not in self._swapped:
            self._swapped.add(target)

    def add_view(self, x: int, target: int) -> None:
        """Let a register be another in a different shape."""
        if x in self._swapped:
            raise Unlisted
        self._view(x, target)

    def _view(self, x: int, target: int) -> None:
        root = self._roots.get(x, x)
        self._roots[target] = root
        if target in self._exported:
            self._shown.append((target, root, self._arrays[target].shape))
        if root in self._places:
            self._users[root] += 1

    def release(self, register: int) -> None:
        """Use the memory of a register again, once no view is read."""
        root = self._roots.get(register, register)
        if root in self._places:
            self._users[root] -= 1
            if not self._users[root]:
                address, size = self._places[root]
                self._free[size].append(address)

    def close(self) -> None:
        """Add nothing more: the arrays of the step are let go, whole caches among them."""
        self._arrays = ()
        # Buffers of caches come first: what else a run takes may still be on its way.
        buffers = {r for r, words in self._taken.items() if any(index for _, index, *_ in words)}
        self._taken = dict(sorted(self._taken.items(), key=lambda each: each[0] not in buffers))
        every = [(i, *word) for i, words in enumerate(self._taken.values()) for word in words]
        self._slices = [*dict.fromkeys(index for _, _, index, _, _ in every if index)]
        starts = {index: i for i, index in enumerate((0, *self._slices))}
        self._cells = (Place * len(every))(
            *(Place(word, i, starts[index], row, behind) for i, word, index, row, behind in every)
        )
        self._starts = (ctypes.c_uint64 * len(starts))()

    def run(self, registers: list[Any]) -> None:
        """Run the list.

        Raises:
            Unlisted: an array is not row-contiguous; nothing was run.
        """
        arrays, places, starts = [registers[r] for r in self._taken], self._cells, self._starts
        for i, index in enumerate(self._slices, 1):
            starts[i] = registers[index][2].start
        if not place_arrays()(arrays, places, len(places), starts):
            raise Unlisted
        held: list[tuple[int, Any]] = []
        for register, (cells, kind) in self._made.items():
            if isinstance(kind, bytes):
                registers[register], address = large_output(kind)
            else:
                held.append((register, kind.free.pop() if kind.free else kind.block()))
                kind.tensor.data = address = ctypes.addressof(held[-1][1])
            for block, i in cells:
                block[i] = address
        count(tuple(self._rows))
        if failed := library().qk_launch_list(ctypes.addressof(self._items), self._length):
            frame = self._frames[failed - 1]
            frame.kernel.fail(frame.raw)
        for register, block in held:
            kind = self._made[register][1]
            assert isinstance(kind, SmallOutput)
            registers[register] = mx.array(capsule(kind.tensor_address, b"dltensor", None))
            kind.free.append(block)
        for register, root, shape in self._shown:
            registers[register] = registers[root].reshape(shape)

    def _item(self) -> Any:
        self._length += 1
        return self._items[self._length - 1]

    def _held(self, array: mx.array) -> int:
        self._keep.append(array)
        return _address(array)

    def _take(self, register: int, words: Any, i: int) -> None:
        if register in self._swapped:
            raise Unlisted
        root = self._roots.get(register, register)
        if root in self._places:
            words[i] = self._places[root][0]
        elif root in self._made:
            self._made[root][0].append((words, i))
        elif root in self._fixed:
            words[i] = self._held(self._arrays[root])
        else:
            _address(self._arrays[root])
            self._taken.setdefault(root, []).append((_word(words, i), 0, 0, 0))

    def _make(self, register: int, words: Any, i: int) -> None:
        array = self._arrays[register]
        size = array.nbytes
        if register in self._exported:
            small = size < SMALL
            make = small_output(array.shape, array.dtype, None) if small else None
            self._made[register] = [(words, i)], make or npy_header(array.shape, array.dtype)
            return
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, [])
        if not free:
            block = (ctypes.c_char * (size + _ALIGNMENT))()
            self._keep.append(block)
            free.append(-(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT)
        words[i] = free.pop()
        self._places[register], self._users[register] = (words[i], size), 1


def rms_norm(x: mx.array, weight: mx.array | None, epsilon: float) -> mx.array:
    """``mx.fast.rms_norm`` with the bits that it has in a list, wherever that has it."""
    if weight is None or not (x.dtype == weight.dtype and x.dtype in _NORMED and x.size):
        return mx.fast.rms_norm(x, weight, epsilon)
    x = mx.contiguous(x)
    mx.eval(x, weight)
    alone = LaunchList(1, [x, weight, x], {1}, {2})
    alone.add_norm(0, 1, epsilon, 2)
    alone.close()
    alone.run(registers := [x, weight, x])
    return registers[2]


def _word(words: Any, i: int) -> int:
    return ctypes.addressof(words) + 8 * i


def _address(array: mx.array) -> int:
    try:
        return ctypes.addressof(memory.view(array))
    except (TypeError, ValueError):
        raise Unlisted from None
