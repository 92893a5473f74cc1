"""The parts of a decoder layer that compute with fused products, as operations on arrays.

On a GPU each is compiled once for all layers that are alike: what may differ between them are
arrays, everything else is static. Quantized matrices are four arrays each, side by side: weight,
scales, biases and bias, of which the last two may be None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from ..dispatch import dispatch
from ..formats import Format
from ..metal.quantized_matmul.qmv import MAX_MATRICES, Gate
from ..ops.attention_step import Rotation
from ..ops.fused_products import FUSED_PRODUCTS, defers_norm
from ..ops.int8_matmul import fused_int8
from ..ops.rotary import rotary_embedding
from ..runtime.arena import rows as part_rows
from ..runtime.backend import backend, current
from .compiled import operation
from .step_products import Product
from .step_slots import current_step

Static = tuple[Any, ...]
Arrays = Sequence[mx.array | None]

# Rotary embeddings that take their offset as an array, and compute with nothing else that changes.
_ROPES = ("RoPE", "SuScaledRoPE", "Llama3RoPE", "YarnRoPE", "ProportionalRoPE")
_ROPE_MODULES = ("mlx.nn.layers.positional_encoding", "mlx_lm.models.rope_utils")

# Stands for the format of a matrix of 8-bit integers, whose rows are as wide as the words of 32.
INT8 = Format(1, 32, "int8")


class Packing(NamedTuple):
    """What is static of a quantized matrix.

    Attributes:
        fmt: its format.
        shape: of the packed weight, of this rank's part where it is sharded.
        spread: the group of which each rank has some rows of it.
        summed: the group of which each rank has some columns of it.
    """

    fmt: Format
    shape: tuple[int, ...]
    spread: mx.distributed.Group | None = None
    summed: mx.distributed.Group | None = None


@lru_cache(maxsize=64)
def position(offset: int) -> mx.array:
    """A position as an array, one for all layers."""
    return mx.array(offset)


@cache
def _can_compile(cls: Any) -> bool:
    return cls.__name__ in _ROPES and cls.__module__ in _ROPE_MODULES


def split_rope(rope: Any) -> tuple[Static | None, mx.array | None]:
    """A rotary embedding as what can be compared, and its frequencies."""
    if not _can_compile(rope.__class__):
        return None, None
    settings = [item for item in vars(rope).items() if item[0] not in ("_no_grad", "_training")]
    return (type(rope), tuple(settings)), rope.get("_freqs")


def _join_rope(static: Static, freqs: mx.array | None) -> nn.Module:
    cls, settings = static
    rope: nn.Module = cls.__new__(cls)
    vars(rope).update(settings)
    if freqs is not None:
        dict.__setitem__(rope, "_freqs", freqs)
    return rope


def rotation_of(static: Static | None) -> Rotation | None:
    """How this package's operations do what a rotary embedding does; None if it does more."""
    if static is None:
        return None
    cls, values = static[0], dict(static[1])
    if cls is nn.RoPE:
        return Rotation(values["dims"], values["traditional"], values["base"], values["scale"])
    if cls.__name__ == "SuScaledRoPE" or values.get("mscale", 1.0) != 1.0:
        return None
    return Rotation(values["dims"], values["traditional"], base=None)


class Stream(NamedTuple):
    """What goes from one part to the next.

    Attributes:
        x: (B, L, K), the sums of residuals so far.
        scaled: ``x`` times the weight of the norm ahead, or None; that norm is deferred.
        tile_squares: with it, of :func:`~mlx_qlayers.ops.fused_products.fused_products`.
    """

    x: mx.array
    scaled: mx.array | None = None
    tile_squares: mx.array | None = None

    def through(self, weight: mx.array | None) -> tuple[mx.array | None, ...]:
        """Rows, weight and tile squares for a product whose input goes through a norm first."""
        if self.scaled is None:
            return self.x, weight, None
        return self.scaled, None, self.tile_squares


def _projection(
    formats: Sequence[Packing], eps: float | None = None, gate: Gate | None = None
) -> Callable[..., list[mx.array]]:
    """Products of one input; those of one format together, as many as a launch takes."""
    if formats[0].fmt == INT8:
        return fused_int8(len(formats), eps, None)
    group = formats[0].summed
    launches: list[tuple[Static, list[int]]] = []
    across = next((sum_gradients(each.spread) for each in formats if each.spread), None)
    for fmt in dict.fromkeys(each.fmt for each in formats):
        alike = [i for i, other in enumerate(formats) if other.fmt == fmt]
        for start in range(0, len(alike), MAX_MATRICES):
            launches.append(((*fmt, eps, gate), alike[start : start + MAX_MATRICES]))

    def run(
        packed: Arrays,
        x: mx.array,
        weight: mx.array | None = None,
        tile_squares: mx.array | None = None,
        residual: mx.array | None = None,
        next_weight: mx.array | None = None,
    ) -> list[mx.array]:
        step, own = current_step.get(), eps
        if step is not None:
            x, residual = step.products.latest(x), step.products.latest(residual)
        if group is not None:
            return [_summed(launches[0][0], group, packed, residual, x, weight)]
        if across is not None and current.get().mode.differentiable:
            x, weight = across(x), None if weight is None else across(weight)
        if step is not None and eps is None and (norm := step.products.norms.get(id(x))):
            _, x, tile_squares, own = norm
        elif step is not None and (parts := step.products.deferring(x, weight)):
            _, x, tile_squares = parts
            weight = None
        rows = x, weight, tile_squares, residual, next_weight
        if len(launches) == 1:
            static = (*launches[0][0][:3], own, gate)
            y: list[mx.array] = dispatch(FUSED_PRODUCTS, (*rows, *packed), static)
            if step is not None and len(formats) == 1 and next_weight is None:
                again = partial(_with, rows, packed, static)
                whole = gate is None and residual is None
                split = partial(_in_parts, rows, packed, static) if whole else None
                step.products.keep(Product(y[0], again, residual, split))
            return y
        products: dict[int, mx.array] = {}
        for (*fmt, _, _), indices in launches:
            some = [array for i in indices for array in packed[4 * i : 4 * i + 4]]
            ys = dispatch(FUSED_PRODUCTS, (*rows, *some), (*fmt, own, gate))
            products |= zip(indices, ys, strict=True)
        return [products[i] for i in range(len(formats))]

    return run


def _with(
    rows: Arrays, packed: Arrays, static: Static, residual: Any, next_weight: Any
) -> list[mx.array]:
    arrays = (*rows[:3], residual, next_weight, *packed)
    products: list[mx.array] = dispatch(FUSED_PRODUCTS, arrays, static)
    return products


def _in_parts(
    rows: Arrays, packed: Arrays, static: Static, ends: Sequence[int], gate: Gate | None = None
) -> list[mx.array]:
    """Products with rows of a matrix, which are matrices of their own."""
    spans = [slice(*span) for span in pairwise((0, *ends))]
    parts = [None if a is None else part_rows(a, span) for span in spans for a in packed]
    if backend() != "reference":  # constants of a graph, which share the memory
        mx.async_eval([part for part in parts if part is not None])
    arrays = (*rows[:3], None, None, *parts)
    products: list[mx.array] = dispatch(FUSED_PRODUCTS, arrays, (*static[:4], gate))
    return products


def _summed(
    static: Static, group: mx.distributed.Group, packed: Arrays, residual: mx.array | None, *x: Any
) -> mx.array:
    """The product with a matrix of which each rank has some columns; the rest after the sum."""
    *matrix, bias = packed
    (y,) = dispatch(FUSED_PRODUCTS, (*x, None, None, None, *matrix, None), static)
    y = mx.distributed.all_sum(y, group=group)
    y = y if bias is None else y + bias
    return y if residual is None else residual + y


@operation
def together(*formats: Packing) -> Callable[..., list[mx.array]]:
    """Products of one input."""
    projection = _projection(formats)
    return lambda x, *packed: projection(packed, x)


def _in_heads(
    x: mx.array, count: int, weight: mx.array | None = None, eps: float | None = None
) -> mx.array:
    """(B, L, H * D) to (B, L, H, D), each head normalized where there is an epsilon."""
    rows, x = x, x.reshape(*x.shape[:-1], count, -1)
    if (step := current_step.get()) is not None and x.shape[1] == 1:
        step.keep_rows(x, rows)
    return x if eps is None else mx.fast.rms_norm(x, weight, eps)


def _heads_first(x: mx.array) -> mx.array:
    """(B, L, H, D) to (B, H, L, D). With one row that is a matter of names: one node less."""
    batch, length, count, width = x.shape
    return x.reshape(batch, count, 1, width) if length == 1 else x.transpose(0, 2, 1, 3)


def joined(out: mx.array) -> mx.array:
    """The heads of attention side by side, if they are not: (B, H, L, D) to (B, L, H * D)."""
    if out.ndim == 3:  # as attention_step gives them
        return out
    if (step := current_step.get()) is not None and out.shape[2] == 1:
        return step.rows(out)
    batch, _, length, _ = out.shape
    return (out if length == 1 else out.transpose(0, 2, 1, 3)).reshape(batch, length, -1)


@operation
def heads(
    formats: tuple[Packing, ...],
    counts: tuple[int, int],
    eps: float | None,
    norm_eps: tuple[float | None, float | None],
    rope: Static | None,
) -> Callable[..., list[mx.array]]:
    """Queries, keys and values of the heads: norm, projections, norms of heads, rotation."""
    projection, rotation = _projection(formats, eps), rotation_of(rope)
    turn = None if rotation is None else rotation._asdict()
    n, kv = counts

    def run(x: mx.array, position: Any, *arrays: Any) -> list[mx.array]:
        weight, q_weight, k_weight, freqs, *packed = arrays
        rows = projection(packed, x, weight)
        q = _in_heads(rows[0], n, q_weight, norm_eps[0])
        k = _in_heads(rows[1], kv, k_weight, norm_eps[1])
        v = _heads_first(_in_heads(rows[2], kv))
        if rotation is not None and turn is not None:
            turned = rotary_embedding(q, k, position, **turn, freqs=freqs)
            if (step := current_step.get()) is not None:
                for y, x in zip(turned, (q, k), strict=True):
                    step.turn(y, x, rotation, freqs, position)
                step.keep_rows(v, rows[2])
            return [*turned, v]
        q, k = map(_heads_first, (q, k))
        if rope is not None:
            rotate: Any = _join_rope(rope, freqs)
            q, k = rotate(q, offset=position), rotate(k, offset=position)
        return [q, k, v]

    return run


@operation
def tail(out: Packing | None, feed: Static | None, residual: bool) -> Callable[..., mx.array]:
    """What follows attention in a decoder layer, as a function of rows and attention.

    Args:
        out: of the output projection, whose residual the rows are; None if that is no part of it.
        feed: of the feed-forward module: its gated matrices, the one behind them, the activation,
            and the epsilon of the norm ahead of it or None; None if that is no part of it.
        residual: whether the rows that go into it are added to what comes out.
    """
    projection = _projection([out]) if out else None
    up, down, gate, eps = feed or (None, None, None, None)
    # What is added over the ranks comes out of its launch unfinished.
    defers = out is not None and not out.summed and not (down and down.summed)
    gated = back = None
    if up and down and up.fmt == INT8:
        gated, back = fused_int8(2, eps, None), fused_int8(1, None, gate)
    elif up and down:
        gated, back = _projection([up, up], eps, gate), _projection([down])

    def run(x: mx.array, attended: mx.array, weight: Any, *packed: Any) -> mx.array:
        h, deferred = Stream(x), weight if defers and defers_norm(x) else None
        if projection:
            h = Stream(*projection(packed[:4], joined(attended), None, None, x, deferred))
            packed = packed[4:]
        if gated is None or back is None:
            return h.x
        y, other = (*gated(packed[:8], *h.through(weight)), None)[:2]
        (x,) = back(packed[8:], y, other, None, h.x if residual else None)
        return x

    return run
