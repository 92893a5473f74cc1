"""Experts of a mixture inside the graph of a step, with few launches.

mlx-lm computes them in ``SwitchGLU``: two gathered products, an activation and a third product. In
a graph of :mod:`.compiled_step` the first two and the activation are one launch, and the third is
another. Where rows seldom share experts, that one also adds up the products by their scores, which
the model's own code does behind it, as ``(y * scores[..., None]).sum(axis=-2)``: :mod:`.recorder`
sees that. Where :mod:`.routers` recognises how the experts and scores came about, one launch does
that too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..metal.gather_qmm.experts import share_experts
from ..ops.experts import experts_chosen, experts_combined, experts_products
from ..ops.quantized_route import is_qmv
from ..options import PackedMatrix
from ..runtime.backend import use_backend
from .activations import recognise_activation
from .attention_patch import made_class, stock_class
from .matcher import Match, Mismatch
from .recorder import Node, Recorder, Rule, chooses, current, recorded, recording
from .routers import argument, plain, recognise_router
from .step_products import Product
from .step_slots import current_step

# The name of what such a module is.
EXPERTS = "experts"
# The key of the notes under which is how experts were chosen last.
CHOSEN = -1
# The layers of mlx-lm's classes of experts.
_LAYERS = {"SwitchGLU": ("gate_proj", "up_proj", "down_proj"), "SwitchMLP": ("fc1", "fc2")}


class Chosen(NamedTuple):
    """Products with experts, and how to give their sum by scores for the same or other experts.

    That may have a residual.
    """

    y: mx.array
    indices: mx.array
    combine: Callable[..., mx.array]


class Total(NamedTuple):
    """A sum by scores, and the same in the dtype of the products."""

    y: mx.array
    in_dtype: mx.array


def is_experts(cls: type) -> bool:
    """Whether a class is one of mlx-lm's of experts."""
    stock = stock_class(cls)
    return stock.__module__ == "mlx_lm.models.switch_layers" and stock.__name__ in _LAYERS


def layers_of(experts: Any) -> list[Any]:
    """The layers of such a module."""
    return [experts[name] for name in _LAYERS["SwitchMLP" if "fc1" in experts else "SwitchGLU"]]


def holds_experts(module: nn.Module) -> bool:
    """Whether a module's code chooses experts for a part, or adds up what one gives."""
    children = [child for child in module.values() if isinstance(child, nn.Module)]
    holders = [any(is_experts(type(part)) for part in child.values()) for child in children]
    routers = [chooses(inspect.getattr_static(type(child), "__call__", None)) for child in children]
    beside = any(routes and not holds for routes, holds in zip(routers, holders, strict=True))
    return any(is_experts(type(child)) for child in children) or (any(holders) and beside)


def how_chosen(module: nn.Module) -> str:
    """How the code of a module chooses experts, for a reader, or why that is not recognised."""
    recorder = Recorder(RULES, on_module=_seen, on_pair=chosen_at_once)
    call = recorded(type(module).__call__)
    if isinstance(call, Mismatch):
        return f"{call}"
    for width in dict.fromkeys(filter(None, map(_width, module.modules()))):
        try:
            with use_backend("reference"), recording(recorder):
                mx.compile(partial(call, module))(mx.zeros((1, 1, width)))
        except Exception:  # this is not the width of its input, or it takes more
            continue
        break
    what = [f"chosen in one launch: {each}" if each else f"{each}" for each in recorder.reports]
    # What takes more than rows is seen where all of the model runs.
    return "; ".join(dict.fromkeys(what)) or "how experts are chosen is seen in a step's graph"


def _width(layer: Any) -> int | None:
    w = layer.get("weight")
    if not isinstance(w, mx.array) or w.ndim < 2:
        return None
    packed = "scales" in layer
    return Format(layer.group_size, layer.bits, layer.mode).dims(w) if packed else w.shape[-1]


def _seen(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], y: Any) -> None:
    """Keep what experts gave, of a class that is not this package's yet."""
    if is_experts(type(module)) and len(args) == 2:
        sums = Chosen(y, args[1], lambda _, scores: (y * scores[..., None]).sum(axis=-2))
        recorder.notes[id(y)] = sums


@cache
def experts_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that stands in for one of mlx-lm's of experts."""
    body = {"__call__": _call, "_fuses": cls, "_match": Match(EXPERTS, {})}
    return made_class(stock_class(cls), (cls,), body, experts_class)


def _call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
    recorder, layers = current.get(), layers_of(self)
    # Adapters stand in the place of layers, and have no scales.
    packed = recorder is not None and all("scales" in each for each in layers)
    taken = packed and not any("global_scale" in each or each.training for each in layers)
    few = is_qmv(x) and indices.shape[:-1] == x.shape[:-1]
    formats = [Format(each.group_size, each.bits, each.mode) for each in layers] if taken else []
    if recorder is None or not few or not formats or formats[0] != formats[-2]:
        y: mx.array = type(self)._fuses.__call__(self, x, indices)
        return y
    *ahead, down = (
        PackedMatrix(*(each.get(name) for name in ("weight", "scales", "biases", "bias")))
        for each in layers
    )
    gate = recognise_activation(self.activation) if len(ahead) > 1 else None

    def between(experts: mx.array) -> mx.array:
        step = current_step.get()
        norm = step.products.norms.get(id(x)) if step is not None else None
        rows, deferred = (norm.x, (norm.tile_squares, norm.eps)) if norm else (x, None)
        products = experts_products(rows, experts, ahead, formats[0], gate, deferred)
        h: mx.array = products[0] if gate else self.activation(*products[::-1])
        return h

    def combine(experts: mx.array, scores: mx.array, residual: mx.array | None = None) -> mx.array:
        h = between(experts)
        if not share_experts(scores.shape, len(down.w)):
            return experts_combined(h, experts, scores, down, formats[-1], residual)
        # Only the product reads matrices once for all sequences.
        (y,) = experts_products(h, experts, [down], formats[-1])
        total = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        return total if residual is None else residual + total

    (y,) = experts_products(between(indices), indices, [down], formats[-1])
    recorder.notes[id(y)] = Chosen(y, indices, combine)
    return y


def _summed(recorder: Recorder, node: Node) -> mx.array | None:
    """For ``(y * scores[..., None]).sum(axis=-2)`` the sum by scores at once."""
    product = recorder.node(node.args[0])
    if product is None or product.op != "mul" or argument(node, 2, "keepdims"):
        return None
    for y, by in (product.args, product.args[::-1]):
        y, scores = plain(recorder, y), _unexpanded(recorder, by)
        chosen = recorder.notes.get(id(y))
        if not isinstance(chosen, Chosen) or scores is None or scores.shape != y.shape[:-1]:
            continue
        if argument(node, 1, "axis") in (-2, y.ndim - 2):
            return _combined(recorder, chosen, scores, node)
    return None


def _combined(recorder: Recorder, chosen: Chosen, scores: mx.array, node: Node) -> mx.array:
    router = recognise_router(recorder, chosen.indices, scores, node.line)
    recorder.reports.append(router or recorder.notes.get(CHOSEN, router))
    experts = chosen.indices
    if router and router.logits.shape[:-1] == scores.shape[:-1]:
        experts, scores = experts_chosen(*router)
    total = chosen.combine(experts, scores)
    if (step := current_step.get()) is not None:
        again = partial(chosen.combine, experts, scores)
        step.products.keep(
            Product(total, lambda residual, _: [again(residual)], None, defers=False)
        )
    dtype = node.y.dtype
    made = Total(total if total.dtype == dtype else total.astype(dtype), total)
    recorder.notes[id(made.y)] = made
    return made.y


def chosen_at_once(recorder: Recorder, indices: mx.array, shares: mx.array) -> Any:
    """Experts and shares that a function gave in one launch, for code that changes them later."""
    if indices.shape != shares.shape or not mx.issubdtype(indices.dtype, mx.integer):
        return None
    router = recognise_router(recorder, indices, shares, "")
    if not router or router.logits.shape[:-1] != shares.shape[:-1]:
        return None
    recorder.notes[CHOSEN] = router
    return tuple(experts_chosen(*router))


def _cast(recorder: Recorder, node: Node) -> mx.array | None:
    """A sum by scores in the dtype of the products, which it was cast from."""
    total = recorder.notes.get(id(node.args[0]))
    if not isinstance(total, Total) or total.in_dtype.dtype != argument(node, 1, "dtype"):
        return None
    return total.in_dtype


def _unexpanded(recorder: Recorder, array: Any) -> mx.array | None:
    """``scores`` of ``scores[..., None]`` or ``mx.expand_dims(scores, axis=-1)``."""
    node = recorder.node(plain(recorder, array))
    if node is None:
        return None
    if node.op == "getitem":
        return node.args[0] if node.args[1] == (..., None) else None
    last = node.op == "expand_dims" and argument(node, 1, "axis") == -1
    return node.args[0] if last else None


# What a graph of a step takes the place of.
RULES: dict[str, Rule] = {"sum": _summed, "astype": _cast}
