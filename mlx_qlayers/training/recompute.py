"""Training that keeps fewer activations: some are computed again for the gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..conversion.verify import arrays_in
from ..dispatch.gradients import forgetting, listed
from ..layers.qlinear import QLinear
from ..ops.add_low_rank import add_low_rank
from ..ops.quantized_matmul import quantized_matmul
from ..runtime.backend import current, within
from ..runtime.devices import device_of
from ..runtime.transformed import has_values, without_graph


def recompute_activations(model: nn.Module, layers: bool = False) -> int:
    """Have a model in training mode keep less of its forward pass for the gradients.

    Adapters keep their input as it is, not in their own precision, and are computed by
    :func:`~mlx_qlayers.ops.add_low_rank.add_low_rank`; those of DoRA keep no dense matrix, with
    which they do not multiply; gated feed-forward layers keep the gate and the other
    factor, and neither the activation nor its product. The gradients compute these anew, which
    takes no product with a large matrix; results stay the same. Where kernels run on a CPU all that
    they are given would stay in memory, so there layers keep their input alone, as with ``layers``.

    Modules of mlx-lm's ``LoRALinear`` and ``LoRASwitchLinear``, its ``DoRALinear`` around a
    ``QLinear``, and those with ``gate_proj``, ``up_proj`` and ``down_proj`` of any class whose code
    lets it, get another class and keep everything else.

    Args:
        model: with its adapters.
        layers: have each of ``model.layers`` keep nothing but its input and run again, as
            ``grad_checkpoint`` of mlx-lm's trainer does, in less memory.

    Returns:
        How many modules were changed.

    Example:
        >>> from mlx_lm.tuner.lora import LoRALinear
        >>> model = nn.Sequential(LoRALinear.from_base(nn.Linear(64, 64)), nn.ReLU())
        >>> recompute_activations(model) > 0
        True

    Source: Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.
    """
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

    found: list[tuple[Any, Any]] = []
    for module in model.modules():
        cls: Any = type(module)
        if cls is LoRALinear:
            found.append((module, _made(cls, _lora)))
        elif cls is DoRALinear and isinstance(module["linear"], QLinear):
            found.append((module, _made(cls, _dora)))
        elif cls is LoRASwitchLinear:
            found.append((module, _made(cls, _experts)))
        elif _is_gated(module):
            found.append((module, _made(cls, _gated)))
        elif device_of().launches_at_once and isinstance(module, nn.RMSNorm | nn.RoPE):
            found.append((module, _made(cls, _layer)))  # on a CPU many operations, all kept
    for module, cls in found:
        module.__class__ = cls
    on_cpu = device_of().launches_at_once
    whole = [*filter(None, model.layers if layers or on_cpu else ())]
    for layer in whole if on_cpu else ():  # where a part's own arrays would all be kept for another
        parts = layer.children().values()
        whole = whole + [m for m in parts if isinstance(m, nn.Module) and m.trainable_parameters()]
    for module in whole:
        own: Any = type(module)
        module.__class__ = _made(own, _layer)
    return len({id(module) for module in (*(module for module, _ in found), *whole)})


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mx.checkpoint``, of which less is in memory at once.

    MLX's keeps the results until the gradients are there, and computes anew as soon as it has
    them; gradients of parameters come last, and keep what they need. Here the function is
    computed anew once the cotangents are there, with the same random numbers, and no gradient is
    there before all of its gradients are.
    """

    def call(*args: Any, **options: Any) -> Any:
        given, made, before = _holes((args, options)), list[Any](), _key()
        key, arrays = mx.array(before), arrays_in((args, options))
        # Inputs of kernels on a CPU have values, and keep what these were computed from.
        at_once = device_of().launches_at_once and has_values(arrays)

        def cut(arrays: Any) -> list[mx.array]:
            return [without_graph(a) for a in listed(arrays)] if at_once else listed(arrays)

        def result(*held: mx.array) -> Any:
            some, named = _holding(given, held)
            with within(current, current.get()._replace(sparing=True)):
                return function(*some, **named)

        def flat(*held: mx.array) -> list[mx.array]:
            y = result(*cut(held))
            made[:] = [_holes(y)]
            return cut(arrays_in(y))

        def again(*held: mx.array) -> list[mx.array]:
            now = mx.array(_key())
            if is_drawn:
                _key()[:] = key
            try:
                return arrays_in(result(*held))
            finally:
                if is_drawn:
                    _key()[:] = now

        node: Any = mx.custom_function(flat)

        @node.vjp
        def _(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
            if at_once:
                with forgetting():
                    return cut(mx.vjp(again, cut(primals), cut(cotangents))[1])
            dy = listed(cotangents)
            gradients = mx.vjp(again, mx.depends(listed(primals), dy), dy)[1]
            return mx.depends(gradients, gradients)

        outputs = listed(node(*arrays))
        is_drawn = _key() is not before  # each number replaces the key
        return _holding(made, outputs)[0]

    return call


class _Hole:
    """The place of an array in a tree."""


def _key() -> mx.array:
    state: Any = mx.random.state
    key: mx.array = state[0]
    return key


def _holes(tree: Any) -> Any:
    return tree_map(lambda a: _Hole() if isinstance(a, mx.array) else a, tree)


def _holding(tree: Any, arrays: Any) -> Any:
    """The same tree with arrays in its holes."""
    left = iter(arrays)
    return tree_map(lambda a: next(left) if isinstance(a, _Hole) else a, tree)


@contextmanager
def _parameters(module: Any, some: dict[str, Any]) -> Iterator[None]:
    """Have a module hold other arrays for as long as this lasts."""
    before = tree_map(lambda a: a, {k: v for k, v in module.parameters().items() if k in some})
    module.update(some)
    try:
        yield
    finally:
        module.update(before)


@cache
def _made(cls: Any, call: Callable[..., Any]) -> Any:
    """A class like another that in training calls a function, with the other's own ahead."""
    stock = cls.__call__

    def called(self: Any, *args: Any, **options: Any) -> Any:
        run = partial(call, stock) if self.training else stock
        return run(self, *args, **options)

    return type(cls.__name__, (cls,), {"__call__": called, "__module__": cls.__module__})


def _lora(_: Any, self: Any, x: mx.array) -> mx.array:
    def added(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return (self.scale * ((x @ a) @ b)).astype(x.dtype)

    z, *given = self.dropout(x), self["lora_a"], self["lora_b"]
    frozen = not self.linear.trainable_parameters()
    if device_of().launches_at_once and frozen and has_values([x, z, *given]):
        dropped = [] if z is x else [z]
        return _joined(self.linear, self.scale, added)(x, *given, *dropped)
    y: mx.array = self.linear(x)
    return add_low_rank(y, z.astype(y.dtype), *given, scale=self.scale)


def _joined(linear: Any, scale: float, added: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A frozen layer and its adapter where kernels run at once: nothing but the inputs is kept.

    Its gradients share what :func:`add_low_rank`'s would compute again, in a third less memory.
    """

    def copies(x: mx.array, z: mx.array, *others: mx.array) -> list[mx.array]:
        mine = without_graph(x)
        return [mine, mine if z is x else without_graph(z), *map(without_graph, others)]

    def forward(x: mx.array, a: mx.array, b: mx.array, *dropped: mx.array) -> mx.array:
        x, z, a, b = copies(x, *(dropped or [x]), a, b)
        return without_graph(linear(x) + added(z, a, b))

    product: Any = mx.custom_function(forward)

    @product.vjp
    def _(primals: Any, cotangent: mx.array, _: mx.array) -> list[mx.array]:
        x, a, b, *dropped = primals
        x, z, a, b = copies(x, *(dropped or [x]), a, b)
        dy = without_graph(cotangent)
        if isinstance(linear, QLinear):
            arrays = dy, linear["weight"], linear["scales"], linear.get("biases")
            fmt = linear.group_size, linear.bits, linear.mode
            dx = quantized_matmul(*arrays, False, *fmt)
        else:
            with forgetting():
                dx = without_graph(mx.vjp(lambda x: [linear(x)], [x], [dy])[1][0])
        dy, rows = dy.astype(mx.result_type(z, b)), [*range(z.ndim - 1)]
        back, low = scale * (dy @ b.T), scale * (z @ a)
        da, db = (mx.tensordot(u, v, [rows, rows]) for u, v in ((z, back), (low, dy)))
        dz = (back @ a.T).astype(x.dtype)
        found = [dx, da, db, dz] if dropped else [dx + dz, da, db]
        return [without_graph(d.astype(p.dtype)) for d, p in zip(found, primals, strict=True)]

    return cast(Callable[..., mx.array], product)


def _dora(_: Any, self: Any, x: mx.array) -> mx.array:
    def scaled(x: mx.array, y: mx.array, *some: mx.array) -> mx.array:
        a, b, m, norms = some
        y = add_low_rank(y, x.astype(y.dtype), a, b, scale=self.scale)
        return (m / norms).astype(x.dtype) * y

    a, b = self["lora_a"], self["lora_b"]
    # The dense matrix is there for its rows' norms alone, where the stock layer keeps it.
    adapted = self._dequantized_weight() + (self.scale * b.T) @ a.T
    norms = mx.stop_gradient(mx.linalg.norm(adapted, axis=1))
    product = self.linear._product(x, with_bias=False)
    y: mx.array = checkpoint(scaled)(self.dropout(x), product, a, b, self["m"], norms)
    return y + self.linear["bias"] if "bias" in self.linear else y


def _experts(
    _: Any, self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False
) -> mx.array:
    given: Any = {"rhs_indices": indices, "sorted_indices": sorted_indices}

    def added(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        z = mx.gather_mm(x, a.swapaxes(-1, -2), **given)
        return (self.scale * mx.gather_mm(z, b.swapaxes(-1, -2), **given)).astype(x.dtype)

    y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
    return y + checkpoint(added)(self.dropout(x), self["lora_a"], self["lora_b"])


def _layer(stock: Any, self: Any, *args: Any, **options: Any) -> Any:
    def run(some: dict[str, Any], *args: Any, **options: Any) -> Any:
        with _parameters(self, some):
            return stock(self, *args, **options)

    return checkpoint(run)(self.trainable_parameters(), *args, **options)


class _Given:
    """A gated layer whose first two products are there."""

    def __init__(self, module: nn.Module, gate: mx.array, up: mx.array) -> None:
        self._module = module
        self.gate_proj: Callable[[None], mx.array] = lambda _: gate
        self.up_proj: Callable[[None], mx.array] = lambda _: up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _gated(stock: Any, self: Any, x: mx.array) -> Any:
    def rest(some: dict[str, Any], gate: mx.array, up: mx.array) -> Any:
        with _parameters(self, some):
            return stock(_Given(self, gate, up), None)

    own = self.trainable_parameters().items()
    some = {k: v for k, v in own if k not in ("gate_proj", "up_proj")}
    return checkpoint(rest)(some, self.gate_proj(x), self.up_proj(x))


def _is_gated(module: Any) -> bool:
    """Whether a module's code does nothing with its input but to multiply it twice."""
    if not {"gate_proj", "up_proj", "down_proj"} <= module.keys():
        return False
    if len(inspect.signature(type(module).__call__).parameters) != 2:
        return False
    down = getattr(module.down_proj, "linear", module.down_proj)
    if "weight" not in down:
        return False
    packed = "scales" in down
    width = down["scales"].shape[-1] * down.group_size if packed else down["weight"].shape[-1]
    z = mx.zeros((1, 1, width))
    try:
        type(module).__call__(_Given(module, z, z), None)
    except (AttributeError, TypeError, ValueError):
        return False
    return True
