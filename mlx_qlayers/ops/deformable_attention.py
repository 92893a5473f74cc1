"""Multi-scale deformable attention, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import mlx.core as mx

from ..dispatch import Arrays, Gradient, Operation, Plan, choose, dispatch
from ..metal.deformable import launch as kernels
from ..options import Deformable
from ..reference import deformable_attention as reference
from .signature import Signature

PADDING_MODES = ("zeros", "border")


def deformable_attention(
    values: mx.array,
    shapes: Sequence[tuple[int, int]],
    locations: mx.array,
    weights: mx.array,
    *,
    padding_mode: str = "zeros",
) -> mx.array:
    """Multi-scale deformable attention: each head of a query sums weighted samples of all levels.

    Samples are bilinear. Coordinates and sums are computed in float32 whatever the dtypes, without
    an array of samples. NaN and infinite locations do what PyTorch does on a CPU: padded with
    zeros they give NaN.

    Args:
        values: (B, S, H, D), the pixels of all levels one after the other; float32, float16 or
            bfloat16.
        shapes: height and width of each level; S is the sum of their products.
        locations: (B, L, H, levels, points, 2) as (x, y), from 0 to 1 between the outer edges of a
            level; float32, float16 or bfloat16.
        weights: (B, L, H, levels, points); float32, float16 or bfloat16. They need not sum to one.
        padding_mode: what lies outside a level: ``"zeros"`` or ``"border"`` (the nearest border
            pixel; no gradient for the locations there).

    Returns:
        (B, L, H * D) in the dtype of ``values``.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> shapes = [(4, 6), (2, 3)]
        >>> values = mx.ones((1, 30, 8, 32))
        >>> locations = mx.full((1, 5, 8, 2, 4, 2), 0.5)
        >>> y = deformable_attention(values, shapes, locations, mx.full((1, 5, 8, 2, 4), 0.125))
        >>> y.shape, y.max().item()
        ((1, 5, 256), 1.0)

    Source:
        Deformable DETR (https://arxiv.org/abs/2010.04159); ``MultiScaleDeformableAttention`` of
        Hugging Face transformers.
    """
    static = padding_mode, False, *_extents(shapes)
    return dispatch(DEFORMABLE_ATTENTION, (values, locations, weights), static)


def _extents(shapes: Any) -> tuple[Any, ...]:
    try:
        pairs: Any = shapes.tolist() if isinstance(shapes, mx.array) else shapes
        if {*map(len, pairs)} <= {2}:
            return (*chain.from_iterable(pairs),)
    except TypeError:
        pass
    raise ValueError(f"shapes must be pairs of height and width, one a level, not {shapes!r}")


def _plan(arrays: Sequence[Any], padding_mode: str, pixels: bool, *extents: Any) -> Plan:
    shapes = tuple(zip(extents[::2], extents[1::2], strict=True))
    options = Deformable(shapes, padding_mode, pixels)
    values, locations, weights = arrays
    _check(values, locations, weights, options)
    empty = "there is nothing to add up" if 0 in (values.size, locations.size) else None
    takes = kernels.covers(values, locations)
    choice = choose("deformable_attention", takes, empty=empty)
    if empty:
        shape = *locations.shape[:2], values.shape[2] * values.shape[3]
        return Plan(choice, lambda *_: mx.zeros(shape, values.dtype))
    composed = reference.attender(options)
    if choice.path == "reference":
        return Plan(choice, composed)
    config = kernels.heuristic(values.shape[3], locations.shape[4], values.dtype, choice.path)
    launch = cache(lambda: kernels.gradient(arrays, options, config))  # where it is asked for

    def gradient(given: Arrays, cotangents: list[mx.array], _: object) -> list[mx.array]:
        return launch()(*given, *cotangents)

    run = kernels.forward(arrays, options, config)
    return Plan(choice, run, (Gradient((0, 1, 2), gradient),), composed)


# Its static arguments: the padding, whether locations count pixels, and the levels' extents.
_TAKES = Signature(f"""
    values: float (B, S, H, D)
    locations: float (B, L, H, levels, P, 2)
    weights: float (B, L, H, levels, P)
    padding_mode: {str(PADDING_MODES)[1:-1]}
""")
DEFORMABLE_ATTENTION = Operation("deformable_attention", _plan, compiled=True)


def _check(values: Any, locations: Any, weights: Any, options: Deformable) -> None:
    shapes = options.shapes
    if not all(type(n) is int and n > 0 for n in chain.from_iterable(shapes)):
        raise ValueError(f"shapes must be positive heights and widths, not {shapes}")
    _TAKES.check(values, locations, weights, options.padding_mode, levels=len(shapes))
    total = values.shape[1]
    if (pixels := sum(height * width for height, width in shapes)) != total:
        raise ValueError(f"shapes {shapes} have {pixels} pixels, but values {values.shape} {total}")


# Raises a ValueError unless it is the name of one.
check_padding = Signature(f"padding_mode: {str(PADDING_MODES)[1:-1]}").check
