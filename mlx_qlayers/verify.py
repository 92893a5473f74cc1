"""Runs converted layers once beside the stock ones, before a model is changed."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .layers.qlinear import QEmbedding, QLinear
from .layers.routing import routed_attention

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_ROWS = (1, 3)


class Verifier:
    """Checks each kind of layer of one model once, on random input.

    The stock result is computed in float32, where stock operators are accurate on every device.
    The random state of the caller is not used.
    """

    def __init__(self, model: nn.Module) -> None:
        dtypes = (p.dtype for _, p in tree_flatten(model.parameters()) if p.dtype in _FLOATS)
        self.dtype = next(dtypes, mx.float32)
        self.seen: set[tuple[object, ...]] = set()

    def check(self, path: str, module: nn.Module, cls: type[nn.Module]) -> None:
        """Compare ``module`` with what it would be as a ``cls``.

        Raises:
            ValueError: they disagree by more than rounding explains.
        """
        if cls in (QLinear, QEmbedding):
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

    def _check_product(self, path: str, module: nn.Module, cls: type[nn.Module]) -> None:
        ours = cls.from_quantized(module)
        scales, biases = module["scales"], module.get("biases")
        fmt = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        dtype = self.dtype if biases is None else scales.dtype
        width = scales.shape[-1] * module.group_size
        wide = (
            [scales, None] if biases is None else [a.astype(mx.float32) for a in (scales, biases)]
        )
        for rows in _ROWS:
            x = mx.random.normal((rows, width), key=mx.random.key(rows)).astype(dtype)
            truth = mx.quantized_matmul(x.astype(mx.float32), module["weight"], *wide, **fmt)
            if "bias" in module:
                truth = truth + module["bias"].astype(mx.float32)
            found = ours.as_linear(x) if cls is QEmbedding else ours(x)
            _compare(f"{path}: {cls.__name__} {fmt}", found, truth, width)

    def _check_attention(self, path: str) -> None:
        from mlx_lm.models.base import scaled_dot_product_attention

        heads, kv_heads, queries, keys, width = 4, 2, 5, 7, 64
        shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (queries, keys)]
        q, k, v, scores = (
            mx.random.normal((1, *shape, width) if i < 3 else shape, key=mx.random.key(i))
            for i, shape in enumerate(shapes)
        )
        arrays = [a.astype(self.dtype) for a in (q, k, v)]
        exact = [a.astype(mx.float32) for a in arrays]
        scores = scores.astype(self.dtype)
        for name, mask in (
            ("none", None),
            ("causal", "causal"),
            ("added", scores),
            ("boolean", scores > 0),
        ):
            same = mask.astype(mx.float32) if name == "added" else mask
            truth = scaled_dot_product_attention(*exact, None, width**-0.5, same)
            found = routed_attention(*arrays, None, width**-0.5, mask)
            _compare(f"{path}: attention with mask {name}", found, truth, width)


def _compare(what: str, found: mx.array, truth: mx.array, terms: int) -> None:
    """Refuse ``found`` if it is further from ``truth`` than a few roundings of its dtype."""
    if found.shape != truth.shape:
        raise ValueError(f"{what}: gives shape {found.shape}, the stock layer {truth.shape}")
    finite = mx.isfinite(truth)
    error = mx.where(finite, mx.abs(found.astype(mx.float32) - truth), 0).max().item()
    largest = mx.where(finite, mx.abs(truth), 0).max().item()
    roundings = 2 * mx.finfo(found.dtype).eps + 4 * math.sqrt(terms) * mx.finfo(mx.float32).eps
    if not error <= roundings * largest:
        raise ValueError(
            f"{what}: disagrees with the stock layer by {error:.3g}, where rounding explains "
            f"{roundings * largest:.3g}; leave it out with predicate=, and report this as a fault"
        )
