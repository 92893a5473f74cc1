"""Runs converted layers once beside the stock ones, before a model is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..formats import GLOBAL_UNIT
from ..layers.qlinear import Counterpart, QEmbedding
from ..metal.record import in_float32
from ..reference.rounding import rounding_error
from ..runtime.cuda_ahead import compiled_in_parallel
from ..runtime.devices import device_of
from ..runtime.explain import recording
from .attention_patch import patched_attention, patched_swiglu
from .plan import Change, copied
from .registry import registered_as

# A name, the result, the stock layer's, terms of its sums and steps one after the other.
Result = tuple[str, mx.array, mx.array, int, int]
Results = Iterator[Result]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# Roundings one after the other in a decoder layer: norms, products, attention, residuals.
_DEPTH = 16


def verify_steps(model: nn.Module, steps: Sequence[Change]) -> None:
    """Run each kind of layer of a model once, and compare with the stock one in float32.

    The random state of the caller is not used, but by registered examples. Layers run as ``auto``
    runs them now. On a Mac it takes no kernel without a proof, whatever is measured later: that
    names a wrong kernel, and this compares the code around it. A ValueError says that they
    differ by more than rounding explains.
    """
    parameters = dict(tree_flatten(model.parameters())).values()
    dtype = next((p.dtype for p in parameters if p.dtype in _FLOATS), mx.float32)
    seen, results = set[tuple[object, ...]](), list[Result]()
    # All kernels are asked for before the first one runs: some are compiled side by side.
    with recording(), compiled_in_parallel():  # what is verified is no call of the user's
        for step in steps:
            assert step.cls is not None
            path, module, kind = step.row.path, step.packed or step.module, tuple[object, ...]()
            is_gate = step.row.kind == "gate"
            check: Callable[..., Results] = _check_gate if is_gate else _check_attention
            kind = ("gate",) if is_gate else kind
            if registered_as(step.cls) is not None:
                check, kind = _check_registered, (step.cls, _shapes(module))
            elif issubclass(step.cls, Counterpart):
                kind, check = (step.cls, *_format(module)), _check_product
            if kind not in seen:
                seen.add(kind)
                results += check(path, module, step.cls, dtype)
    for result in results:
        _compare(*result)


def _check_registered(
    path: str, module: nn.Module, cls: type[nn.Module], dtype: mx.Dtype
) -> Results:
    """A counterpart that somebody registered, on the arguments that its example gives."""
    registration = registered_as(cls)
    if registration is None or registration.example is None:
        return
    given = list(registration.example(module))
    ours, stock = copied(module), copied(module)
    ours.__class__ = cls
    stock.set_dtype(mx.float32)
    actual, expected = arrays_in(ours(*given)), arrays_in(stock(*tree_map(in_float32, given)))
    shapes = (a.shape for a in arrays_in([given, module.parameters()]))
    terms = max((n for shape in shapes for n in shape), default=1)
    for mine, theirs in zip(actual, expected, strict=True):
        yield f"{path}: {cls.__name__}", mine, theirs, terms, _DEPTH


def arrays_in(tree: Any) -> list[mx.array]:
    """All arrays in lists, tuples and dictionaries, in their order."""
    leaves: Any = tree_flatten(tree)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def _check_product(
    path: str, module: nn.Module, cls: type[Counterpart], dtype: mx.Dtype
) -> Results:
    ours, stock, scales = cls.from_quantized(module), copied(module), module["scales"]
    stock.set_dtype(mx.float32)
    # The stock operator takes no global scale on a CPU.
    factors, bias = (
        None if stock.get(name) is None else stock.pop(name) for name in ("global_scale", "bias")
    )
    stock.global_scale = None
    dtype = dtype if module.get("biases") is None else scales.dtype
    width = scales.shape[-1] * module.group_size
    # Where each number of rows is a kernel to compile, that of decoding alone.
    for rows in (1,) if device_of().stock_compiles else (1, 3):
        x = _random((rows, width), rows).astype(dtype)
        chosen: tuple[mx.array, ...] = ()
        if scales.ndim > 2:
            x = x[:, None, None]
        if hasattr(stock, "num_experts"):
            chosen = (mx.random.randint(0, len(scales), (rows, 2), key=mx.random.key(rows)),)
        name = "as_linear" if cls is QEmbedding else "__call__"
        actual = getattr(ours, name)(x, *chosen)
        expected = getattr(stock, name)(x.astype(mx.float32), *chosen)
        if factors is not None:
            expected = expected * (factors[chosen] / GLOBAL_UNIT)[..., None, None]
        if bias is not None:
            expected = expected + (mx.expand_dims(bias[chosen], -2) if chosen else bias)
        fmt = f"{module.bits} bits, groups of {module.group_size}, {module.mode}"
        yield f"{path}: {cls.__name__}, {fmt}", actual, expected, width, 1


def _check_gate(path: str, _: nn.Module, cls: type[nn.Module], dtype: mx.Dtype) -> Results:
    from mlx_lm.models.activations import swiglu as stock

    gate, x = (_random((3, 64), i).astype(dtype) for i in range(2))
    theirs: Any = stock
    expected = theirs(gate.astype(mx.float32), x.astype(mx.float32))
    yield f"{path}: gate", patched_swiglu(gate, x), expected, 1, _DEPTH


def _check_attention(path: str, _: nn.Module, cls: type[nn.Module], dtype: mx.Dtype) -> Results:
    from mlx_lm.models.base import scaled_dot_product_attention as stock

    theirs: Any = stock
    ours: Any = patched_attention
    width, scale = 64, 64**-0.5
    shapes = [(1, 4, 5, width), (1, 2, 7, width), (1, 2, 7, width), (5, 7)]
    arrays = [_random(shape, i).astype(dtype) for i, shape in enumerate(shapes)]
    *exact, scores = [a.astype(mx.float32) for a in arrays]
    masks: dict[str, tuple[Any, Any]] = {
        "none": (None, None),
        "causal": ("causal", "causal"),
        "boolean": (scores > 0, scores > 0),
        "additive": (arrays[3], scores),
    }
    for name, (mask, exact_mask) in masks.items():
        actual = ours(*arrays[:3], None, scale, mask)
        expected = theirs(*exact, None, scale, exact_mask)
        yield f"{path}: attention, mask {name}", actual, expected, width, 1


def _format(module: Any) -> tuple[object, ...]:
    """The facts that make a matrix a kind of its own: its format alone where shapes take long."""
    if not device_of().stock_compiles:
        return _shapes(module), module.bits, module.mode
    names = (name for name in ("biases", "bias", "global_scale") if module.get(name) is not None)
    return module["scales"].ndim, module.group_size, module.bits, module.mode, *names


def _shapes(module: nn.Module) -> tuple[object, ...]:
    parameters = dict(tree_flatten(module.parameters()))
    return tuple((name, a.shape, a.dtype) for name, a in parameters.items())


def _random(shape: tuple[int, ...], key: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key))


def _compare(what: str, actual: mx.array, expected: mx.array, terms: int, steps: int) -> None:
    """Refuse ``actual`` if it is further from ``expected`` than a few roundings of each step."""
    error, allowed = rounding_error(actual, expected, terms, steps)
    if not error <= allowed:
        raise ValueError(
            f"{what}: disagrees with the stock layer by {error:.3g}, where rounding explains "
            f"{allowed:.3g}; leave it out with predicate=, and report this as a fault"
        )
