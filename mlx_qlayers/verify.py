"""Runs converted layers once beside the stock ones, before a model is changed."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .layers.qlinear import Counterpart, QEmbedding
from .layers.routing import routed_attention
from .reference.gather_qmm import GLOBAL_UNIT

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_ROWS = (1, 3)


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
            found = routed_attention(q, k, v, None, scale, mask)
            _compare(f"{path}: attention, mask {name}", found, truth, width)


def _by_experts(
    x: mx.array, chosen: mx.array, module: nn.Module, fmt: dict[str, Any]
) -> mx.array:
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


def _compare(what: str, found: mx.array, truth: mx.array, terms: int) -> None:
    """Refuse ``found`` if it is further from ``truth`` than a few roundings of its dtype."""
    if found.shape != truth.shape:
        raise ValueError(f"{what}: gives shape {found.shape}, the stock layer {truth.shape}")
    finite = mx.isfinite(truth.astype(found.dtype))  # else the stock layer overflows as well
    error = float(mx.where(finite, mx.abs(found.astype(mx.float32) - truth), 0).max())
    largest = float(mx.where(finite, mx.abs(truth), 0).max())
    roundings = 2 * mx.finfo(found.dtype).eps + 4 * math.sqrt(terms) * mx.finfo(mx.float32).eps
    if not error <= roundings * largest:
        raise ValueError(
            f"{what}: disagrees with the stock layer by {error:.3g}, where rounding explains "
            f"{roundings * largest:.3g}; leave it out with predicate=, and report this as a fault"
        )
