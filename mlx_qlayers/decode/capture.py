"""A model's step as a graph, by MLX's exporter.

The model's code runs twice, with a twin of the model and of its caches that differ in batch size
and positions. Numbers that differ between the two graphs in the same way are sizes or positions.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .graph import Graph, Node, Size, Spec, Value, resolved
from .marks import SIGN, mark_of
from .snapshot import alike
from .twin import arrays_of, contents, leaves, twin


class Unsupported(Exception):
    """Why a step is left to the model."""


class Differs(Unsupported):
    """The graphs of two settings are not alike."""


class Setting(NamedTuple):
    """The sizes and positions with which a model's code runs."""

    batch: int  # sequences
    length: int  # tokens of each
    counters: dict[tuple[int, str], int]  # by the number of a cache and the name of an attribute
    rows: dict[int, int]  # of the buffers of caches by their numbers; none for those of states


class Captured(NamedTuple):
    """A captured step.

    Inputs of its graph are ``tokens``, ``model.PATH`` and ``cache.NUMBER.NAME``; its outputs
    ``logits`` and ``cache.NUMBER.NAME``, of those that the step changed.
    """

    graph: Graph
    counts: dict[str, Any]  # by the same names numbers of the caches that the step changed
    weights: dict[str, mx.array]  # the arrays of the model by their names
    names: dict[str, str]  # of counts in the graph, by `NUMBER.ATTRIBUTE`


class Trace:
    """The records of one run of a model's code.

    ``Unsupported`` says that the code cannot be captured, and names a line or a primitive.
    """

    def __init__(self, model: Any, caches: Sequence[Any], setting: Setting) -> None:
        self.records: list[dict[str, Any]] = []
        self.model, self.caches, self.own = model, caches, leaves(caches)
        self.setting, self.results, self.counts = setting, list[str](), dict[str, Any]()
        self.given = dict(arrays_of(model, "model"))
        for i, cache in enumerate(self.own):
            for path, array in arrays_of(cache, f"cache.{i}"):
                self.given[path] = _resized(array, setting, i)
        tokens = mx.zeros((setting.batch, setting.length), mx.int32)
        try:
            mx.export_function(self.records.append, self._run, tokens, *self.given.values())
        except Exception as error:
            raise Unsupported(stopping_line(error)) from error
        self.primitives = [each for each in self.records if each["type"] == "primitive"]
        for each in self.primitives:
            if each["name"] == "RandomBits":
                raise Unsupported("the model draws random numbers of mlx.random in a call")
            if each["name"] == "CustomKernel":  # no call can be made of its text
                raise Unsupported(f"the model launches a kernel of its own: {each['arguments'][0]}")

    def _run(self, tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        tracers = dict(zip(self.given, arrays, strict=True))

        def swap(path: str, array: mx.array) -> mx.array:
            return tracers[path]

        made: dict[int, Any] = {}
        model = twin(self.model, swap, "model", made)
        before = [(part, contents(part)) for part in made.values()]
        own = [twin(cache, swap, f"cache.{i}", made) for i, cache in enumerate(self.own)]
        for (number, name), value in self.setting.counters.items():
            vars(own[number])[name] = value
        for number, c in enumerate(own):
            vars(c)["number"] = number  # by which masks tell whose they are
        seen = [dict(vars(c)) for c in own]
        logits = model(tokens, cache=twin([*self.caches], swap, "", made))
        if not isinstance(logits, mx.array):
            raise Unsupported("the model gives more than logits")
        # Written into or not, the object is the same.
        results = {"logits": logits, **self._own(tracers)}
        names = {id(tracer): name for name, tracer in tracers.items()}
        for part, then in before:
            results |= dict(_replaced(part, then, names))
        for i, (cache, old) in enumerate(zip(own, seen, strict=True)):
            results |= _changes(cache, old, f"cache.{i}", self.counts)
        self.results = [*results]
        return [*results.values()]

    def _own(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """The arrays of the model itself."""
        return {name: array for name, array in arrays.items() if name.startswith("model.")}


def _replaced(
    part: Any, before: dict[Any, Any], names: dict[int, str]
) -> Iterator[tuple[str, mx.array]]:
    """The names of arrays that a part of a model replaced, and the new arrays."""
    now = contents(part)
    for key in now.keys() | before.keys():
        new, old = now.get(key), before.get(key)
        if new is old:
            continue
        if not alike(new, old):
            raise Unsupported(f"the model changes {key} of {type(part).__name__} in a call")
        yield names[id(old)], new  # type: ignore[misc]


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


def _resized(array: mx.array, setting: Setting, number: int) -> mx.array:
    """An array of a cache as one of another batch size and other rows has it, without values."""
    if not array.ndim:
        return array
    shape = [setting.batch, *array.shape[1:]]
    if array.ndim == 4 and number in setting.rows:
        shape[2] = setting.rows[number]
    return mx.zeros(shape, array.dtype)


class Solver:
    """Makes one graph of two traces."""

    def __init__(self, one: Trace, other: Trace) -> None:
        self.one, self.other = one, other
        first, last = one.setting, other.setting
        self.batches = first.batch, last.batch
        # A position has the name of a cache that holds all tokens, if there is one.
        counters = sorted(first.counters.items(), key=lambda x: (x[0][0], _START) in first.counters)
        pairs = {f"{i}.{n}": (v, last.counters[i, n]) for (i, n), v in counters}
        pairs |= {f"{i}.rows": (v, last.rows[i]) for i, v in first.rows.items()}
        # Counters that are the same in both are one.
        self.pairs: dict[tuple[int, int], str] = {}
        self.names = {name: self.pairs.setdefault(pair, name) for name, pair in pairs.items()}
        self.values = {name: value for (value, _), name in self.pairs.items()}
        self.values["batch"] = first.batch
        # The nodes of each trace by the names of their arrays there.
        self.nodes: tuple[dict[str, Node], dict[str, Node]] = {}, {}
        # MLX makes one constant of equal numbers, which need not be equal in the other trace.
        self.constants = dict(_of(one, "constants")), dict(_of(other, "constants"))
        self.made: dict[Any, Node] = {}

    def number(self, one: Any, other: Any) -> Any:
        """A number of both traces, as a size if they differ."""
        if one == other or one != one:
            return _frozen(one)
        if type(one) is not type(other):
            raise Differs(_BRANCH)
        if isinstance(one, list | tuple) and len(one) == len(other):
            return tuple(map(self.number, one, other))
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise Differs("its code depends on the batch size or position")
        # Several may go on by as much: the nearest is it, as rings wrap around at other times.
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

    def solved(self) -> Captured:
        """The graph of both; ``Differs`` if it would be none of both."""
        one, other = self.one, self.other
        if one.results != other.results or one.counts.keys() != other.counts.keys():
            raise Differs(_BRANCH)
        names = ["tokens", *one.given]
        for name, first, last in zip(names, *(_of(t, "inputs") for t in (one, other)), strict=True):
            self._put(Node("Input", (), (name,), (self._spec(first, last),)), [first], [last])
        self._primitives()
        made = map(self._source, _of(one, "outputs"), _of(other, "outputs"))
        outputs = dict(zip(one.results, made, strict=True))
        # An array that goes out as it came in was not changed.
        outputs = {name: node for name, node in outputs.items() if node.arg != (name,)}
        counts = {name: self.number(v, other.counts[name]) for name, v in one.counts.items()}
        return Captured(Graph(outputs), counts, one._own(one.given), self.names)

    def _put(self, node: Node, one: list[Any], other: list[Any]) -> None:
        """A node as what gives arrays of both traces."""
        node = self.made.setdefault(node.key(), node)
        for number, pair in enumerate(zip(one, other, strict=True)):
            item = node if len(one) == 1 else node.item(number)
            item = self.made.setdefault(item.key(), item)
            for nodes, each in zip(self.nodes, pair, strict=True):
                nodes[each[0]] = item

    def _source(self, one: Any, other: Any) -> Node:
        """The node of an array, which both traces have."""
        (ours, others), (own, theirs) = self.nodes, self.constants
        if one[0] in own and other[0] in theirs:
            return self._constant(own[one[0]], theirs[other[0]])
        first, last = ours.get(one[0]), others.get(other[0])
        if first is None or last is None:
            raise Differs("its code takes what nothing gives")
        if first is not last and not (last.op == "Broadcast" and last.src[0] is first):
            raise Differs(_BRANCH)
        return last

    def _spec(self, one: Any, other: Any) -> Spec:
        if one[2] != other[2]:
            raise Differs("a dtype depends on the batch size or position")
        return Spec(self.number(one[1], other[1]), one[2])

    def _constant(self, one: mx.array, other: mx.array) -> Node:
        key = id(one), id(other)
        if key in self.made:
            return self.made[key]
        spec = self._spec((0, one.shape, one.dtype), (0, other.shape, other.dtype))
        if one.shape == other.shape and mx.array_equal(one, other, equal_nan=True).item():
            node = Node("Constant", (), (Value(one),), (spec,))
        elif one.size != other.size or one.size > 4096:
            raise Differs("numbers in its code depend on the batch size or position")
        else:
            numbers = self.number(one.flatten().tolist(), other.flatten().tolist())
            node = Node("Numbers", (), numbers, (spec,))
        self.made[key] = self.made.setdefault(node.key(), node)
        return self.made[key]

    def _primitives(self) -> None:
        """All primitives of both in turn, but for what one sequence need not be broadcast to."""
        others = iter(self.other.primitives)
        for one in self.one.primitives:
            for other in others:
                if not self._is_broadcast(one, other):
                    break
            else:
                raise Differs(_BRANCH)
            if one["name"] != other["name"] or len(one["inputs"]) != len(other["inputs"]):
                raise Differs(_BRANCH)
            src = tuple(map(self._source, one["inputs"], other["inputs"]))
            outputs = tuple(map(self._spec, one["outputs"], other["outputs"]))
            try:
                arg = self.number(one["arguments"], other["arguments"])
            except Differs as error:
                raise Differs(f"{one['name']}: {error}") from None
            node = _marked(Node(one["name"], src, arg, outputs))
            self._put(node, one["outputs"], other["outputs"])
        if next(others, None) is not None:
            raise Differs(_BRANCH)

    def _is_broadcast(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether what comes next in the other trace alone is a broadcast to all sequences."""
        if other["name"] != "Broadcast" or self.batches[0] != 1:
            return False
        (given,), (made,) = other["inputs"], other["outputs"]
        source = self.nodes[1].get(given[0])
        if source is None or made[1][0] != self.batches[1]:
            return False
        shape = resolved(source.shape, self.values)
        alike = one["name"] == "Broadcast" and self.nodes[0].get(one["inputs"][0][0]) is source
        if alike or len(shape) != len(made[1]) or shape[0] != 1:
            return False
        spec = self._spec((0, shape, source.dtype), made)
        node = Node("Broadcast", (source,), (spec.shape,), (spec,))
        self.nodes[1][made[0]] = self.made.setdefault(node.key(), node)
        return True


_START = "start_position"
_BRANCH = "its code takes another branch for another batch size or position"


def _marked(node: Node) -> Node:
    """The node that a mark stands for; any other node itself."""
    last = node.src[-1] if node.op == "Depends" else None
    if last and last.op == "Numbers" and last.arg[0] == SIGN:
        raise Differs("its code depends on the batch size or position")
    found = mark_of(last.arg[0].array) if last and last.op == "Constant" else None
    if found is None:
        return node
    op, arg, there = found
    src = iter(node.src[len(node.outputs) :])
    return Node(op, tuple(next(src) if each else None for each in there), arg, node.outputs)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _of(trace: Trace, kind: str) -> list[Any]:
    """Inputs, constants or outputs of a trace."""
    (found,) = [record[kind] for record in trace.records if record["type"] == kind]
    return [*found]


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
