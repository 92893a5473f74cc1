"""The graph of a model's step as text: what its code computes, and what is left after the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .caches import blank, facts
from .capture import Unsupported, stopping_line
from .captured import captured
from .effects import Effects
from .graph import Graph, Node, number_of
from .rules import fused
from .rules.attention_step import TracedCaches
from .twin import leaves, twin

_PARTS = ("scales", "biases", "bias")
# In short: of a name all but its end, and sources that are left out.
_LONG = re.compile(r"^[\w.]*(?:layers|h)\.\d+\.(\w+\.)*?(?=\w+(\.(weight|bias))?$)")
_UNTOLD = re.compile(r"-$|semaphores\b|constant|[\d.e+-]+$")
_NUMBERS = re.compile(r"^%\d+ = |%[\d.]+(?:, )?")


def graphs(model: Any) -> tuple[Graph, Graph]:
    """The graph of a step with the caches that a model makes: as captured, and after the rules.

    No number is computed. ``Unsupported`` names the line or the primitive that cannot be captured.
    """
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    # Some models keep arrays of their first call.
    model = twin(model, lambda path, array: array)
    effects, changed = Effects(model.modules()), None
    try:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
        blank(own := [*leaves(caches)])
        some = [facts(c, 1) for c in own]
        step = captured(model, caches, some, 1, 1).captured
    except Exception as error:
        changed = stopping_line(error)
    if changed := effects.undo() or changed:
        raise Unsupported(changed)
    return step.graph, fused(step.graph, TracedCaches([each.key for each in some], step.names))


def lines(graph: Graph, layer: int | None = None, brief: bool = False) -> Iterator[str]:
    """A line for each node, or each of a decoder layer: number, operation, sources and shape.

    In brief it has no arguments and shapes, and the last names of arrays.
    """
    nodes = graph.nodes
    shown = [n for n in nodes if n.op not in ("Input", "Constant", "Item")]
    numbers = {node: f"%{i}" for i, node in enumerate(shown)}

    def name(node: Node | None) -> str:
        if node is None:
            return "-"
        if node.op == "Input":
            return str(node.arg[0]).removeprefix("model.")
        if node.op == "Item":
            return f"{name(node.src[0])}.{node.arg[0]}"
        if node.op == "Constant":
            number = number_of(node)
            return "constant" if number is None else f"{number:.6g}"
        return numbers[node]

    for node in shown if layer is None else _of_layer(shown, layer):
        if brief:
            words = [each for each in node.arg[3:] if isinstance(each, str)]
            names = [_LONG.sub("", each) for each in _matrices([name(s) for s in node.src])]
            sources = ", ".join(each for each in names if not _UNTOLD.match(each))
            yield f"{numbers[node]} = {', '.join([node.op, *words])}({sources})"
            continue
        arguments = f"{list(node.arg)}" if node.arg else ""
        shapes = " ".join(f"({', '.join(map(str, spec.shape))})" for spec in node.outputs)
        sources = ", ".join(_matrices([name(each) for each in node.src]))
        yield f"{numbers[node]} = {node.op}{arguments}({sources}) {shapes}"


def operations(graph: Graph, layer: int | None = None) -> str:
    """The operations of nodes in their order, with what they take of the model and of caches."""
    short = (_NUMBERS.sub("", line) for line in lines(graph, layer, brief=True))
    return " ".join(each.replace(", )", ")").replace("()", "") for each in short)


def _matrices(names: list[str]) -> Iterator[str]:
    """Names of sources, in which the arrays of a matrix are one."""
    for i, name in enumerate(names):
        layer, _, array = name.rpartition(".")
        if array == "weight" and f"{layer}.scales" in names:
            yield layer
        elif not (array in _PARTS and f"{layer}.weight" in names[:i]):
            yield name


def _of_layer(nodes: list[Node], layer: int) -> list[Node]:
    """The nodes from the first one that takes weights of a layer to the next layer's first."""
    takes = ([_takes(node, number) for node in nodes] + [True] for number in (layer, layer + 1))
    begin, end = (each.index(True) for each in takes)
    return nodes[begin:end]


def _takes(node: Node, layer: int) -> bool:
    names = (str(s.arg[0]) for s in node.src if s is not None and s.op == "Input")
    return any(f".layers.{layer}." in name or f".h.{layer}." in name for name in names)
