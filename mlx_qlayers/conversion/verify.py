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
from .counterparts import stock_of
from .fused_blocks import input_width, unfused_class
from .operands import GATES, match_of

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
            scales, bias = module["scales"], module.get("bias")
            shape, mode = module["weight"].shape, module.mode
            kind = (cls, shape, scales.shape, scales.dtype, module.bits, mode, bias is None)
            if self._first(kind):
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
        parameters = dict(tree_flatten(fused.parameters()))
        shapes = tuple((name, a.shape, a.dtype) for name, a in parameters.items())
        width, match = input_width(fused), match_of(cls)
        if width is None or match is None or not self._first((cls, shapes)):
            return
        stock = copy.deepcopy(fused)
        for part in stock.modules():
            part.__class__ = _stock(part)
        stock.set_dtype(mx.float32)
        for rows in _ROWS:
            x = mx.random.normal((1, rows, width), key=mx.random.key(rows)).astype(self.dtype)
            masks = () if match.pattern in GATES else ("causal",)
            found, truth = fused(x, *masks), stock(x.astype(mx.float32), *masks)
            _compare(f"{path}: fused, {rows} rows", found, truth, width, _DEPTH)

    def _first(self, kind: tuple[object, ...]) -> bool:
        new = kind not in self.seen
        self.seen.add(kind)
        return new

    def _check_product(self, path: str, module: nn.Module, cls: type[Counterpart]) -> None:
        ours = cls.from_quantized(module)
        scales, biases = module["scales"], module.get("biases")
        fmt = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        dtype = self.dtype if biases is None else scales.dtype
        width = scales.shape[-1] * module.group_size
        wide = (
            [scales, None] if biases is None else [a.astype(mx.float32) for a in (scales, biases)]
        )
        experts = len(scales) if scales.ndim > 2 else 0
        for rows in _ROWS:
            x = mx.random.normal((rows, width), key=mx.random.key(rows)).astype(dtype)
            exact = x.astype(mx.float32)
            if experts:
                chosen = mx.random.randint(0, experts, (rows, 2), key=mx.random.key(rows))
                truth = _by_experts(exact, chosen, module, fmt)
                found = ours(x[:, None, None], chosen)
            else:
                truth = mx.quantized_matmul(exact, module["weight"], *wide, **fmt)
                if "bias" in module:
                    truth = truth + module["bias"].astype(mx.float32)
                found = ours.as_linear(x) if cls is QEmbedding else ours(x)
            _compare(f"{path}: {cls.__name__} {fmt}", found, truth, width)

    def _check_attention(self, path: str) -> None:
        from mlx_lm.models.base import scaled_dot_product_attention

        width, scale = 64, 64**-0.5
        shapes = [(1, 4, 5, width), (1, 2, 7, width), (1, 2, 7, width), (5, 7)]
        arrays = [
            mx.random.normal(shape, key=mx.random.key(i)).astype(self.dtype)
            for i, shape in enumerate(shapes)
        ]
        q, k, v, scores = arrays
        exact_q, exact_k, exact_v, exact_scores = (a.astype(mx.float32) for a in arrays)
        masks: list[tuple[str, Any, Any]] = [
            ("none", None, None),
            ("causal", "causal", "causal"),
            ("boolean", scores > 0, scores > 0),
            ("additive", scores, exact_scores),
        ]
        for name, mask, exact in masks:
            truth = scaled_dot_product_attention(exact_q, exact_k, exact_v, None, scale, exact)
            found = patched_attention(q, k, v, None, scale, mask)
            _compare(f"{path}: attention, mask {name}", found, truth, width)


def _by_experts(x: mx.array, chosen: mx.array, module: nn.Module, fmt: dict[str, Any]) -> mx.array:
    """What stock operators make of rows (M, K) and the experts (M, k) chosen for them."""
    scales, biases = module["scales"], module.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    rows = x[:, None, None]
    y = mx.gather_qmm(rows, module["weight"], scales, biases, rhs_indices=chosen, **fmt)
    if (factors := module.get("global_scale")) is not None:
        y = y * (factors[chosen] / GLOBAL_UNIT)[..., None, None]
    if "bias" in module:
        y = y + module["bias"][chosen][..., None, :].astype(mx.float32)
    return y


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


def _stock(part: nn.Module) -> type[nn.Module]:
    if (stock := stock_of(part)) is not None:
        return stock
    return stock_class(unfused_class(type(part)))


def _compare(what: str, found: mx.array, truth: mx.array, terms: int, steps: int = 1) -> None:
    """Refuse ``found`` if it is further from ``truth`` than a few roundings of each step."""
    if found.shape != truth.shape:
        raise ValueError(f"{what}: gives shape {found.shape}, the stock layer {truth.shape}")
    finite = mx.isfinite(truth.astype(found.dtype))  # else the stock layer overflows as well
    error = float(mx.where(finite, mx.abs(found.astype(mx.float32) - truth), 0).max())
    largest = float(mx.where(finite, mx.abs(truth), 0).max())
    roundings = 2 * mx.finfo(found.dtype).eps + 4 * math.sqrt(terms) * mx.finfo(mx.float32).eps
    roundings *= steps
    if not error <= roundings * largest:
        raise ValueError(
            f"{what}: disagrees with the stock layer by {error:.3g}, where rounding explains "
            f"{roundings * largest:.3g}; leave it out with predicate=, and report this as a fault"
        )
