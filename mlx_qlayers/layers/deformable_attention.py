"""Deformable attention as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..ops.deformable_attention import check_padding, deformable_attention


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention: queries sample image features near reference points.

    Its parameters have the names and layouts of Deformable DETR's module in Hugging Face
    transformers, which RT-DETR and Grounding DINO share.

    Args:
        dims: of queries and features.
        num_heads: heads; it divides ``dims``.
        num_levels: levels of the features.
        num_points: samples of each level.
        padding_mode: what lies outside a level, ``"zeros"`` or ``"border"``.

    Raises:
        ValueError: ``num_heads`` does not divide ``dims``, or no padding mode has that name.

    Example:
        >>> layer = DeformableAttention(64, num_heads=8, num_levels=2)
        >>> queries, features = mx.ones((1, 5, 64)), mx.ones((1, 4 * 6 + 2 * 3, 64))
        >>> layer(queries, features, mx.full((1, 5, 2, 2), 0.5), [(4, 6), (2, 3)]).shape
        (1, 5, 64)

    Source:
        Deformable DETR (https://arxiv.org/abs/2010.04159); see
        :func:`mlx_qlayers.deformable_attention`.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        padding_mode: str = "zeros",
    ) -> None:
        super().__init__()
        if dims % num_heads:
            raise ValueError(f"num_heads {num_heads} must divide dims {dims}")
        check_padding(padding_mode)
        self.num_heads, self.num_levels, self.num_points = num_heads, num_levels, num_points
        self.padding_mode = padding_mode
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(dims, 2 * samples)
        self.attention_weights = nn.Linear(dims, samples)
        self.value_proj = nn.Linear(dims, dims)
        self.output_proj = nn.Linear(dims, dims)
        # At first each head looks its own way, the farther the higher the point's number.
        turn = mx.arange(num_heads) * (2 * math.pi / num_heads)
        way = mx.stack([mx.cos(turn), mx.sin(turn)], -1)
        way = (way / mx.abs(way).max(-1, keepdims=True))[:, None, None]
        steps = mx.arange(1, num_points + 1)[:, None]
        shape = num_heads, num_levels, num_points, 2
        self.sampling_offsets.weight = mx.zeros_like(self.sampling_offsets.weight)
        self.sampling_offsets.bias = mx.broadcast_to(way * steps, shape).flatten()
        self.attention_weights.weight = mx.zeros_like(self.attention_weights.weight)
        self.attention_weights.bias = mx.zeros_like(self.attention_weights.bias)

    def _extra_repr(self) -> str:
        names = ("num_heads", "num_levels", "num_points", "padding_mode")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def __call__(
        self,
        queries: mx.array,
        features: mx.array,
        reference_points: mx.array,
        shapes: Sequence[tuple[int, int]],
        mask: mx.array | None = None,
    ) -> mx.array:
        """Attend.

        Args:
            queries: (B, L, dims), position embeddings added.
            features: (B, S, dims), the pixels of all levels one after the other.
            reference_points: (B, L, levels, 2) as (x, y) from 0 to 1, or boxes (B, L, levels, 4)
                as (x, y, width, height).
            shapes: height and width of each level.
            mask: (B, S) of bool, false where a pixel counts as zeros; or None.

        Returns:
            (B, L, dims).

        Raises:
            ValueError: an argument has the wrong shape, dtype or value; it says which.
        """
        batch, length, _ = queries.shape
        values = self.value_proj(features)
        if mask is not None:
            values = mx.where(mask[..., None], values, 0)
        values = values.reshape(*values.shape[:2], self.num_heads, -1)
        samples = batch, length, self.num_heads, self.num_levels, self.num_points
        offsets = self.sampling_offsets(queries).reshape(*samples, 2)
        scores = self.attention_weights(queries).reshape(*samples[:3], -1)
        weights = mx.softmax(scores, axis=-1, precise=True).reshape(samples)
        points = reference_points[:, :, None, :, None]
        if reference_points.shape[-1] == 4:
            offsets = offsets * (points[..., 2:] * (0.5 / self.num_points))
        elif reference_points.shape[-1] == 2:
            sizes = mx.array([(width, height) for height, width in shapes], queries.dtype)
            offsets = offsets / sizes[:, None]
        else:
            raise ValueError(
                "reference_points must be (B, L, levels, 2), or boxes with 4 numbers, but its "
                f"shape is {reference_points.shape}"
            )
        found = deformable_attention(
            values, shapes, points[..., :2] + offsets, weights, padding_mode=self.padding_mode
        )
        return self.output_proj(found)
