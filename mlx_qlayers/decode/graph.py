"""The nodes of a step, patterns of them, and how rules rewrite them.

A node is what gives an array: a primitive of MLX with its arguments, an input, a constant, or an
operation of this package that a rule put there. Nodes never change; two that compute the same are
one. A rule is a pattern and a function of what the pattern found, which gives another node or None:

    RULES = [(P("Multiply(x, Sigmoid(x))"), silu)]

    def silu(x: Node, root: Node) -> Node:
        return root.like("Silu", x)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import permutations
from math import isclose
from typing import Any, NamedTuple

import mlx.core as mx


class Size(NamedTuple):
    """A number that depends on the batch size or on positions: ``const + sum(count * name)``."""

    const: Any
    terms: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        parts = [name if n == 1 else f"{n} {name}" for name, n in self.terms]
        return " + ".join([*parts, *[str(self.const)] * bool(self.const)])

    def __repr__(self) -> str:
        return str(self)

    def at(self, values: Mapping[str, int]) -> Any:
        """The number where the names have these values."""
        return self.const + sum(count * values[name] for name, count in self.terms)


def resolved(value: Any, values: Mapping[str, int]) -> Any:
    """Arguments of a node with numbers in the place of sizes; a name may not be missing."""
    if isinstance(value, Size):
        return value.at(values)
    if isinstance(value, tuple):
        return tuple(resolved(each, values) for each in value)
    return value


def names_in(value: Any) -> frozenset[str]:
    """The names that the sizes in arguments depend on."""
    if isinstance(value, Size):
        return frozenset(name for name, _ in value.terms)
    if isinstance(value, tuple):
        return frozenset[str]().union(*map(names_in, value))
    return frozenset()


def product(sizes: Iterable[Any]) -> Any:
    """The product of numbers, of which one may be a size."""
    total: Any = 1
    for each in sizes:
        size, by = (each, total) if isinstance(each, Size) else (total, each)
        if isinstance(size, Size):
            total = Size(size.const * by, tuple((name, n * by) for name, n in size.terms))
        else:
            total = size * by
    return total


class Spec(NamedTuple):
    """Shape and dtype of an array, with sizes in the shape."""

    shape: tuple[Any, ...]
    dtype: mx.Dtype


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Node:
    """An operation that gives one array or several."""

    op: str  # a primitive of MLX, `Input`, `Constant`, `Item` of several arrays, or of this package
    src: tuple[Any, ...]  # the nodes that its arrays come from; None for one that is left out
    arg: tuple[Any, ...]  # its other arguments; `Input` has its name, `Item` its number
    outputs: tuple[Spec, ...]  # what it gives

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the first array."""
        return self.outputs[0].shape

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the first array."""
        return self.outputs[0].dtype

    def like(self, op: str, *src: Node | None, arg: tuple[Any, ...] = ()) -> Node:
        """Another node that gives arrays of the same shapes."""
        return Node(op, src, arg, self.outputs)

    def item(self, number: int) -> Node:
        """One of several arrays."""
        return Node("Item", (self,), (number,), (self.outputs[number],))

    def key(self) -> Any:
        """Equal for nodes that compute the same."""
        return self.op, tuple(map(id, self.src)), self.arg, self.outputs

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.op}{list(self.arg) if self.arg else ''} ({shape})"


@dataclass(frozen=True, eq=False, repr=False)
class Value:
    """A constant array as an argument of a node: known by its identity."""

    array: mx.array

    def __repr__(self) -> str:
        return str(self.array.item()) if self.array.size == 1 else "..."


def number_of(node: Node | None) -> Any:
    """The number that a constant is, also one that is cast or broadcast; None for other nodes."""
    inner = node
    while inner is not None and inner.op in ("Broadcast", "AsType"):
        inner = inner.src[0]
    if node is None or inner is None or inner.op != "Constant" or inner.arg[0].array.size != 1:
        return None
    return inner.arg[0].array.astype(node.dtype).item()


@dataclass(frozen=True)
class Graph:
    """A step: its outputs by name. Its inputs are the ``Input`` nodes."""

    outputs: dict[str, Node]
    # The graphs that rules made of it for batch sizes.
    variants: dict[Any, Graph] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes, each behind those that it takes."""
        order: dict[Node | None, None] = {None: None}
        stack: list[Node | None] = [*reversed(self.outputs.values())]
        while stack:
            node = stack[-1]
            if node not in order and node:
                before = [s for s in node.src if s not in order]
                if before:
                    stack += reversed(before)
                    continue
                order[node] = None
            stack.pop()
        return [node for node in order if node]

    def replaced(self, places: Mapping[Node, Node]) -> Graph:
        """The graph with other nodes in the place of some, which may take what those took."""
        done: dict[Node, Node] = {}

        def new(node: Node) -> Node:
            if node not in done:
                other = places.get(node, node)
                src = tuple(s and new(s) for s in other.src)
                same = src == other.src
                made = other if same else Node(other.op, src, other.arg, other.outputs)
                done[node] = done[other] = done.get(other, made)
            return done[node]

        for node in self.nodes:
            new(node)
        return Graph({name: new(node) for name, node in self.outputs.items()})

    def uses(self) -> Counter[Node]:
        """How often each node is taken, by others or as a result."""
        taken = Counter(s for node in self.nodes for s in node.src if s)
        taken.update(self.outputs.values())
        return taken


def less(size: Any, by: Any) -> Any:
    """A number that may be a size, less another."""
    return size._replace(const=size.const - by) if isinstance(size, Size) else size - by


def first_rows(node: Node) -> tuple[Node, Any]:
    """The array whose first rows along the third axis a node is, and how many; or it and None."""
    if node.op != "Slice" or len(node.shape) != 4:
        return node, None
    (start, stop, step), whole = node.arg, node.src[0]
    rest = *whole.shape[:2], stop[2], whole.shape[3]
    first = not any(start) and {*step} == {1} and stop == rest
    return (whole, stop[2]) if first else (node, None)


# Operations whose operands may be in any order.
_COMMUTES = ("Add", "Multiply", "Maximum", "Minimum", "LogicalAnd", "LogicalOr")


@dataclass(frozen=True)
class Pattern:
    """A description of a node and its sources."""

    ops: tuple[str, ...] = ()  # names of operations, any of which it is; none for any node
    ways: tuple[Pattern, ...] = ()  # in which else it may look, if all that follows is left out
    src: tuple[Pattern, ...] | None = None  # of its sources; None for any
    name: str = ""  # what rules know it by; a name found twice is the same node
    arg: Callable[..., bool] | None = None  # whether its arguments fit; None for any
    number: bool = False  # whether it is a constant, which rules get as a number
    near: float | None = None  # about which number that is; None for any
    once: bool = False  # whether no other node may take it
    more: bool = False  # whether it may have further sources than `src`

    def match(
        self, node: Node | None, found: dict[str, Any], uses: Mapping[Node, int]
    ) -> Iterator[dict[str, Any]]:
        """The nodes by the pattern's names, for each way in which the node fits."""
        for way in self.ways:
            yield from way.match(node, found, uses)
        if node is None or self.ways or (self.ops and node.op not in self.ops):
            return
        if self.number:
            value = number_of(node)
            if value is None or found.get(self.name, value) != value:
                return
            if self.near is None or isclose(value, self.near, rel_tol=1e-2):
                yield found | {self.name: value} if self.name else found
            return
        if self.name and found.get(self.name, node) is not node:
            return
        if self.once and uses.get(node, 1) != 1:
            return
        if self.arg is not None and not self.arg(*node.arg):
            return
        found = found | {self.name: node} if self.name else found
        if self.src is None:
            yield found
        elif len(node.src) == len(self.src) or (self.more and len(node.src) > len(self.src)):
            orders = permutations(node.src) if node.op in _COMMUTES else [node.src]
            for order in orders:
                yield from _all(self.src, order, found, uses)


def _all(
    patterns: Sequence[Pattern],
    nodes: Sequence[Node | None],
    found: dict[str, Any],
    uses: Mapping[Node, int],
) -> Iterator[dict[str, Any]]:
    if not patterns:
        yield found
        return
    for each in patterns[0].match(nodes[0], found, uses):
        yield from _all(patterns[1:], nodes[1:], each, uses)


def fits(pattern: Pattern, node: Node | None) -> dict[str, Any] | None:
    """The nodes by a pattern's names, for the first way in which a node fits, or None."""
    return next(pattern.match(node, {}, {}), None)


def P(text: str, **known: Pattern) -> Pattern:
    """A pattern as a text.

    ====================  ====================================================================
    ``x``, ``_``          any node, by that name or none; or what ``known`` has by that name
    ``Sin``, ``Sin(x)``   a node of an operation, of any sources, or of these
    ``Sin(x, ...)``       it may have more sources
    ``Sin[2, _](x)``      with arguments, of which some are any
    ``(Sin | Cos)(x)``    of one of some operations
    ``p | q``             one of some patterns
    ``~Sin(x)``           with that operation or without it
    ``+Sin(x)``           no other node takes it
    ``y @ Sin(x)``        by a name
    ``-x``                a constant, also cast or broadcast: the number, by that name
    ``0.5``               a constant that is about this number
    ====================  ====================================================================
    """
    return _read(ast.parse(text, mode="eval").body, known)


def _read(text: ast.AST, known: Mapping[str, Pattern]) -> Pattern:
    match text:
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.Name(id=name):
            return Pattern((name,)) if name[0].isupper() else Pattern(name=name.strip("_"))
        case ast.BinOp(left=ast.Name(id=name), op=ast.MatMult(), right=inner):
            return replace(_read(inner, known), name=name)
        case ast.BinOp(left=left, right=right):
            one, other = _read(left, known), _read(right, known)
            bare = one.ops and other.ops and one.src is other.src is None
            return Pattern(one.ops + other.ops) if bare else Pattern(ways=(one, other))
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            whole = _read(inner, known)
            return Pattern(ways=(whole, *(whole.src or ())))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)):
            return Pattern(name=name, number=True)
        case ast.UnaryOp(operand=inner):
            return replace(_read(inner, known), once=True)
        case ast.Subscript(value=inner, slice=arguments):
            each = arguments.elts if isinstance(arguments, ast.Tuple) else [arguments]
            wanted = [None if isinstance(a, ast.Name) else ast.literal_eval(a) for a in each]
            return replace(_read(inner, known), arg=partial(_are, wanted))
        case ast.Constant(value=int() | float() as number):
            return Pattern(number=True, near=number)
        case ast.Call(func=inner, args=args):
            src = tuple(_read(a, known) for a in args if getattr(a, "value", None) is not ...)
            return replace(_read(inner, known), src=src, more=len(src) < len(args))
    raise ValueError(ast.dump(text))


def _are(wanted: Sequence[Any], *arguments: Any) -> bool:
    """Whether arguments are those that are wanted, of which None is any."""
    pairs = zip(wanted, arguments, strict=False)
    return len(wanted) == len(arguments) and all(a is None or a == b for a, b in pairs)


# A pattern, and what takes its place: a function of the nodes by their names and ``root``.
Rule = tuple[Pattern, Callable[..., "Node | None"]]


def rewrite(graph: Graph, rules: Iterable[Rule]) -> Graph:
    """The graph with rules applied from its inputs on; equal nodes become one, unused ones none."""
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        for op in rule[0].ops or ("",):
            by_op.setdefault(op, []).append(rule)
    uses, now, made = graph.uses(), Counter[Node](), dict[Any, Node]()

    def other(node: Node) -> Node | None:
        for pattern, make in by_op.get(node.op, ()):
            for found in pattern.match(node, {}, now):
                new = make(**found, root=node)
                if new is not None and new is not node:
                    return made.setdefault(new.key(), new)
        return None

    done: dict[Node | None, Node | None] = {None: None}
    for node in graph.nodes:
        src = tuple([done[s] for s in node.src])
        new = node if src == node.src else Node(node.op, src, node.arg, node.outputs)
        new = made.setdefault(new.key(), new)
        while (better := other(new)) is not None:
            new = better
        now[new] += uses[node]
        done[node] = new
    return Graph({name: done[node] for name, node in graph.outputs.items()})  # type: ignore[misc]
