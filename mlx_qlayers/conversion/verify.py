"""Runs converted layers once beside the stock ones, before a model is changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..formats import GLOBAL_UNIT
from ..layers.qlinear import Counterpart, QEmbedding
from .attention_patch import patched_attention, stock_class
from .compiled_blocks import GATES, match_of
from .counterparts import stock_of
from .fused_blocks import input_width, unfused_class

Classes = Mapping[int, tuple[type[nn.Module] | None, nn.Module | None]]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_ROWS = (1, 3)
# Roundings one after the other in a decoder layer: norms, products, attention, residuals.
_DEPTH = 16


class Verifier:
    """Checks each kind of layer of one model once, on random input.

    The stock result is computed in float32, where stock operators are accurate on every device.
    The random state of the caller is not used.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(tree_flatten(model.parameters())).values()
        self.dtype = next((p.dtype for p in parameters if p.dtype in _FLOATS), mx.float32)
        self.seen: set[tuple[object, ...]] = set()

    def check(self, path: str, module: nn.Module, cls: type[nn.Module]) -> None:
        """Compare ``module`` with what it would be as a ``cls``.

        Raises:
            ValueError: they disagree by more than rounding explains.
        """
        if issubclass(cls, Counterpart):
            shapes = _shapes(module)
            if self._first((cls, shapes, module.bits, module.mode)):
                self._check_product(path, module, cls)
        elif self._first(("attention",)):
            self._check_attention(path)

    def check_fused(
        self, path: str, module: nn.Module, cls: type[nn.Module], classes: Classes
    ) -> None:
        """Compare ``module`` as a fused ``cls``, its parts converted, with the stock module.

        A block is compared where its attention is fused; other attention may need a cache.

        Args:
            path: its path in the model.
            module: an attention, feed-forward or decoder module.
            cls: the class that it is to have.
            classes: what becomes of modules, by their identity: a class, and a packed twin or None.

        Raises:
            ValueError: they disagree by more than the roundings on the way explain.
        """
        fused = _converted(module, classes)
        width, match = input_width(fused), match_of(cls)
        if width is None or match is None or not self._first((cls, _shapes(fused))):
            return
        stock = copy.deepcopy(fused)
        for part in stock.modules():
            part.__class__ = stock_of(part) or stock_class(unfused_class(type(part)))
        stock.set_dtype(mx.float32)
        for rows in _ROWS:
            x = _random((1, rows, width), rows).astype(self.dtype)
            masks = () if match.pattern in GATES else ("causal",)
            actual, expected = fused(x, *masks), stock(x.astype(mx.float32), *masks)
            _compare(f"{path}: fused, {rows} rows", actual, expected, width, _DEPTH)

    def _first(self, kind: tuple[object, ...]) -> bool:
        new = kind not in self.seen
        self.seen.add(kind)
        return new

    def _check_product(self, path: str, module: nn.Module, cls: type[Counterpart]) -> None:
        ours, stock, scales = cls.from_quantized(module), copy.deepcopy(module), module["scales"]
        stock.set_dtype(mx.float32)
        # The stock operator takes no global scale on a CPU.
        factors, bias = (
            None if stock.get(name) is None else stock.pop(name)
            for name in ("global_scale", "bias")
        )
        stock.global_scale = None
        dtype = self.dtype if module.get("biases") is None else scales.dtype
        width = scales.shape[-1] * module.group_size
        for rows in _ROWS:
            x = _random((rows, width), rows).astype(dtype)
            chosen: tuple[mx.array, ...] = ()
            if scales.ndim > 2:
                x = x[:, None, None]
                chosen = (mx.random.randint(0, len(scales), (rows, 2), key=mx.random.key(rows)),)
            name = "as_linear" if cls is QEmbedding else "__call__"
            actual = getattr(ours, name)(x, *chosen)
            expected = getattr(stock, name)(x.astype(mx.float32), *chosen)
            if factors is not None:
                expected = expected * (factors[chosen] / GLOBAL_UNIT)[..., None, None]
            if bias is not None:
                expected = expected + (mx.expand_dims(bias[chosen], -2) if chosen else bias)
            fmt = f"{module.bits} bits, groups of {module.group_size}, {module.mode}"
            _compare(f"{path}: {cls.__name__}, {fmt}", actual, expected, width)

    def _check_attention(self, path: str) -> None:
        from mlx_lm.models.base import scaled_dot_product_attention as stock

        theirs: Any = stock
        ours: Any = patched_attention
        width, scale = 64, 64**-0.5
        shapes = [(1, 4, 5, width), (1, 2, 7, width), (1, 2, 7, width), (5, 7)]
        arrays = [_random(shape, i).astype(self.dtype) for i, shape in enumerate(shapes)]
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
            _compare(f"{path}: attention, mask {name}", actual, expected, width)


def _shapes(module: nn.Module) -> tuple[object, ...]:
    parameters = dict(tree_flatten(module.parameters()))
    return tuple((name, a.shape, a.dtype) for name, a in parameters.items())


def _random(shape: tuple[int, ...], key: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key))


def _converted(module: nn.Module, classes: Classes) -> nn.Module:
    """A copy of a module that shares its arrays, converted with all that is in it."""
    twin = copy.deepcopy(module)
    originals = dict(module.named_modules())
    for path, part in twin.named_modules():
        cls, packed = classes.get(id(originals[path]), (None, None))
        if packed is not None:
            part.clear()
            dict.update(part, packed)  # Module.update takes parameters
            vars(part).update(vars(packed))
        if cls is not None:
            part.__class__ = cls
    return twin


def _compare(what: str, actual: mx.array, expected: mx.array, terms: int, steps: int = 1) -> None:
    """Refuse ``actual`` if it is further from ``expected`` than a few roundings of each step."""
    if actual.shape != expected.shape:
        raise ValueError(f"{what}: gives shape {actual.shape}, the stock layer {expected.shape}")
    finite = mx.isfinite(expected.astype(actual.dtype))  # else the stock layer overflows as well
    error = float(mx.where(finite, mx.abs(actual.astype(mx.float32) - expected), 0).max())
    largest = float(mx.where(finite, mx.abs(expected), 0).max())
    roundings = 2 * mx.finfo(actual.dtype).eps + 4 * math.sqrt(terms) * mx.finfo(mx.float32).eps
    allowed = steps * roundings * largest
    if not error <= allowed:
        raise ValueError(
            f"{what}: disagrees with the stock layer by {error:.3g}, where rounding explains "
            f"{allowed:.3g}; leave it out with predicate=, and report this as a fault"
        )
