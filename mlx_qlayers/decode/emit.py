"""A graph as a list of calls, for one batch size.

Numbers that only depend on the batch size are arguments of the calls; what depends on positions is
made once a step, however many calls take it. On a CPU, where calls of Python functions are what a
step costs, operations of this package are bound at their first call: to the launch itself, for
arrays of these shapes, as long as the buffers of the caches have as many rows.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from typing import Any

import mlx.core as mx

from ..dispatch import dispatch, planned
from ..runtime.arena import places
from ..runtime.backend import Mode, mode, within
from ..runtime.devices import device_of
from ..runtime.explain import count
from ..runtime.launch import Launching
from ..runtime.spec import Spec
from .calls import BoundCalls, Called, called, made_by
from .capture import Unsupported
from .graph import Graph, Node, Size, names_in, resolved
from .operations import OPERATIONS
from .primitives import Call, Dispatched, call_of, slices
from .rules.deferred import deferred
from .rules.serial import serial

# The register of what is left out.
_NONE = 0
# Lists of bound calls that are kept, for other numbers of rows.
_KEPT = 8
# The results of alike operations, and a function that is called before each.
_Once = tuple[dict[Any, Any], Callable[[], object]]
_once: ContextVar[_Once | None] = ContextVar("once", default=None)


class Program:
    """The list of calls that computes a step, for a batch size.

    Who ``binds`` calls, and keeps the program, answers for it that the context, the epoch and the
    device are those of its first run.
    """

    def __init__(
        self, graph: Graph, batch: int, weights: Mapping[str, mx.array], binds: bool = False
    ) -> None:
        self.batch, self.binds = batch, binds
        self.values = {"batch": batch}
        self.start: list[Any] = [None]
        self.inputs: list[tuple[int, str]] = []
        # Registers, and what is put there before a step, of the values of positions.
        self.dynamic: list[tuple[list[int], Callable[..., Any], tuple[Any, ...]]] = []
        self._arguments: dict[Any, list[int]] = {}
        self._of: dict[Node, int] = {}
        graph = deferred(graph, self.values)
        graph = serial(graph) if binds and device_of().launches_at_once else graph
        self._in_place = _written_in_place(graph)
        self._known = {_NONE}
        # Indices of rows in a cache that go on with its tokens: nobody has seen what they replace.
        self._advancing: set[int] = set()
        calls = [self._folded(node, self._call(node, weights)) for node in graph.nodes]
        self.outputs = {name: self._of[node] for name, node in graph.outputs.items()}
        self.calls = self._scheduled([call for call in calls if call is not None])
        self._lists: Any = None
        if binds and device_of().launches_at_once:
            from . import listed  # of the host backend, which others do not load

            self._lists = listed
            self.calls = [listed.as_listed(call) for call in self.calls]
        shapes = [each.shape for node in graph.nodes for each in node.outputs] if binds else []
        self._rows = itemgetter(*filter(_is_rows, names_in((*shapes,))), "batch")
        self._bound: dict[Any, BoundCalls] = {}
        self._resolved = resolver([arg for *_, arg in self.dynamic])
        mx.async_eval([a for a in self.start if isinstance(a, mx.array)])

    def _register(self, value: Any = None, count: int = 1) -> int:
        self.start += [value] * count
        return len(self.start) - count

    def _call(self, node: Node, weights: Mapping[str, mx.array]) -> Called | None:
        given = [_NONE if s is None else self._of[s] for s in node.src]
        if node.op == "Item":  # the registers of what gives several are neighbours
            self._of[node] = given[0] + node.arg[0]
            return None
        if node in self._in_place:
            # The buffer itself changes.
            self._of[node] = given[0]
            rows = self._argument(slices, node.arg[1:])
            if {name.partition(".")[2] for name in names_in(node.arg[1])} == {"offset"}:
                self._advancing.update(rows)
            return _made(operator.setitem, [given[0], *rows, given[1]], self._register())
        target: int | slice
        target = at = self._of[node] = self._register(count=len(node.outputs))
        if node.op == "Input":
            (name,) = node.arg
            if name in weights:
                self.start[at] = weights[name]
            else:
                self.inputs.append((at, name))
            return None
        if node.op == "Constant":
            self.start[at] = node.arg[0].array
            return None
        function, more = self._function(node)
        if len(node.outputs) > 1 or isinstance(function, Dispatched):
            target = slice(at, at + len(node.outputs))
        if not isinstance(function, Dispatched):
            return _made(function, [*given, *more], target)
        call = partial(_dispatched, function, len(node.outputs))
        shapes = (each.shape for s in node.src if s for each in s.outputs) if self.binds else ()
        known = all(n in self.values or _is_rows(n) for n in names_in((*shapes,)))
        return _made(call, given, target, function if known and self.binds else None)

    def _folded(self, node: Node, call: Called | None) -> Called | None:
        """A call; None if it has nothing but arrays of the model, and was made now."""
        at = self._of[node]
        if call is None:
            if self.start[at] is not None:
                self._known.add(at)
            return None
        # A model whose arrays change, in place too, gets another program.
        if not self._known.issuperset(call.given):
            return call
        self.start[call.target] = call.function(*(self.start[i] for i in call.given))
        self._known.update(made_by(call.target))
        return None

    def _function(self, node: Node) -> tuple[Any, list[int]]:
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
                # How many they are does not depend on positions.
                count = len(more(resolved(arg, defaultdict(lambda: 1, self.values))))
                registers = [self._register() for _ in range(count)]
                self.dynamic.append((registers, more, arg))
            else:
                registers = [self._register(each) for each in more(resolved(arg, self.values))]
                self._known |= {*registers}
            self._arguments[key] = registers
        return self._arguments[key]

    def _scheduled(self, calls: list[Called]) -> list[Called]:
        """The calls, each of which lets go of what nobody takes behind it."""
        last = {i: at for at, call in enumerate(calls) for i in call.given}
        made = {i for call in calls for i in made_by(call.target)} - {*self.outputs.values()}
        return [
            call._replace(free=tuple({i for i in call.given if last[i] == at and i in made}))
            for at, call in enumerate(calls)
        ]

    def run(
        self, arrays: Mapping[str, Any], positions: Mapping[str, int], goes_on: bool | None = None
    ) -> dict[str, mx.array]:
        """The outputs of a step by their names.

        Args:
            arrays: ``tokens``, and those of the caches by their names.
            positions: what the counters of the caches are, and how many rows they have.
            goes_on: whether the step before was this one, or another, and wrote the rows before
                into the same arrays: then nobody else holds their memory where it is written to,
                and launches go by lists, which the second run makes. Else None: lists that there
                are serve once MLX has written there, who copies what others hold.
        """
        registers = self.start.copy()
        for register, name in self.inputs:
            registers[register] = arrays[name]
        values = {**self.values, **positions}
        for (targets, arguments, _), arg in zip(self.dynamic, self._resolved(values), strict=True):
            for register, value in zip(targets, arguments(arg), strict=True):
                registers[register] = value
        rows = self._rows(values)
        is_bound, found = rows in self._bound, self._bound.get(rows) or self._calls(rows)
        count(tuple(found.rows))
        is_listed = goes_on or (is_bound and (goes_on is False or found.listed))
        if is_listed and self._lists is not None:
            if goes_on is None:
                self._lists.claim(found, registers, self._advancing)
            given = self.start, self.outputs, self._advancing
            self._lists.run_listed(found, registers, *given)
        else:
            called(found.calls, registers)
        if len(registers) != len(self.start):
            raise Unsupported("an operation gives another number of arrays than its node")
        return {name: registers[i] for name, i in self.outputs.items()}

    def _calls(self, rows: Any) -> BoundCalls:
        """The calls where caches have so many rows, which are bound as they are made."""
        if len(self._bound) >= _KEPT:
            self._bound.clear()
        found = BoundCalls([], [], [])
        for at, call in enumerate(self.calls):
            bind = call.function if call.binds is None else partial(_bind, found, at, call)
            found.calls.append(call._replace(function=bind))
        self._bound[rows] = found  # whole, as another thread may take it
        return found


def _made(
    function: Any, given: list[int], target: int | slice, binds: Dispatched | None = None
) -> Called:
    return Called(function, _getter(given), None, target, (), given, binds)


def _bind(found: BoundCalls, at: int, call: Called, *arrays: Any) -> Any:
    """Run an operation, and have it called as it was now from the next time on."""
    assert call.binds is not None
    operation, static = call.binds
    with mode(Mode.INFERENCE):
        made = dispatch(operation, arrays, static)
        known = planned(operation, arrays, static)
    if isinstance(call.target, slice) and len(made) > call.target.stop - call.target.start:
        return made[: call.target.stop - call.target.start]
    if known is not None:
        run, rows = known
        found.rows.extend(rows)
        call = call._replace(function=run)
        if isinstance(run, Launching):
            given = [call.given[i] for i in run.places]
            call = call._replace(function=run.launch, given=given, more=[*run.more])
            call = call._replace(taken=_getter(given))
        found.calls[at] = call
    return made


def each_kind_once(before: Callable[[], object]) -> AbstractContextManager[Any]:
    """Run of alike operations one alone in a ``with`` block; others give what that one gave.

    ``before`` is called ahead of each operation.
    """
    return within(_once, ({}, before))


def _dispatched(call: Dispatched, count: int, *arrays: Any) -> Any:
    # A kernel may give more than its operation does, for a gradient.
    if (once := _once.get()) is None:
        return dispatch(call.operation, arrays, call.static)[:count]
    made, before = once
    before()
    key = call, tuple(x if x is None else Spec.of(x) for x in arrays), places(arrays)
    if key not in made:
        made[key] = dispatch(call.operation, arrays, call.static)[:count]
    return made[key]


def resolver(args: Sequence[Any]) -> Callable[[Mapping[str, int]], Sequence[Any]]:
    """A function from the values of names to arguments with numbers in the place of sizes.

    It is :func:`.graph.resolved` of all of them, in one call.
    """
    constants: list[Any] = []

    def text(value: Any) -> str:
        if isinstance(value, Size):
            return "+".join([text(value.const), *(f"{n}*at[{name!r}]" for name, n in value.terms)])
        if isinstance(value, tuple):
            return "(" + "".join(f"{text(each)}," for each in value) + ")"
        constants.append(value)
        return f"constants[{len(constants) - 1}]"

    made: Callable[[Mapping[str, int]], Sequence[Any]]
    made = eval(f"lambda at: {text(tuple(args))}", {"constants": constants})
    return made


def _is_rows(name: str) -> bool:
    return name.endswith(".rows")


def _getter(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """A function that takes some items out of all, without a Python frame."""
    if len(keys) > 1:
        return itemgetter(*keys)
    first = keys[0] if keys else 0
    return itemgetter(slice(first, first + len(keys)))


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
