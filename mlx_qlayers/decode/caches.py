"""The cases of a model's caches: for which a step is captured, and how long it holds.

A cache of mlx-lm is a few arrays and counts. In a graph the arrays are inputs and outputs; a count
that goes on with each token is a position. Room for tokens is made ahead, as the caches do it
themselves, so that a step is always the plain case of their code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .capture import Setting, Unsupported

# How far ahead of the first a second capture looks at most.
REACH = 100_000
# The least position of a capture: MLX broadcasts an axis of one row, which would be another graph.
_LEAST = 2
# Rows that a long cache grows by at most.
_MOST_ROWS = 2048
# Steps after which caches are looked at again, where nothing limits them sooner.
RECHECK_AFTER = 256
# Caches that may have an append buffer, and which counts are the row and the position of a token;
# the position of a batch is an array.
APPENDED = {
    "KVCache": ("offset", "offset"),
    "RotatingKVCache": ("_idx", "offset"),
    "BatchKVCache": ("_idx", "_idx"),
    "BatchRotatingKVCache": ("_idx", "_offset"),
}
APPENDED |= {name.replace("KV", "QuantizedKV"): counts for name, counts in APPENDED.items()}
APPENDED["PackedKVCache"] = APPENDED["KVCache"]
RINGS = tuple(kind for kind in APPENDED if "Rotating" in kind)
# Cases of rings in which a step's row is none that goes on with the tokens.
_AT_ROWS = ("full", "begins", "moves")
# The counts of each class of caches that go on with each token.
_COUNTERS = {kind: tuple(dict.fromkeys(counts)) for kind, counts in APPENDED.items()}
_COUNTERS |= {"ChunkedKVCache": ("offset",), "ArraysCache": ()}
# The modules of their classes.
_MODULES = "mlx_lm.models.cache", f"{__package__}.quantized_caches"


class Facts(NamedTuple):
    """The facts about a cache that a capture depends on."""

    key: tuple[Any, ...]  # what a capture is for: class, case, dtypes and settings
    counters: dict[str, int]  # by name
    rows: int | None  # of its buffers; None for states
    at: int  # the row that the next token is written to
    last: int | None  # the largest position at which this case ends; None if it does not


def facts(c: Any, length: int) -> Facts:
    """Make room for tokens in a cache, and say what matters of it.

    ``Unsupported`` says that the cache is of a class that no step is captured for.
    """
    kind, own = type(c).__name__, vars(c)
    if kind not in _COUNTERS or type(c).__module__ not in _MODULES:
        raise Unsupported(f"a cache is a {kind}")
    if kind == "ArraysCache":
        return Facts((kind, *_kinds(own, ())), {}, None, 0, None)
    if own["keys"] is None:
        return Facts((kind, "empty"), {}, None, 0, None)
    if own.get("_lengths") is not None or own.get("_right_padding") is not None:
        raise Unsupported("a cache is not finalized")
    at, last, case = _room(c, kind, length), None, ""
    rows = _rows(own["keys"])
    if kind in RINGS:
        offset = own["_offset" if "_offset" in own else "offset"]
        if length > 1 and offset + 1 >= own["max_size"]:
            case = "moves"
        elif length > 1:  # without a window in the mask, or with one
            case = "grows" if offset + length <= own["max_size"] else "moves soon"
            last = own["max_size"] - (length if case == "grows" else 2)
        elif offset + length >= own["max_size"]:
            case = "full" if at < own["max_size"] else "begins"
        else:
            last = own["max_size"] - length - 1
    names = _COUNTERS[kind]
    if kind == "ChunkedKVCache":  # where one is full, its start goes on with the tokens
        if at == own["chunk_size"]:
            case, names = "full", (*names, "start_position")
        else:
            last = own["offset"] + own["chunk_size"] - at - 1
    if not case and at + length == rows:  # its code takes all rows then, and no slice of them
        raise Unsupported(f"a token fills a {kind}")
    counters = {name: own[name] for name in names}
    return Facts((kind, case, *_kinds(own, counters)), counters, rows, at, last)


def _kinds(own: dict[str, Any], counters: Any) -> Iterator[Any]:
    """The attributes that a capture depends on, without values of arrays."""
    for name, value in own.items():
        if name not in counters:
            yield name, _kind(value)


def _kind(value: Any) -> Any:
    if isinstance(value, mx.array):
        shape = value.shape
        rows = shape[2:3] if len(shape) == 4 else ()
        return value.dtype, len(rows), shape[1:2] + shape[3:] if rows else shape[1:]
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return value


def _rows(buffer: Any) -> int:
    rows: int = (buffer if isinstance(buffer, mx.array) else buffer[0]).shape[2]
    return rows


def _room(c: Any, kind: str, length: int) -> int:
    """Where the next token goes, with room for it."""
    if kind in RINGS:
        return _room_in_ring(c) if length == 1 else _in_order(c)
    if kind == "ChunkedKVCache":
        c.maybe_trim_front()
        at: int = c.offset - c.start_position
    else:
        at = c._idx if "_idx" in vars(c) else c.offset
    rows = _rows(c.keys)
    # In whole steps, also where sequences were merged: each number of rows is compiled anew.
    size = -(-rows // c.step) * c.step
    # It grows as mlx-lm's does, or by a quarter, and one row early: the code slices a buffer that
    # has a free row, and takes a full one as it is.
    if at + length + (kind != "ChunkedKVCache") > size:
        more = max(length + 1, min(rows // 4, _MOST_ROWS))
        size = -(-(at + more) // c.step) * c.step
    if size > rows:
        change(c, lambda each: _grown(each, size - at, at))
    return at


def _in_order(c: Any) -> int:
    """The rows of a ring, once they are in the order of its tokens: several more come behind."""
    if getattr(c, "rotated", False):  # its mask goes by what it has not in order
        raise Unsupported("a rotated cache of a batch takes several tokens")
    if "rotated" in vars(c):
        change(c, lambda each: each[:, :, : c._idx])
    else:
        change(c, c._temporal_order)
        c._idx = _rows(c.keys)
    at: int = c._idx
    return at


def _room_in_ring(c: Any) -> int:
    offset = c._offset if "_offset" in vars(c) else c.offset
    if offset + 1 >= (rows := _rows(c.keys)) and rows < c.max_size:
        more = min(c.step, c.max_size - rows)
        change(c, lambda each: _grown(each, more, rows))
        c._idx = offset
    if (extra := _rows(c.keys) - c.max_size) > 0:
        change(c, lambda each: c._trim(extra, each))
        c._idx = c.max_size
        if "left_padding" in vars(c):
            c.left_padding = c.left_padding - extra
    # A mask of one that keeps rows is another where it begins anew: mlx-lm takes the row as 0.
    if c._idx == c.max_size and not getattr(c, "keep", 0):
        c._idx = 0
        if "rotated" in vars(c):
            c.rotated = True
    at: int = c._idx
    return at


def change(c: Any, made_of: Callable[[mx.array], mx.array]) -> None:
    """Let a cache have other arrays, each made of one that it has."""

    def changed(buffer: Any) -> Any:
        is_array = isinstance(buffer, mx.array)
        return made_of(buffer) if is_array else type(buffer)(map(made_of, buffer))

    c.keys, c.values = changed(c.keys), changed(c.values)


def _grown(buffer: mx.array, more: int, at: int) -> mx.array:
    """A buffer with more rows, behind those that count."""
    batch, heads, _, width = buffer.shape
    free = mx.zeros((batch, heads, more, width), buffer.dtype)
    return mx.concatenate([buffer[:, :, :at], free], 2)


def settings(
    some: Sequence[Facts], batch: int, length: int, other_batch: int, reach: int, low: bool
) -> tuple[Setting, Setting]:
    """The setting that a step is captured for, and another case of the same graph.

    Equal positions are equal in both: MLX makes one constant of equal numbers. ``reach`` is how far
    positions go on to the other; with ``low`` the first is as far back as caches can be.
    """
    one = Setting(batch, length, {}, {})
    other = Setting(other_batch, length, {}, {})
    ways, ways_round = _ways(some, reach), _ways_round(some)
    back = _ways_back(some) if low else {}
    for number, each in enumerate(some):
        if each.rows is None:
            continue
        moved, rows = _moved(each, ways, reach)
        if _goes_round(each):
            moved["_idx"] = each.at + ways_round[each.at]
        for name, value in each.counters.items():
            one.counters[number, name] = value - back.get(value, 0)
            other.counters[number, name] = moved[name]
        one.rows[number], other.rows[number] = each.rows, rows
    return one, other


def _ways_back(some: Sequence[Facts]) -> dict[int, int]:
    """How far back each position can be, where rows are as many and the case is the same."""
    found: dict[int, int] = {}
    for each in some:
        for value in each.counters.values():
            most = 0 if each.key[1] else max(each.at - _LEAST, 0)
            found[value] = min(most, found.get(value, most))
    return found


def _ways(some: Sequence[Facts], reach: int) -> dict[int, int]:
    """How far each position goes on in the other case."""
    found: dict[int, int] = {}
    for each in some:
        for name in {"_idx", "offset", "_offset"} & each.counters.keys():
            if name == "_idx" and each.key[0] in RINGS and each.key[1] in _AT_ROWS:
                continue
            value = each.counters[name]
            most = reach * (2 * len(found) + 1) if value not in found else found[value]
            found[value] = most if each.last is None else min(most, each.last - value)
    return {value: way or -1 for value, way in found.items()}


def _goes_round(each: Facts) -> bool:
    return each.key[0] in RINGS and each.key[1] == "full"


def _ways_round(some: Sequence[Facts]) -> dict[int, int]:
    """The same for rows of rings that are full: for each row a way of its own to one close by.

    By equal ways, what depends on one row would seem to depend on either.
    """
    rings = [(each.at, dict(each.key[2:])) for each in some if _goes_round(each)]
    found: dict[int, int] = {}
    for at in dict.fromkeys(row for row, _ in rings):
        least = max(ring.get("keep", 0) for row, ring in rings if row == at)
        most = min(ring["max_size"] for row, ring in rings if row == at) - 1
        free = [way for way in (1, 2, -2, -1) if way not in found.values()]
        way = next((way for way in free if least <= at + way <= most), 0)
        if not way and least < most:
            raise Unsupported("rotating caches are at too many rows")
        found[at] = way
    return found


def _moved(each: Facts, ways: dict[int, int], reach: int) -> tuple[dict[str, int], int]:
    """Counters and rows of a cache at another position."""
    assert each.rows is not None
    kind, case, *rest = each.key
    settings, is_ring = dict(rest), kind in RINGS
    moved = {name: v + ways.get(v, 0) for name, v in each.counters.items()}
    if is_ring and case in ("begins", "moves"):
        return moved | {"_idx": each.at}, each.rows
    if case in ("grows", "moves soon"):
        return moved, moved["_idx"]
    if _goes_round(each):
        return moved, each.rows
    if "start_position" in moved:
        moved["start_position"] += moved["offset"] - each.counters["offset"]
    return moved, settings["max_size"] if is_ring else each.rows + abs(reach) * (2 * len(ways) + 2)


def blank(own: Sequence[Any]) -> None:
    """Let caches hold zeros in the place of what nobody is to compute."""

    def zeros(value: Any) -> Any:
        if isinstance(value, mx.array):
            return mx.zeros(value.shape, value.dtype)
        if hasattr(value, "_make"):  # a named tuple, as an append buffer is one
            return value._make(map(zeros, value))
        return type(value)(map(zeros, value)) if isinstance(value, list | tuple) else value

    put(own, [{name: zeros(value) for name, value in vars(c).items()} for c in own])


def arrays_of(own: Sequence[Any]) -> dict[str, mx.array]:
    """The arrays of caches by the names that they have in a graph."""
    found: dict[str, mx.array] = {}
    for number, c in enumerate(own):
        for name, value in vars(c).items() if c is not None else ():
            if isinstance(value, mx.array):
                found[f"cache.{number}.{name}"] = value
            elif isinstance(value, list | tuple):
                for i, each in enumerate(value):
                    found[f"cache.{number}.{name}.{i}"] = each
    return found


def places(paths: Iterable[str]) -> list[tuple[int, str, int | None]]:
    """Where arrays and counts are, by their names: cache, attribute, and the place in a list."""
    split = (path.split(".") for path in paths)
    return [(int(i), name, int(at[0]) if at else None) for _, i, name, *at in split]


class Held(NamedTuple):
    """The attributes of caches, to compare with later."""

    kinds: Sequence[type]
    items: Sequence[dict[str, Any]]

    def same(self, own: Sequence[Any]) -> bool:
        """Whether nobody changed them; what is written into an array is not seen."""
        try:  # dicts compare what is not identical, and arrays have no truth value
            return [*map(type, own)] == self.kinds and [*map(vars, own)] == self.items
        except Exception:
            return False


def held_by(own: Sequence[Any], lists: Iterable[tuple[int, str]]) -> Held:
    """A record of the attributes of caches, and of the items of their lists."""
    items = [*map(dict, map(vars, own))]
    for number, name in lists:
        items[number][name] = items[number][name][:]
    return Held([*map(type, own)], items)


def more_steps(each: Facts, c: Any, length: int) -> int:
    """For how many more steps a cache's case is the same, behind one that left it as it is now."""
    (kind, case, *_), own = each.key, vars(c)
    kinds = (*_kinds(own, each.counters),)
    if each.key[-len(kinds) :] != kinds:
        return 0
    if each.rows is None:
        return RECHECK_AFTER
    if case == "moves":
        return RECHECK_AFTER if _rows(own["keys"]) == each.rows else 0
    if case:
        return each.rows - each.at - 1 if kind in RINGS else 0
    counts, last = each.counters, RECHECK_AFTER
    if each.last is not None:
        last = (each.last - counts["_offset" if "_offset" in counts else "offset"]) // length
    return min(last, (each.rows - each.at - length - 1) // length)


def put(own: Sequence[Any], items: Sequence[dict[str, Any]]) -> None:
    """Let caches have other attributes, so that no signal sees some of them changed."""
    deque(map(dict.update, map(vars, own), items), maxlen=0)
