"""Training that keeps fewer activations: some are computed again for the gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..dispatch.gradients import listed
from ..layers.qlinear import QLinear
from ..runtime.backend import backend


def recompute_activations(model: nn.Module, layers: bool = False) -> int:
    """Have a model in training mode keep less of its forward pass for the gradients.

    Adapters keep their input as it is, not in their own precision, and those of DoRA no dense
    matrix, with which they do not multiply; gated feed-forward layers keep the gate and the other
    factor, and neither the activation nor its product, but where kernels run on a CPU. The
    gradients compute these anew, which takes no product with a large matrix; results stay the same.

    Modules of mlx-lm's ``LoRALinear``, its ``DoRALinear`` around a ``QLinear``, and those with
    ``gate_proj``, ``up_proj`` and ``down_proj`` of any class whose code lets it, get another class
    and keep everything else.

    Args:
        model: with its adapters.
        layers: have each of ``model.layers`` keep nothing but its input and run again, as
            ``grad_checkpoint`` of mlx-lm's trainer does, in less memory.

    Returns:
        How many modules were changed.

    Example:
        >>> from mlx_lm.tuner.lora import LoRALinear
        >>> model = nn.Sequential(LoRALinear.from_base(nn.Linear(64, 64)), nn.ReLU())
        >>> recompute_activations(model)
        1

    Source: Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.
    """
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    found: list[tuple[Any, Any]] = []
    for module in model.modules():
        cls: Any = type(module)
        if cls is LoRALinear:
            found.append((module, _lora_class(cls)))
        elif cls is DoRALinear and isinstance(module["linear"], QLinear):
            found.append((module, _dora_class(cls)))
        elif _is_gated(module):
            found.append((module, _gated_class(cls)))
    for layer in filter(None, model.layers if layers else ()):
        whole: Any = type(layer)
        found.append((layer, _layer_class(whole)))
    for module, cls in found:
        module.__class__ = cls
    return len(found)


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mx.checkpoint``, of which less is in memory at once.

    MLX's keeps the results until the gradients are there, and computes anew as soon as it has
    them; gradients of parameters come last, and keep what they need. Here the function is
    computed anew once the cotangents are there, with the same random numbers, and no gradient is
    there before all of its gradients are.
    """

    def call(*args: Any, **options: Any) -> Any:
        given, made, before = (args, options), list[Any](), _key()
        key = mx.array(before)

        def flat(*held: mx.array) -> list[mx.array]:
            some, named = _holding(given, held)
            made[:] = [function(*some, **named)]
            return _arrays(made)

        def again(*held: mx.array) -> list[mx.array]:
            now = mx.array(_key())
            if is_drawn:
                _key()[:] = key
            try:
                return flat(*held)
            finally:
                if is_drawn:
                    _key()[:] = now

        node: Any = mx.custom_function(flat)

        @node.vjp
        def _(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
            dy = listed(cotangents)
            gradients = mx.vjp(again, mx.depends(listed(primals), dy), dy)[1]
            return mx.depends(gradients, gradients)

        outputs = listed(node(*_arrays(given)))
        is_drawn = _key() is not before  # each number replaces the key
        return _holding(made, outputs)[0]

    return call


def _key() -> mx.array:
    state: Any = mx.random.state
    key: mx.array = state[0]
    return key


def _arrays(tree: Any) -> list[mx.array]:
    found: list[mx.array] = []
    tree_map(lambda a: found.append(a) if isinstance(a, mx.array) else None, tree)
    return found


def _holding(tree: Any, arrays: Any) -> Any:
    """The same tree with other arrays."""
    left = iter(arrays)
    return tree_map(lambda a: next(left) if isinstance(a, mx.array) else a, tree)


@contextmanager
def _parameters(module: Any, some: dict[str, Any]) -> Iterator[None]:
    """Have a module hold other arrays for as long as this lasts."""
    before = tree_map(lambda a: a, {k: v for k, v in module.parameters().items() if k in some})
    module.update(some)
    try:
        yield
    finally:
        module.update(before)


def _made(cls: Any, call: Callable[..., Any]) -> Any:
    stock = cls.__call__

    def called(self: Any, *args: Any, **options: Any) -> Any:
        return (call if self.training else stock)(self, *args, **options)

    return type(cls.__name__, (cls,), {"__call__": called, "__module__": cls.__module__})


@cache
def _lora_class(cls: Any) -> Any:
    def call(self: Any, x: mx.array) -> mx.array:
        def added(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
            return (self.scale * ((x @ a) @ b)).astype(x.dtype)

        given = self.dropout(x), self["lora_a"], self["lora_b"]
        y: mx.array = self.linear(x) + checkpoint(added)(*given)
        return y

    return _made(cls, call)


@cache
def _dora_class(cls: Any) -> Any:
    def call(self: Any, x: mx.array) -> mx.array:
        def scaled(x: mx.array, y: mx.array, *some: mx.array) -> mx.array:
            a, b, m, norms = some
            y = y + (self.scale * ((x @ a) @ b)).astype(x.dtype)
            return (m / norms).astype(x.dtype) * y

        a, b = self["lora_a"], self["lora_b"]
        # The dense matrix is there for its rows' norms alone, where the stock layer keeps it.
        adapted = self._dequantized_weight() + (self.scale * b.T) @ a.T
        norms = mx.stop_gradient(mx.linalg.norm(adapted, axis=1))
        product = self.linear._product(x, with_bias=False)
        y: mx.array = checkpoint(scaled)(self.dropout(x), product, a, b, self["m"], norms)
        return y + self.linear["bias"] if "bias" in self.linear else y

    return _made(cls, call)


@cache
def _layer_class(cls: Any) -> Any:
    stock = cls.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        def run(some: dict[str, Any], *args: Any, **options: Any) -> Any:
            with _parameters(self, some):
                return stock(self, *args, **options)

        return checkpoint(run)(self.trainable_parameters(), *args, **options)

    return _made(cls, call)


class _Given:
    """A gated layer whose first two products are there."""

    def __init__(self, module: nn.Module, gate: mx.array, up: mx.array) -> None:
        self._module = module
        self.gate_proj: Callable[[None], mx.array] = lambda _: gate
        self.up_proj: Callable[[None], mx.array] = lambda _: up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@cache
def _gated_class(cls: Any) -> Any:
    stock = cls.__call__

    def call(self: Any, x: mx.array) -> Any:
        if backend() == "host":  # where the product behind it would run at once, too
            return stock(self, x)

        def rest(some: dict[str, Any], gate: mx.array, up: mx.array) -> Any:
            with _parameters(self, some):
                return stock(_Given(self, gate, up), None)

        own = self.trainable_parameters().items()
        some = {k: v for k, v in own if k not in ("gate_proj", "up_proj")}
        return checkpoint(rest)(some, self.gate_proj(x), self.up_proj(x))

    return _made(cls, call)


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
