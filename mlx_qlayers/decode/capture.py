"""A model's step as a graph, by MLX's exporter.

The model's code runs twice, with a twin of the model and of its caches that differ in batch size
and positions. What differs between the two graphs in the same way is a size or a position.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .graph import Graph, Node, Size, Spec, Value
from .twin import arrays_of, embeddings, leaves, twin


class Unsupported(Exception):
    """Why a step is left to the model."""


class Differs(Unsupported):
    """The graphs of two settings are not alike."""


class Setting(NamedTuple):
    """What a run of a model's code is made for.

    Attributes:
        batch: sequences.
        length: tokens of each.
        counters: by the number of a cache and the name of an attribute what that is.
        rows: by the number of a cache how many rows its buffers have; none for those of states.
    """

    batch: int
    length: int
    counters: dict[tuple[int, str], int]
    rows: dict[int, int]


class Captured(NamedTuple):
    """A captured step.

    Attributes:
        graph: its inputs are ``tokens``, ``model.PATH`` and ``cache.NUMBER.NAME``; its outputs
            ``logits`` and ``cache.NUMBER.NAME``, of those that the step changed.
        counts: by the same names numbers of the caches that the step changed.
        weights: the arrays of the model by their names.
        names: what counts of caches are called in the graph, by the number and the attribute.
        exact: whether it holds for this batch size alone.
    """

    graph: Graph
    counts: dict[str, Any]
    weights: dict[str, mx.array]
    names: dict[str, str]
    exact: bool


class _Trace:
    """What one run of a model's code gave."""

    def __init__(self, model: Any, caches: Sequence[Any], setting: Setting) -> None:
        self.records: list[dict[str, Any]] = []
        self.model, self.caches, self.own = model, caches, [*leaves(caches)]
        self.names, self.results = list[str](), list[str]()
        self.counts: dict[str, Any] = {}
        self.given: list[mx.array] = []
        for path, array in arrays_of(model, "model"):
            self._input(path, array)
        self.embeddings = embeddings(model, self.names, self.given)
        for i, cache in enumerate(self.own):
            for path, array in arrays_of(cache, f"cache.{i}"):
                self._input(path, _resized(array, path, setting, i))
        tokens = mx.zeros((setting.batch, setting.length), mx.int32)
        mx.export_function(
            self.records.append, lambda *a: self._run(setting, *a), tokens, *self.given
        )

    def _input(self, path: str, array: mx.array) -> None:
        self.names.append(path)
        self.given.append(array)

    def _run(self, setting: Setting, tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        tracers = dict(zip(self.names, arrays, strict=True))

        def swap(path: str, array: mx.array) -> mx.array:
            return tracers[path]

        model = twin(self.model, swap, "model")
        made: dict[int, Any] = {}
        own = [twin(cache, swap, f"cache.{i}", made) for i, cache in enumerate(self.own)]
        for (number, name), value in setting.counters.items():
            vars(own[number])[name] = value
        seen = [dict(vars(c)) for c in own]
        before = _State(model)
        logits = model(tokens, cache=twin([*self.caches], swap, "", made))
        if not isinstance(logits, mx.array):
            raise Unsupported("the model gives more than logits")
        results = {"logits": logits, **before.changed()}
        for i, (cache, old) in enumerate(zip(own, seen, strict=True)):
            results |= _changes(cache, old, f"cache.{i}", self.counts)
        self.results = [*results]
        return [*results.values()]


class _State:
    """What is in the modules of a model, to see later whether it still is."""

    def __init__(self, model: Any) -> None:
        named = [("model" if not path else f"model.{path}", m) for path, m in model.named_modules()]
        self.parts = [(path, part, dict(part), dict(vars(part))) for path, part in named]

    def changed(self) -> dict[str, mx.array]:
        """By their names the arrays that took the place of others of the same shape and dtype."""
        found = {}
        for path, part, items, attributes in self.parts:
            for now, before in ((part, items), (vars(part), attributes)):
                for name in now.keys() | before.keys():
                    new, old = now.get(name), before.get(name)
                    if new is old:
                        continue
                    if _alike(new, old):
                        found[f"{path}.{name}"] = new
                    else:
                        raise Unsupported(f"the model changes {name} of {type(part).__name__}")
        return found


def _alike(new: Any, old: Any) -> bool:
    arrays = isinstance(new, mx.array) and isinstance(old, mx.array)
    return arrays and (new.shape, new.dtype) == (old.shape, old.dtype)


def _changes(
    cache: Any, old: dict[str, Any], path: str, counts: dict[str, Any]
) -> dict[str, mx.array]:
    """The arrays that a cache has behind a step, by their names; new numbers go into ``counts``."""
    found = {}
    for name, value in vars(cache).items():
        before = old.get(name)
        where = f"{path}.{name}"
        if isinstance(value, mx.array):
            found[where] = value  # it may be the same object, written into
        elif isinstance(value, list | tuple):
            for i, each in enumerate(value):
                if isinstance(each, mx.array):
                    found[f"{where}.{i}"] = each
        elif value is not before and value != before:
            if not isinstance(value, int) or not isinstance(before, int):
                raise Unsupported(f"a step changes {name} of a {type(cache).__name__}")
            counts[where] = value
    return found


def _resized(array: mx.array, path: str, setting: Setting, number: int) -> mx.array:
    """An array of a cache as one of another batch size and other rows has it, without values."""
    if not array.ndim:
        return array
    shape = [setting.batch, *array.shape[1:]]
    if array.ndim == 4 and number in setting.rows:
        shape[2] = setting.rows[number]
    return mx.zeros(shape, array.dtype)


def capture(model: Any, caches: Sequence[Any], one: Setting, other: Setting) -> Captured:
    """A step of a model, in which sizes and positions are what they are in both settings.

    Args:
        model: the model, which is not changed.
        caches: its caches in turn, not empty; they are not changed either.
        one: what the step is made for.
        other: other counters and rows, and if possible another batch size.

    Raises:
        Unsupported: the model's code cannot be captured; the reason names a line or a primitive.
    """
    try:
        traces = [_Trace(model, caches, setting) for setting in (one, other)]
    except Exception as error:
        raise Unsupported(stopping_line(error)) from error
    return _Solver(one, other).solved(*traces)


class _Solver:
    """Makes one graph of two traces."""

    def __init__(self, one: Setting, other: Setting) -> None:
        self.batches = one.batch, other.batch
        pairs = {
            f"{i}.{name}": (v, other.counters[i, name]) for (i, name), v in one.counters.items()
        }
        pairs |= {f"{i}.rows": (v, other.rows[i]) for i, v in one.rows.items()}
        # Counters that are the same in both are one.
        self.pairs: dict[tuple[int, int], str] = {}
        self.names = {name: self.pairs.setdefault(pair, name) for name, pair in pairs.items()}
        self.nodes: dict[str, Node] = {}
        self.made: dict[Any, Node] = {}

    def number(self, one: Any, other: Any) -> Any:
        """A number of both traces, as a size if they differ."""
        if type(one) is not type(other):
            raise Differs("its code takes another branch for another batch size or position")
        if isinstance(one, list | tuple):
            if len(one) != len(other):
                raise Differs("its code depends on the batch size or position")
            return tuple(self.number(*pair) for pair in zip(one, other, strict=True))
        if one == other or one != one:
            return one
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise Differs("its code depends on the batch size or position")
        # Of several that go on by as much, the nearest: rings wrap around at other times.
        alike = [pair for pair in self.pairs if 0 != pair[1] - pair[0] == other - one]
        if alike:
            pair = min(alike, key=lambda pair: abs(one - pair[0]))
            return Size(one - pair[0], ((self.pairs[pair], 1),))
        for (first, second), name in self.pairs.items():
            if first != second and one - other == second - first:
                return Size(one + first, ((name, -1),))
        first, second = self.batches
        if first != second and one * second == other * first and one % first == 0:
            return Size(0, (("batch", int(one // first)),))
        raise Differs(f"{one} becomes {other} with another batch size and position")

    def solved(self, one: _Trace, other: _Trace) -> Captured:
        """The graph of both."""
        if one.results != other.results or len(one.records) != len(other.records):
            raise Differs("its code takes another branch for another batch size or position")
        weights: dict[str, mx.array] = dict(zip(one.names, one.given, strict=True))
        for pair in zip(one.records, other.records, strict=True):
            record, second = pair
            kind = record["type"]
            if kind == "inputs":
                for name, first, last in zip(
                    ["tokens", *one.names], record["inputs"], second["inputs"], strict=True
                ):
                    self._put(Node("Input", (), (name,), (self._spec(first, last),)), first[0])
                self._embeddings(
                    one.embeddings, dict(zip(one.names, record["inputs"][1:], strict=True))
                )
            elif kind == "constants":
                for (name, array), (_, twin_array) in zip(
                    record["constants"], second["constants"], strict=True
                ):
                    self._put(self._constant(array, twin_array), name)
            elif kind == "primitive":
                self._primitive(record, second)
        (results,) = [r["outputs"] for r in one.records if r["type"] == "outputs"]
        outputs = {
            name: self.nodes[each[0]] for name, each in zip(one.results, results, strict=True)
        }
        # An array that goes out as it came in was not changed.
        outputs = {name: node for name, node in outputs.items() if node.arg != (name,)}
        if one.counts.keys() != other.counts.keys():
            raise Differs("its caches count otherwise at another position")
        counts = {name: self.number(v, other.counts[name]) for name, v in one.counts.items()}
        weights = {
            name: array
            for name, array in weights.items()
            if name.startswith("model.") and name not in one.embeddings
        }
        exact = self.batches[0] == self.batches[1]
        return Captured(Graph(outputs), counts, weights, self.names, exact)

    def _embeddings(self, found: dict[str, Any], ids: dict[str, Any]) -> None:
        """Let nodes that unpack a matrix take the place of what stands for the unpacked one."""
        for path, (names, fmt) in found.items():
            src = tuple(name and self.nodes[ids[name][0]] for name in names)
            spec = self.nodes[ids[path][0]].outputs
            self.nodes[ids[path][0]] = Node("Unpacked", src, fmt, spec)

    def _put(self, node: Node, *names: str) -> None:
        node = self.made.setdefault(node.key(), node)
        for number, name in enumerate(names):
            item = node if len(names) == 1 else node.item(number)
            self.nodes[name] = self.made.setdefault(item.key(), item)

    def _spec(self, one: Any, other: Any) -> Spec:
        if one[2] != other[2]:
            raise Differs("a dtype depends on the batch size or position")
        return Spec(self.number(one[1], other[1]), one[2])

    def _constant(self, one: mx.array, other: mx.array) -> Node:
        spec = self._spec((0, one.shape, one.dtype), (0, other.shape, other.dtype))
        if one.shape == other.shape and mx.array_equal(one, other, equal_nan=True).item():
            return Node("Constant", (), (Value(one),), (spec,))
        if one.size != other.size or one.size > 4096:
            raise Differs("numbers in its code depend on the batch size")
        numbers = self.number(one.flatten().tolist(), other.flatten().tolist())
        return Node("Numbers", (), numbers, (spec,))

    def _primitive(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        if one["name"] != other["name"]:
            raise Differs("its code takes another branch for another batch size or position")
        src = tuple(self.nodes[each[0]] for each in one["inputs"])
        if any(self.nodes.get(a[0]) is None for a in one["inputs"]):
            raise Differs(f"{one['name']} takes what nothing gives")
        outputs = tuple(
            self._spec(*pair) for pair in zip(one["outputs"], other["outputs"], strict=True)
        )
        try:
            arg = self.number(one["arguments"], other["arguments"])
        except Differs as error:
            raise Differs(f"{one['name']}: {error}") from None
        self._put(Node(one["name"], src, arg, outputs), *(each[0] for each in one["outputs"]))


def stopping_line(error: Exception) -> str:
    """The line of a model's code at which a capture stopped, and why."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/mlx_qlayers/" not in f.filename and "/mlx/" not in f.filename]
    reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:200]
    if not own:
        return reason
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {line}: {reason}"
