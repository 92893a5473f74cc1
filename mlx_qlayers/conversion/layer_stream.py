"""A model run one decoder layer after the other, with what its linear layers are given.

No more than one layer of a model that was loaded lazily and the activations of the calibration text
are in memory: what a layer returned is what the next one is given, as changed by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..ops.linalg import subtract_product
from ..reference.cores import on_core, parts

# The sums of x^T x of the linear layers of a decoder layer, by path; for experts one each.
Hessians = dict[str, mx.array]


class Stage(NamedTuple):
    """A decoder layer, or the head behind the last one, with its linear layers and experts."""

    number: int
    modules: dict[str, nn.Module]
    hessians: Callable[[], Hessians]


def stages(model: nn.Module, batches: Sequence[mx.array]) -> Iterator[Stage]:
    """The decoder layers of a model in order, and its head; each may be changed when it is yielded.

    It raises a ValueError for a model without a list of layers, or that calls them otherwise.
    """
    from mlx_lm.models.switch_layers import SwitchLinear

    layers = layers_of(model)
    paths = {
        id(module): path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, SwitchLinear))
    }

    def linear(part: nn.Module) -> dict[str, nn.Module]:
        return {paths[id(m)]: m for _, m in part.named_modules() if id(m) in paths}

    states = [_call_of(model, layers, 0, batch).args[0] for batch in batches]
    for number, layer in enumerate(layers):
        call = _call_of(model, layers, number, batches[0])
        run = partial(_run, layer, call)
        modules = linear(layer)
        yield Stage(number, modules, partial(_hessians, modules, run, states))
        for share in _shares(states):
            for core, i in enumerate(share):
                with on_core(core):
                    states[i] = run(states[i])
            mx.eval([states[i] for i in share])
    inside = {path for layer in layers for path in linear(layer)}
    head = {path: m for path, m in linear(model).items() if path not in inside}
    if head:
        behind = partial(_behind, model, layers, batches[0])
        yield Stage(len(layers), head, partial(_hessians, head, behind, states))


class CachedLayer(NamedTuple):
    """A decoder layer with the cache that it has filled."""

    output: mx.array  # what it gives for all tokens
    cache: Any  # its own, with all tokens; None if it has none
    at: int  # where it stands among the caches of the model; -1 likewise
    run: Callable[[Any], mx.array]  # the same with another cache in the place of that one


def cached_layers(model: nn.Module, tokens: mx.array) -> Iterator[CachedLayer]:
    """The decoder layers of a model in order, with what tokens (B, L) leave in their caches."""
    from mlx_lm.models.cache import make_prompt_cache

    layers, state = layers_of(model), None
    for number, layer in enumerate(layers):
        own = make_prompt_cache(model)
        call = _call_of(model, layers, number, tokens, cache=own)
        state = call.args[0] if state is None else state
        given = [*call.args[1:], *call.options.values()]
        at = next((i for i, c in enumerate(own) if any(c is each for each in given)), -1)
        cache = None if at < 0 else own[at]
        run = partial(_run, layer, call, state, cache)
        state = run(cache)
        mx.eval(state)
        yield CachedLayer(state, cache, at, run)


def _run(layer: Any, call: _Call, state: mx.array, own: Any = None, other: Any = None) -> mx.array:
    """The output of a layer, with another cache in the place of its own."""
    args = [other if each is own else each for each in call.args[1:]]
    options = {name: other if each is own else each for name, each in call.options.items()}
    found: mx.array = layer(state, *args, **options)
    return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The list in which a model holds its layers; ``model.layers`` may be a copy of it."""
    shown = getattr(model, "layers", None)
    for module in model.modules():
        for value in module.values():
            if shown and isinstance(value, list) and value and value[0] is shown[0]:
                return value
    raise ValueError(f"{type(model).__name__} has no list of layers to calibrate one by one")


class _Call(Exception):
    """How a model calls one of its layers, thrown out of the model."""

    def __init__(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.args, self.options = args, options


class _Replaced:
    """Stands in for a layer: a function of its arguments, with its attributes."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        self._layer, self._call = layer, call

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@contextmanager
def _replaced(layers: list[Any], calls: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    stock = list(layers)
    for i, call in calls.items():
        layers[i] = _Replaced(stock[i], call)
    try:
        yield
    finally:
        layers[:] = stock


def _call_of(
    model: nn.Module, layers: list[Any], number: int, batch: mx.array, **options: Any
) -> _Call:
    def stop(*args: Any, **options: Any) -> None:
        raise _Call(args, options)

    passed = dict.fromkeys(range(number), lambda x, *_, **__: x)
    with _replaced(layers, {**passed, number: stop}):
        try:
            model(batch, **options)
        except _Call as call:
            return call
    raise ValueError(f"{type(model).__name__} does not call its layers one by one")


def _behind(model: nn.Module, layers: list[Any], batch: mx.array, state: mx.array) -> mx.array:
    """The model from behind its last layer on."""
    with _replaced(layers, dict.fromkeys(range(len(layers)), lambda *_, **__: state)):
        found: mx.array = model(batch)
    return found


def _hessians(
    modules: Mapping[str, nn.Module],
    run: Callable[[mx.array], mx.array],
    states: Sequence[mx.array],
) -> Hessians:
    sums: Hessians = {}
    leaders: dict[str, str] = {}
    inputs: dict[str, tuple[mx.array, ...]] = {}

    def see(path: str, x: mx.array, *rest: Any) -> None:
        # Projections of one input share its sum.
        shared = (p for p, other in inputs.items() if other[0] is x and not rest)
        leaders[path] = leader = next(shared, path)
        if leader == path:
            inputs[path] = (x, *rest)

    with _watched(modules, see):
        for share in _shares(states):
            seen = []
            for core, i in enumerate(share):
                inputs.clear()
                with on_core(core):
                    run(states[i])
                seen.append(dict(inputs))
            mx.eval(seen)
            for path in set(leaders.values()):
                for given in seen:
                    if path in given:
                        sums[path] = _added(sums.get(path), modules[path], *given[path])
            mx.eval(sums)
    return {path: sums[leader] for path, leader in leaders.items()}


def _shares(states: Sequence[mx.array]) -> Iterator[range]:
    """The states that are computed side by side, one on each core of a CPU."""
    cores = 1 if mx.default_device().type == mx.gpu else len(parts(len(states), 1 << 30))
    for first in range(0, len(states), cores):
        yield range(first, min(first + cores, len(states)))


def _added(
    total: mx.array | None, module: nn.Module, x: mx.array, indices: mx.array | None = None, *_: Any
) -> mx.array:
    k = x.shape[-1]
    if indices is None:
        rows = x.reshape(-1, k).astype(mx.float32)
        before = mx.zeros((k, k)) if total is None else total
        if x.dtype != mx.float32 and mx.default_device().type == mx.gpu:
            return mx.addmm(before, rows.T, rows)  # TF32 holds all bits of half precision
        return subtract_product(before, -rows.T, rows)
    # Experts have the rows that chose them.
    rows = mx.broadcast_to(x.squeeze(-2), (*indices.shape, k)).reshape(-1, k).astype(mx.float32)
    chosen = indices.flatten()
    order = mx.argsort(chosen)
    count = module["weight"].shape[0]
    ends = mx.cumsum((chosen[:, None] == mx.arange(count)).sum(axis=0)).astype(mx.uint32)
    starts = mx.concatenate([mx.zeros(1, mx.uint32), ends[:-1]])
    rows = rows[order]
    # On CUDA float32 is rounded to TF32: the sum is then that of inputs of 11 bits.
    found = mx.segmented_mm(rows.T, rows, mx.stack([starts, ends], axis=1))
    return found if total is None else total + found


@contextmanager
def _watched(modules: Mapping[str, nn.Module], see: Callable[..., None]) -> Iterator[None]:
    """Tell ``see`` what the modules are called with, by a subclass of their own."""
    classes = {path: type(module) for path, module in modules.items()}

    def of(path: str, cls: type[Any]) -> type[Any]:
        def call(self: Any, x: mx.array, *args: Any, **options: Any) -> Any:
            see(path, x, *args)
            return cls.__call__(self, x, *args, **options)

        return type(cls.__name__, (cls,), {"__call__": call})

    try:
        for path, module in modules.items():
            module.__class__ = of(path, classes[path])
        yield
    finally:
        for path, module in modules.items():
            module.__class__ = classes[path]
