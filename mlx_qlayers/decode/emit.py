"""A graph as a list of calls, for one batch size.

Numbers that only depend on the batch size are arguments of the calls; what depends on positions is
made once a step, however many calls take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import mlx.core as mx

from .capture import Unsupported
from .graph import Graph, Node, names_in, resolved
from .operations import OPERATIONS
from .primitives import Call, call_of
from .rules.deferred import deferred

# The register of what is left out.
_NONE = 0


class Instruction(NamedTuple):
    """A call: registers in, a register out, and those that nobody needs any more."""

    function: Callable[..., Any]
    given: Callable[[Sequence[Any]], Sequence[Any]]
    target: int
    free: tuple[int, ...]


class Program:
    """What computes a step.

    Args:
        graph: what to compute.
        batch: sequences.
        weights: the arrays of the model by their names.
    """

    def __init__(self, graph: Graph, batch: int, weights: Mapping[str, mx.array]) -> None:
        self.batch = batch
        self.values = {"batch": batch}
        self.start: list[Any] = [None]
        self.inputs: list[tuple[int, str]] = []
        # Registers, and what is put there before a step, of the values of positions.
        self.dynamic: list[tuple[list[int], Callable[..., Any], tuple[Any, ...]]] = []
        self.instructions: list[Instruction] = []
        self._arguments: dict[Any, list[int]] = {}
        self._of: dict[Node, int] = {}
        graph = deferred(graph, self.values)
        self._in_place = _written_in_place(graph)
        nodes = graph.nodes()
        self._known = {_NONE}
        calls = [self._folded(node, self._call(node, weights)) for node in nodes]
        self.outputs = {name: self._of[node] for name, node in graph.outputs.items()}
        self._schedule([call for call in calls if call is not None])
        mx.async_eval([a for a in self.start if isinstance(a, mx.array)])

    def _register(self, value: Any = None) -> int:
        self.start.append(value)
        return len(self.start) - 1

    def _call(
        self, node: Node, weights: Mapping[str, mx.array]
    ) -> tuple[Callable[..., Any], list[int], int] | None:
        target = self._of[node] = self._register()
        if node.op == "Input":
            (name,) = node.arg
            if name in weights:
                self.start[target] = weights[name]
            else:
                self.inputs.append((target, name))
            return None
        if node.op == "Constant":
            self.start[target] = node.arg[0].array
            return None
        given = [_NONE if s is None else self._of[s] for s in node.src]
        if node.op == "Item":
            return itemgetter(node.arg[0]), given, target
        if node in self._in_place:
            rows = self._argument(_slices, node.arg[1:])
            return _put, [given[0], *rows, given[1]], target
        function, more = self._function(node)
        return function, [*given, *more], target

    def _folded(self, node: Node, call: Any) -> Any:
        """A call; None if it has nothing but arrays of the model, and was made now."""
        target = self._of[node]
        if call is None:
            if self.start[target] is not None:
                self._known.add(target)
            return None
        function, given, _ = call
        # Who changes an array of the model, in place too, gets a program of its own.
        if node.op == "Unpacked" or not self._known.issuperset(given):
            return call
        self.start[target] = function(*(self.start[i] for i in given))
        self._known.add(target)
        return None

    def _function(self, node: Node) -> tuple[Callable[..., Any], list[int]]:
        if (make := OPERATIONS.get(node.op)) is not None:
            return make(node, self.values), []
        try:
            call: Call = call_of(node)
        except KeyError:
            raise Unsupported(f"primitive {node.op}{list(node.arg)}"[:80]) from None
        return call.function, self._argument(call.more, node.shape if call.shaped else node.arg)

    def _argument(self, more: Callable[..., Any], arg: tuple[Any, ...]) -> list[int]:
        """The registers of further arguments of a call."""
        key = more, arg
        if key not in self._arguments:
            if names_in(arg) - self.values.keys():
                count = len(more(resolved(arg, _Any(self.values))))
                registers = [self._register() for _ in range(count)]
                self.dynamic.append((registers, more, arg))
            else:
                registers = [self._register(each) for each in more(resolved(arg, self.values))]
                self._known |= {*registers}
            self._arguments[key] = registers
        return self._arguments[key]

    def _schedule(self, calls: list[tuple[Callable[..., Any], list[int], int]]) -> None:
        """Make instructions, each of which lets go of what nobody takes behind it."""
        last: dict[int, int] = {}
        for at, (_, given, _) in enumerate(calls):
            last |= dict.fromkeys(given, at)
        made = {target for *_, target in calls}
        kept = {*self.outputs.values()}
        for at, (function, given, target) in enumerate(calls):
            free = tuple({i for i in given if last[i] == at and i in made - kept})
            self.instructions.append(Instruction(function, _getter(given), target, free))

    def run(self, arrays: Mapping[str, Any], positions: Mapping[str, int]) -> dict[str, mx.array]:
        """Compute a step.

        Args:
            arrays: ``tokens``, and those of the caches by their names.
            positions: what the counters of the caches are, and how many rows they have.

        Returns:
            The outputs by their names.
        """
        registers = self.start.copy()
        for register, name in self.inputs:
            registers[register] = arrays[name]
        values = {**self.values, **positions}
        for targets, more, arg in self.dynamic:
            for register, value in zip(targets, more(resolved(arg, values)), strict=True):
                registers[register] = value
        for function, given, target, free in self.instructions:
            registers[target] = function(*given(registers))
            for each in free:
                registers[each] = None
        return {name: registers[i] for name, i in self.outputs.items()}


class _Any(dict[str, int]):
    """Values of which those that are not known yet are 1."""

    def __missing__(self, name: str) -> int:
        return 1


def _slices(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    return (tuple(map(slice, *arg)),)


def _put(buffer: mx.array, rows: tuple[slice, ...], update: mx.array) -> mx.array:
    buffer[rows] = update
    return buffer


def _getter(registers: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes some registers out of all, without a Python frame."""
    if not registers:
        return itemgetter(slice(0, 0))
    if len(registers) == 1:
        return itemgetter(slice(registers[0], registers[0] + 1))
    return itemgetter(*registers)


def _written_in_place(graph: Graph) -> set[Node]:
    """Updates of a cache's buffer that nobody sees without them: the cache itself does it so."""
    uses, found = graph.uses(), set[Node]()
    for name, node in graph.outputs.items():
        source = node.src[0] if node.src else None
        if node.op != "SliceUpdate" or source is None or source.op != "Input":
            continue
        if source.arg == (name,) and uses[source] == 1 and node.arg[0] == 4:
            found.add(node)
    return found
