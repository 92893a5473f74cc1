"""The stretches of a decoder layer that compute with fused products, as functions of arrays.

On a GPU each is traced once by ``mx.compile`` for all layers that are alike: what may differ
between them are inputs, everything else is in the key under which the traced function is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..metal.quantized_matmul.qmv import MAX_MATRICES, Gate, PackedMatrix
from ..ops.attention_step import MIN_PLACES, Rotation, attention_step
from ..ops.fused_products import Norm, defers_norm, fused_products
from ..ops.rotary import rotary_embedding
from ..ops.traced import traced

Static = tuple[Any, ...]
# Group size, bits, mode and the shape of the packed weight.
Packing = tuple[int, int, str, tuple[int, ...]]
# Weight, scales, biases and bias; the last two may be None.
Matrix = tuple[mx.array, mx.array, mx.array | None, mx.array | None]

# Rotary embeddings that take their offset as an array, and compute with nothing else that changes.
_ROPES = ("RoPE", "SuScaledRoPE", "Llama3RoPE", "YarnRoPE", "ProportionalRoPE")
_ROPE_MODULES = ("mlx.nn.layers.positional_encoding", "mlx_lm.models.rope_utils")


@lru_cache(maxsize=64)
def position(offset: int) -> mx.array:
    """A position as an array, one for all layers."""
    return mx.array(offset)


@lru_cache(maxsize=64)
def places(length: int, batch: int) -> mx.array:
    """What :func:`attention_step` takes where all sequences have the same length."""
    return mx.array([length] * max(MIN_PLACES, 1 + batch))


def places_of(length: int, positions: mx.array) -> mx.array:
    """What :func:`attention_step` takes where sequences have positions of their own."""
    return mx.concatenate([places(length, 0)[:1], positions, places(0, 0)])


@cache
def _is_traceable(cls: Any) -> bool:
    return cls.__name__ in _ROPES and cls.__module__ in _ROPE_MODULES


def split_rope(rope: Any) -> tuple[Static | None, mx.array | None]:
    """A rotary embedding as what can be compared, and its frequencies."""
    if not _is_traceable(rope.__class__):
        return None, None
    numbers = tuple(
        [item for item in vars(rope).items() if item[0] not in ("_no_grad", "_training")]
    )
    return (type(rope), numbers), rope.get("_freqs")


def _join_rope(static: Static, freqs: mx.array | None) -> nn.Module:
    cls, numbers = static
    rope: nn.Module = cls.__new__(cls)
    vars(rope).update(numbers)
    if freqs is not None:
        dict.__setitem__(rope, "_freqs", freqs)
    return rope


def rotation_of(static: Static | None) -> Rotation | None:
    """How this package's operations do what a rotary embedding does; None if it does more."""
    if static is None:
        return None
    cls, numbers = static
    values = dict(numbers)
    if cls is nn.RoPE:
        return Rotation(values["dims"], values["traditional"], values["base"], values["scale"])
    if cls.__name__ == "SuScaledRoPE" or values.get("mscale", 1.0) != 1.0:
        return None
    return Rotation(values["dims"], values["traditional"], base=None)


class Stream(NamedTuple):
    """What goes from one stretch to the next.

    Attributes:
        x: (B, L, K), the sums of residuals so far.
        scaled: ``x`` times the weight of the norm ahead, or None.
        tile_squares: with it, of :func:`fused_products`.
    """

    x: mx.array
    scaled: mx.array | None = None
    tile_squares: mx.array | None = None

    def through(self, norm: Norm | None) -> dict[str, Any]:
        """The arguments of a product whose input goes through a norm first."""
        if norm is None or self.scaled is None:
            return {"x": self.x, "norm": norm}
        return {"x": self.scaled, "norm": (None, norm[1]), "tile_squares": self.tile_squares}


def _products(matrices: list[Matrix], formats: tuple[Packing, ...], **rows: Any) -> list[mx.array]:
    """Products of one input; those of one format together, as many as a launch takes."""
    found: dict[int, mx.array] = {}
    for fmt in dict.fromkeys(known[:3] for known in formats):
        alike = [i for i, other in enumerate(formats) if other[:3] == fmt]
        for start in range(0, len(alike), MAX_MATRICES):
            places = alike[start : start + MAX_MATRICES]
            packed = [PackedMatrix(*matrices[i]) for i in places]
            products = fused_products(matrices=packed, **_keywords(fmt), **rows)
            found |= zip(places, products, strict=True)
    return [found[i] for i in range(len(matrices))]


def _keywords(fmt: Static) -> dict[str, Any]:
    return Format(*fmt[:3])._asdict()


@traced
def together(formats: tuple[Packing, ...]) -> Callable[..., Any]:
    """Products of one input."""

    def run(x: mx.array, matrices: list[Matrix]) -> list[mx.array]:
        return _products(matrices, formats, x=x)

    return run


def _heads_first(x: mx.array) -> mx.array:
    """(B, L, H, D) to (B, H, L, D). With one row that is a matter of names: one node less."""
    batch, length, count, width = x.shape
    return x.reshape(batch, count, 1, width) if length == 1 else x.transpose(0, 2, 1, 3)


def joined(out: mx.array) -> mx.array:
    """The heads of attention side by side, if they are not: (B, H, L, D) to (B, L, H * D)."""
    if out.ndim == 3:  # as attention_step gives them
        return out
    batch, _, length, _ = out.shape
    return (out if length == 1 else out.transpose(0, 2, 1, 3)).reshape(batch, length, -1)


@traced
def heads(
    formats: tuple[Packing, ...],
    counts: tuple[int, int],
    eps: float | None,
    norm_eps: tuple[float, float] | None,
    rope: Static | None,
) -> Callable[..., Any]:
    """Queries, keys and values of the heads: norm, projections, norms of heads, rotation."""

    def run(
        x: mx.array,
        position: mx.array | None,
        weight: mx.array | None,
        matrices: list[Matrix],
        norms: list[mx.array] | None,
        freqs: mx.array | None,
    ) -> list[mx.array]:
        norm = None if eps is None else (weight, eps)
        products = _products(matrices, formats, x=x, norm=norm)
        many = (counts[0], counts[1], counts[1])
        split = [y.reshape(*x.shape[:2], n, -1) for y, n in zip(products, many, strict=True)]
        if norms is not None and norm_eps is not None:
            for i in range(2):
                split[i] = mx.fast.rms_norm(split[i], norms[i], norm_eps[i])
        if (found := rotation_of(rope)) is not None:
            assert position is not None
            q, k, v = split
            q, k = rotary_embedding(q, k, position, **asdict(found), freqs=freqs)
            return [q, k, _heads_first(v)]
        q, k, v = map(_heads_first, split)
        if rope is not None:
            rotate = cast(Any, _join_rope(rope, freqs))
            q, k = rotate(q, offset=position), rotate(k, offset=position)
        return [q, k, v]

    return run


@traced
def projected(fmt: Packing) -> Callable[..., Any]:
    """Residual and output projection."""

    def run(out: mx.array, x: mx.array, matrix: Any) -> mx.array:
        rows = joined(out)
        return fused_products(rows, [matrix], **_keywords(fmt), residual=x)[0]

    return run


@traced
def feed_forward(
    fmt: Packing, fmt_down: Packing, gate: Gate, eps: float | None
) -> Callable[..., Any]:
    """Norm, gated product, the product that follows it, and a residual if there is one."""
    feed = _feed(fmt, fmt_down, gate)

    def run(
        x: mx.array, weight: mx.array | None, first: Any, second: Any, down: Any, residual: Any
    ) -> mx.array:
        norm = None if eps is None else (weight, eps)
        return feed(Stream(x), norm, first, second, down, residual).x

    return run


def _feed(fmt: Packing, fmt_down: Packing, gate: Gate) -> Callable[..., Stream]:
    def run(
        stream: Stream,
        norm: Norm | None,
        first: Any,
        second: Any,
        down: Any,
        residual: mx.array | None,
        next_weight: mx.array | None = None,
    ) -> Stream:
        given = {**_keywords(fmt), **stream.through(norm)}
        (y,) = fused_products(matrices=[first, second], gate=gate, **given)
        added: dict[str, Any] = {"residual": residual, "next_weight": next_weight}
        return Stream(*fused_products(y, [down], **_keywords(fmt_down), **added))

    return run


@traced
def tail(
    fmt_o: Packing, fmt: Packing, fmt_down: Packing, gate: Gate, eps: float
) -> Callable[..., Any]:
    """All of a decoder layer that follows attention."""
    follow = _follow(fmt_o, fmt, fmt_down, gate, eps)

    def run(out: mx.array, x: mx.array, *arrays: Any) -> mx.array:
        return follow(out, x, None, *arrays).x

    return run


def _follow(
    fmt_o: Packing, fmt: Packing, fmt_down: Packing, gate: Gate, eps: float
) -> Callable[..., Stream]:
    """What :func:`tail` computes, and what the norm of the next layer needs."""
    feed = _feed(fmt, fmt_down, gate)

    def run(
        out: mx.array,
        x: mx.array,
        next_weight: mx.array | None,
        matrix: Any,
        weight: mx.array,
        *matrices: Any,
    ) -> Stream:
        handed = weight if defers_norm(x) else None
        added: dict[str, Any] = {"residual": x, "next_weight": handed}
        h = Stream(*fused_products(joined(out), [matrix], **_keywords(fmt_o), **added))
        following = None if handed is None else next_weight
        return feed(h, (weight, eps), *matrices, h.x, following)

    return run


def flatten(tree: Any, leaves: list[mx.array]) -> Any:
    """Add the arrays of a tree to a list, and give what :func:`_unflatten` takes to go back."""
    if isinstance(tree, list | tuple):
        return tuple([flatten(branch, leaves) for branch in tree])
    leaves += [] if tree is None else [tree]
    return tree is not None


def _unflatten(tree: Any, leaves: Iterator[mx.array]) -> Any:
    if isinstance(tree, tuple):
        return [_unflatten(branch, leaves) for branch in tree]
    return next(leaves) if tree else None


@traced
def layers(
    each: tuple[tuple[Static, float, Static], ...], tree: Any, shape: Any
) -> Callable[..., Any]:
    """Decoder layers in turn, for a token of each sequence.

    Args:
        each: the key of a layer's :func:`heads`, the scale of its scores, the key of its
            :func:`tail`.
        tree: from :func:`flatten`, of the arrays of each layer's :func:`heads` and :func:`tail`.
        shape: whatever tells arguments apart that are traced each for itself.

    Returns:
        A function that gives the sums of residuals, what the norm of the layer after them needs if
        it is handed on, and the buffers.
    """
    steps = [(_step(before, scale), _follow(*after)) for before, scale, after in each]

    def run(
        x: mx.array,
        mask: mx.array | None,
        places: list[mx.array],
        arrays: list[mx.array],
        buffers: list[mx.array],
        handed: list[mx.array],
        next_weight: mx.array | None,
    ) -> list[mx.array]:
        new: list[mx.array] = []
        operands = _unflatten(tree, iter(arrays))
        stream, weights = Stream(x, *handed), [before[0] for before, _ in operands]
        for i, (step, follow) in enumerate(steps):
            before, after = operands[i]
            pair = buffers[2 * i : 2 * i + 2]
            out, *found = step(stream, mask, places[i % len(places)], *before, *pair)
            stream = follow(out, stream.x, (*weights, next_weight)[i + 1], *after)
            new += found
        return [part for part in stream if part is not None] + new

    return run


def _step(before: Static, scale: float) -> Callable[..., list[mx.array]]:
    """What :func:`heads` computes, and attention, for a token of each sequence."""
    formats, counts, eps, norm_eps, rope = before
    rotation = rotation_of(rope)
    assert rotation is not None

    def run(
        stream: Stream,
        mask: mx.array | None,
        places: mx.array,
        weight: mx.array | None,
        matrices: list[Matrix],
        norms: list[mx.array] | None,
        freqs: mx.array | None,
        keys: mx.array,
        values: mx.array,
    ) -> list[mx.array]:
        norm = None if eps is None else (weight, eps)
        q, k, v = _products(matrices, formats, **stream.through(norm))
        if norms is not None and norm_eps is not None:
            q, k = (
                mx.fast.rms_norm(y.reshape(len(y), n, -1), w, e).reshape(y.shape)
                for y, n, w, e in zip((q, k), counts, norms, norm_eps, strict=True)
            )
        given = q, k, v, keys, values, places
        return attention_step(*given, scale=scale, rotation=rotation, freqs=freqs, mask=mask)

    return run
