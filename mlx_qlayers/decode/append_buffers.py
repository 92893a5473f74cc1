"""Append buffers: the keys and values of the last tokens, beside the buffers of the caches.

A kernel cannot write into the buffers of a cache, and copying them for each token takes longer the
more they hold. So each token's keys and values go into a small append buffer, and the buffers of
the cache are only read. A quantized cache has :func:`~.ops.attention_step.packed_rows` in it. That
of a ring which goes round holds what overwrites its oldest rows. A caller who reads the keys or
values of a cache gets arrays that MLX computes from both once they are evaluated. He may write into
them, as ``update_and_fetch`` does, so the cache begins with a new append buffer then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import repeat
from math import isqrt
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_POSITIONS, packed_rows, parts_of_rows
from ..runtime.arena import are_alike, halves, joined
from ..runtime.devices import device_of
from .capture import Unsupported

# The most rows of an append buffer, as many as a cache grows by; and of all sequences and heads.
_ROWS = 256
_ALL_ROWS = 8 * _ROWS

Buffer = Any  # an array, or three of packed rows


class AppendBuffer(NamedTuple):
    """The keys and values of caches that hold as many tokens.

    The buffers of the caches are (B, Hkv, S, D) and Dv, or packed, scales and biases. The rows
    behind them are arrays (B, Hkv, R, D) and Dv, or where launches share arrays (2 B, Hkv, R, D),
    both of them.
    """

    buffers: list[Buffer]  # of all caches in turn; those that somebody took are None
    arrays: list[mx.array]
    start: int  # how many rows of the buffers count
    first: int  # which row the first one of `arrays` takes, and the ones behind it in turn
    held: int  # how many tokens are in the append buffer
    left: int  # how many more it has room for
    keep: int  # the row that comes behind the last one, of a ring

    def merged(self, number: int) -> Buffer:
        """A buffer with the append buffer in it."""
        buffer, is_joined = self.buffers[number], len(self.arrays) < len(self.buffers)
        rows = self.arrays[number // 2 if is_joined else number]
        rows = halves(rows)[number % 2] if is_joined else rows
        ahead = min(self.held, arrays_of(buffer)[0].shape[2] - self.first)
        buffer = _written(buffer, rows[:, :, :ahead], self.first)
        return _written(buffer, rows[:, :, ahead : self.held], self.keep)


def append_buffer_of(caches: Sequence[Any], tokens: int) -> AppendBuffer:
    """A new append buffer of caches, with room for a step's tokens of each sequence.

    It raises ``Unsupported`` if they do not hold the same tokens, or not as mlx-lm's caches do.
    """
    first = vars(caches[0])
    buffers: list[Buffer] = [vars(c)[name] for c in caches for name in ("keys", "values")]
    batch, heads, rows, _ = arrays_of(buffers[0])[0].shape
    size, keep = first.get("max_size", 0), first.get("keep", 0)
    row = first.get("_idx", first["offset"])
    length = first.get("_offset", first["offset"]) if size else row
    if any(arrays_of(each)[0].shape[2] != rows for each in buffers):
        raise Unsupported("caches have different numbers of rows")
    if "left_padding" in first:
        _check_batch(caches, size if first.get("rotated") else row)
    count = min(append_rows((batch, heads), rows), rows - keep)
    goes_round = size > 0 and length >= size - 1
    row = keep if goes_round and row == size else row
    if not keep <= row < rows or rows > (size or rows) or not (goes_round or row == length):
        raise Unsupported("a cache holds its tokens in another way")
    start = min(length, rows if goes_round else rows - count)
    held = 0 if goes_round else length - start
    # Until a ring goes round, and says so, it is another case.
    left = [count - held, *[size - 1 - length] * (size > 0 and not goes_round)]
    left += [size - row] * (goes_round and not first.get("rotated", True))
    if min(left) < tokens:
        raise Unsupported("an append buffer has no room")
    arrays = [_cut(each, 0 if goes_round else start, count) for each in buffers]
    arrays = rows_side_by_side(arrays)
    return AppendBuffer(buffers, arrays, start, row - held, held, min(left), keep)


def rows_side_by_side(arrays: list[mx.array]) -> list[mx.array]:
    """Append buffers of keys and values in turn, each two in one array if launches share arrays."""
    both = [*zip(arrays[::2], arrays[1::2], strict=True)]
    if device_of().launches_views and all(are_alike(*each) for each in both):
        return [joined(*each) for each in both]
    return arrays


def _check_batch(caches: Sequence[Any], last: int) -> None:
    """Raise ``Unsupported`` unless sequences see as many tokens as their positions say."""
    offset, padding = (mx.stack([vars(c)[n] for c in caches]) for n in ("offset", "left_padding"))
    same = (offset == offset[0]) & (mx.minimum(offset, last) == mx.minimum(last - padding, last))
    if not same.all().item():
        raise Unsupported("sequences of a batch have other positions in some caches")


def positions_of(beside: AppendBuffer, c: Any) -> mx.array:
    """The array for :func:`attention_step`: rows that count, tokens in the append buffer, positions
    of the next tokens, and last the row that the next token takes."""
    offset, batch = vars(c)["offset"], len(arrays_of(beside.buffers[0])[0])
    ahead, last = mx.array([beside.start, beside.held]), mx.array([beside.first + beside.held])
    if isinstance(offset, int):
        offset = mx.array([offset] * max(MIN_POSITIONS, batch))
    more = mx.zeros(max(0, MIN_POSITIONS - offset.size), mx.int32)
    return mx.concatenate([ahead, offset, more, last])


def positions_for(batch: int) -> int:
    """The size of the array of :func:`positions_of` for so many sequences."""
    return 3 + max(MIN_POSITIONS, batch)


@lru_cache(maxsize=64)
def tokens_on(size: int, count: int) -> mx.array:
    """The array that so many tokens add to so many positions."""
    return mx.array([0] + [count] * (size - 1))


def append_rows(heads: tuple[int, ...], rows: int) -> int:
    """The number of rows of an append buffer, for sequences and key heads, and rows of the cache.

    Each token writes the append buffer anew, and a full one is merged into the cache. So a token
    writes R + 4 / 3 * S / R rows, which is least where R is the root of 4 / 3 * S, but a longer
    buffer takes fewer launches. It is long where that costs little. A 7B model (28 layers, 4 key
    heads of 128 in half precision) writes, as the checked build counts, 14.9 MB a token and
    sequence with 256 rows, 3.9 MB with 64 (of 8 sequences) and 2.9 MB with 48 (of 32 behind 1,024
    keys). On NVIDIA GPUs there are 256, the number with which everything was measured there.

    Example:
        >>> [append_rows((batch, 4), 1024) for batch in (1, 2, 8, 32)]
        [256, 256, 64, 48]
    """
    if most := device_of().append_rows:
        return min(most, rows)
    batch, count = heads
    fewest = max(_ALL_ROWS // (batch * count), isqrt(4 * rows // 3))
    return min(_ROWS, rows, -(-fewest // 16) * 16)


def arrays_of(buffer: Buffer) -> Sequence[mx.array]:
    """The array of a buffer, or all three."""
    return (buffer,) if isinstance(buffer, mx.array) else buffer


def _written(buffer: Buffer, rows: mx.array, start: int) -> Buffer:
    """A buffer with rows of an append buffer in it."""
    if not rows.shape[2]:
        return buffer
    if isinstance(buffer, mx.array):
        return mx.slice_update(buffer, rows, mx.array([start]), (2,))
    pairs = zip(buffer, parts_of_rows(rows, buffer), strict=True)
    return tuple(mx.slice_update(each, part, mx.array([start]), (2,)) for each, part in pairs)


def _cut(buffer: Buffer, start: int, size: int) -> mx.array:
    """Rows of a buffer as an append buffer has them."""
    parts = [array[:, :, start : start + size] for array in arrays_of(buffer)]
    return parts[0] if isinstance(buffer, mx.array) else packed_rows(parts)


def _is_held(x: Any) -> bool:
    """Whether a cache's keys or values are an append buffer and a number of one of its buffers."""
    return isinstance(x, tuple) and isinstance(x[0], AppendBuffer)


def watch(caches: Sequence[Any]) -> None:
    """Notice who takes keys or values of caches."""
    kinds = map(watched_kind, map(kind_of, caches))
    deque(map(setattr, caches, repeat("__class__"), kinds), maxlen=0)


def released(caches: Sequence[Any]) -> None:
    """Let caches hold their keys and values by themselves."""
    for c in caches:
        if "_kind" in vars(type(c)):
            _ = c.keys


def kind_of(cache: Any) -> type:
    """The class of mlx-lm's that a cache is of."""
    return vars(type(cache)).get("_kind", type(cache))


@cache
def watched_kind(kind: type) -> type:
    """The class of caches whose keys and values nobody took since a token; else ``kind``."""

    def alone(cache: Any) -> Any:
        own = vars(cache)
        held = {name: own[name] for name in ("keys", "values") if _is_held(own[name])}
        own.update({name: each.merged(number) for name, (each, number) in held.items()})
        for each, number in held.values():  # nobody else has it now, so MLX writes into it
            each.buffers[number] = None
        cache.__class__ = kind
        return cache

    def attribute(name: str) -> property:
        def put(self: Any, value: Any) -> None:
            setattr(alone(self), name, value)

        return property(lambda self: getattr(alone(self), name), put)

    def nbytes(self: Any) -> int:
        own = [vars(self)[name] for name in ("keys", "values")]
        own = [each[0].buffers[each[1]] if _is_held(each) else each for each in own]
        return sum(a.nbytes for each in own for a in arrays_of(each))

    body = {
        "_kind": kind,
        "keys": attribute("keys"),
        "values": attribute("values"),
        "empty": lambda self: False,
        "nbytes": property(nbytes),
        "__reduce_ex__": lambda self, protocol: alone(self).__reduce_ex__(protocol),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), body)
