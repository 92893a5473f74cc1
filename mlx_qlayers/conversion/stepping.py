"""A model that decodes by the graph of its step, wherever there is one: see :mod:`..decode`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any

import mlx.nn as nn

from ..decode.ahead import first
from ..decode.capture import Unsupported
from ..decode.drawing import graphs
from ..decode.engine import step
from ..decode.twin import is_stepped, stock_class
from ..layers.sharded import LINEARS
from ..runtime.backend import current, within
from ..runtime.devices import device_of
from .attention_patch import made_class
from .long_prompts import in_turn
from .plan import Change, Predicate, is_stage
from .report import ALREADY, FUSED, INVARIANT, FusionReport

# The name of what a whole model is.
STEP = "step"


@cache
def step_class(
    cls: type[nn.Module], invariant: bool = False, by_graphs: bool = True
) -> type[nn.Module] | None:
    """The class that stands in for that of a whole model; None for other modules.

    Steps of an ``invariant`` model are computed as its prompts are, on a GPU by graphs if
    ``by_graphs``.
    """
    function = inspect.getattr_static(cls, "__call__", None)
    if not isinstance(function, FunctionType):
        return None
    names = [*inspect.signature(function).parameters]
    if "cache" not in names[2:]:
        return None
    second = names[2] == "cache"

    def call(self: Any, *args: Any, **options: Any) -> Any:
        caches = args[1] if second and len(args) == 2 else options.get("cache")
        plain = len(args) + len(options) == 2 and len(args) > 0
        # The graph of a subclass whose method calls this has more in it than this gives.
        plain = plain and type(self).__call__ is call
        integers, now = "_integers" in vars(self) and not self.training, current.get()
        if (integers and not now.integers) or (invariant and not now.invariant):
            with within(current, now._replace(invariant=invariant, integers=integers)):
                return call(self, *args, **options)
        plain = plain and (not invariant or (by_graphs and device_of().gpu))
        if plain and caches and (logits := step(self, args[0], caches)) is not None:
            return logits
        now = current.get()._replace(invariant=invariant, integers=integers)
        with within(current, now), first():
            return in_turn(function, self, *args, **options)

    body = {"__call__": call, "_fuses": cls, "_invariant": invariant}
    # As they are given: equal arguments, said otherwise, would be another class.
    settings = (invariant,) if by_graphs else (invariant, by_graphs)
    return made_class(stock_class(cls), (cls,), body, step_class, *settings)


def planned(
    model: nn.Module, steps: Iterable[Change], predicate: Predicate | None, invariant: bool = False
) -> tuple[Change, ...]:
    """The step for a model that is called with tokens and caches; nothing for other modules."""
    classes = {id(step.module): step.cls for step in steps if step.cls is not None}
    ours = classes or any(isinstance(part, LINEARS) for part in model.modules())
    cls = step_class(classes.get(id(model)) or type(model), invariant)
    if is_stepped(model):
        return (Change(model, FusionReport("", STEP, ALREADY, "")),)
    # A model without a layer of this package stays as it is.
    if cls is None or not ours:
        return ()
    found = Change(model, FusionReport("", STEP, FUSED, ""), cls)
    if predicate is not None and not predicate("", model):
        return (found.left("the predicate says so"),)
    if is_stage(model):
        return (found.left("other ranks have the other layers"),)
    if invariant:
        return (Change(model, FusionReport("", STEP, FUSED, INVARIANT), cls),)
    try:
        before, after = (len(graph.nodes) for graph in graphs(model))
    except Unsupported as error:
        return (found.left(str(error)),)
    what = f"a graph of {before} operations as one of {after}"
    return (Change(model, FusionReport("", STEP, FUSED, what), cls),)
