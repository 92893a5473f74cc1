"""The parts of a decoder layer that compute with fused products, as operations on arrays.

On a GPU each is compiled once for all layers that are alike: what may differ between them are
arrays, everything else is static. Quantized matrices are four arrays each, side by side: weight,
scales, biases and bias, of which the last two may be None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from ..dispatch import dispatch
from ..formats import Format
from ..metal.quantized_matmul.qmv import MAX_MATRICES, Gate
from ..ops.attention_step import Rotation, attention_step
from ..ops.fused_products import FUSED_PRODUCTS, defers_norm
from ..ops.int8_matmul import fused_int8
from ..ops.rotary import rotary_embedding
from ..runtime.backend import backend, current
from .cache_tail import Buffer, merged
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
        if group is not None:
            return [_summed(launches[0][0], group, packed, residual, x, weight)]
        if across is not None and current.get().mode.differentiable:
            x, weight = across(x), None if weight is None else across(weight)
        step, own = current_step.get(), eps
        if step is not None and eps is None and (norm := step.products.norms.get(id(x))):
            _, x, tile_squares, own = norm
        rows = x, weight, tile_squares, residual, next_weight
        if len(launches) == 1:
            static = (*launches[0][0][:3], own, gate)
            y: list[mx.array] = dispatch(FUSED_PRODUCTS, (*rows, *packed), static)
            if step is not None and len(formats) == 1 and residual is next_weight is None:
                again, parts = partial(_with, rows, packed, static), None
                if gate is None:
                    parts = partial(_in_parts, rows, packed, static)
                step.products.keep(Product(y[0], again, None, parts))
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
    parts = [None if a is None else a[span] for span in spans for a in packed]
    if backend() != "ops":  # constants of a graph, which share the memory
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
    x = x.reshape(*x.shape[:-1], count, -1)
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
                for y, row, changed in zip((q, k, v), rows, (*norm_eps, None), strict=True):
                    if changed is None:
                        step.keep_rows(y, row)
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
    follow = _follow(out, feed, residual)
    return lambda x, attended, *arrays: follow(x, attended, None, *arrays).x


def _follow(out: Packing | None, feed: Static | None, residual: bool) -> Callable[..., Stream]:
    """What :func:`tail` computes, and what the norm of the next layer needs."""
    projection = _projection([out]) if out else None
    up, down, gate, eps = feed or (None, None, None, None)
    # What is added over the ranks comes out of its launch unfinished.
    defers = out is not None and not out.summed and not (down and down.summed)
    gated = back = None
    if up and down and up.fmt == INT8:
        gated, back = fused_int8(2, eps, None), fused_int8(1, None, gate)
    elif up and down:
        gated, back = _projection([up, up], eps, gate), _projection([down])

    def run(x: mx.array, attended: mx.array, next_weight: Any, weight: Any, *packed: Any) -> Stream:
        h, deferred = Stream(x), weight if defers and defers_norm(x) else None
        if projection:
            h = Stream(*projection(packed[:4], joined(attended), None, None, x, deferred))
            packed = packed[4:]
        if gated is None or back is None:
            return h
        y, other = (*gated(packed[:8], *h.through(weight)), None)[:2]
        following = None if deferred is None else next_weight
        return Stream(*back(packed[8:], y, other, None, h.x if residual else None, following))

    return run


@operation
def layers_in_turn(
    each: tuple[tuple[Static, float, Static], ...], present: tuple[bool, ...], *_: object
) -> Callable[..., list[Buffer]]:
    """Decoder layers in turn, for a token of each sequence.

    Args:
        each: of a layer what is static of its :func:`heads`, the scale of its scores, and what is
            static of its :func:`tail`.
        present: which of the arrays of each layer's :func:`heads` and :func:`tail` there are.

    Returns:
        A function that gives the sums of residuals; what the norm of the layer after them needs if
        that is deferred; the tails; and the buffers with the tails in them. Nobody has to evaluate
        the last, which are what a cache shows.
    """
    steps = [(_step(before, scale), _follow(*after)) for before, scale, after in each]
    sizes = 4 + 4 * 3, 1 + 4 * 4  # arrays of heads and tail

    def run(
        x: mx.array,
        mask: mx.array | None,
        positions: list[mx.array],
        arrays: list[mx.array],
        buffers: list[Buffer],
        tails: list[mx.array],
        deferred: list[mx.array],
        next_weight: mx.array | None,
        tickets: mx.array,
    ) -> list[Buffer]:
        rest = iter(arrays)
        whole = iter([next(rest) if there else None for there in present])
        operands = [[[*islice(whole, n)] for n in sizes] for _ in each]
        weights = [*(before[0] for before, _ in operands), next_weight]
        stream, new = Stream(x, *deferred), list[mx.array]()
        for i, ((step, follow), (before, after)) in enumerate(zip(steps, operands, strict=True)):
            own = slice(2 * i, 2 * i + 2)
            given = [*buffers[own], *tails[own], positions[i % len(positions)]]
            out, *grown = step(stream, mask, given, tickets, *before)
            stream = follow(stream.x, out, weights[i + 1], *after)
            new += grown
        start = positions[0][:1]
        shown = [merged(b, t, start) for b, t in zip(buffers, new, strict=True)]
        return [*(part for part in stream if part is not None), *new, *shown]

    return run


def _step(before: Static, scale: float) -> Callable[..., list[mx.array]]:
    """What :func:`heads` computes, and attention with buffers and positions, for one token."""
    formats, (n, kv), eps, norm_eps, rope = before
    projection, rotation = _projection(formats, eps), rotation_of(rope)
    assert rotation is not None

    def run(
        stream: Stream, mask: Any, given: list[mx.array], tickets: mx.array, *arrays: Any
    ) -> list[mx.array]:
        weight, q_weight, k_weight, freqs, *packed = arrays
        q, k, v = projection(packed, *stream.through(weight))
        if q_weight is not None:
            q = _in_heads(q, n, q_weight, norm_eps[0]).reshape(q.shape)
        if k_weight is not None:
            k = _in_heads(k, kv, k_weight, norm_eps[1]).reshape(k.shape)
        options: dict[str, Any] = {"scale": scale, "rotation": rotation}
        options |= {"freqs": freqs, "mask": mask, "tickets": tickets}
        return attention_step(q, k, v, *given, **options)

    return run
