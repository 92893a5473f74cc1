"""LightGlue: matches the keypoints of two images, in MLX.

Lindenberger et al., LightGlue: Local Feature Matching at Light Speed
(https://arxiv.org/abs/2306.13643). Layers of self-attention within an image, with rotary positions,
and cross-attention between the two refine descriptors; it stops after a layer at which most points
are sure, and leaves out points of which it is sure that they have no match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from products import Linear, attention, gelu, matmul

DIMS, HEADS, LAYERS, INPUTS = 256, 4, 9, 128
# Shares of points that are sure, at which it stops; of matches, below which points are left out.
DEPTH, WIDTH, LEAST = 0.95, 0.99, 0.1


class Matches(NamedTuple):
    """Pairs of keypoints.

    Attributes:
        pairs: (M, 2), the numbers of keypoints in either image.
        scores: (M,), between 0 and 1.
        layers: how many were computed.
    """

    pairs: np.ndarray
    scores: np.ndarray
    layers: int


class FeedForward(nn.Module):
    """The addition of a message to its points."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = [
            Linear(2 * DIMS, 2 * DIMS),
            nn.LayerNorm(2 * DIMS),
            gelu,
            Linear(2 * DIMS, DIMS),
        ]

    def add(self, x: mx.array, message: mx.array) -> mx.array:
        y = mx.concatenate([x, message], axis=-1)
        for layer in self.ffn:
            y = layer(y)
        return x + y


class SelfAttention(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.Wqkv = Linear(DIMS, 3 * DIMS)
        self.out_proj = Linear(DIMS, DIMS)

    def __call__(self, x: mx.array, turns: Sequence[mx.array]) -> mx.array:
        all_heads = self.Wqkv(x).reshape(*x.shape[:2], 3 * HEADS, -1).swapaxes(1, 2)
        q, k = mx.split(_turned(all_heads[:, : 2 * HEADS], turns), 2, axis=1)
        context = attention(q, k, all_heads[:, 2 * HEADS :], scale=q.shape[-1] ** -0.5)
        return self.add(x, self.out_proj(_joined(context)))


class CrossAttention(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.to_qk, self.to_v, self.to_out = (Linear(DIMS, DIMS) for _ in range(3))

    def __call__(self, states: list[mx.array]) -> list[mx.array]:
        parts = [(_heads(self.to_qk(x)), _heads(self.to_v(x))) for x in states]
        # Of the other image, which in a batch of both is the other half.
        others = parts[::-1]
        if len(parts) == 1:
            others = [tuple(mx.concatenate([x[1:], x[:1]]) for x in parts[0])]
        found = []
        for x, (qk, _), (other_qk, other_v) in zip(states, parts, others, strict=True):
            context = attention(qk, other_qk, other_v, scale=qk.shape[-1] ** -0.5)
            found.append(self.add(x, self.to_out(_joined(context))))
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = SelfAttention(), CrossAttention()


class Assignment(nn.Module):
    """Scores of all pairs: how alike they are, and whether either has a match at all."""

    def __init__(self) -> None:
        super().__init__()
        self.matchability, self.final_proj = Linear(DIMS, 1), Linear(DIMS, DIMS)

    def __call__(self, x: mx.array, y: mx.array) -> mx.array:
        a, b = (self.final_proj(each) / DIMS**0.25 for each in (x, y))
        alike = matmul(a, b.swapaxes(1, 2))
        # Logarithms of the softmax of rows and of columns, and of both points' chances of a match.
        totals = mx.logsumexp(alike, 2, keepdims=True) + mx.logsumexp(alike, 1, keepdims=True)
        none = mx.array(0.0)
        misses = [mx.logaddexp(none, -self.matchability(each)) for each in (x, y)]
        return 2 * alike - totals - misses[0] - misses[1].swapaxes(1, 2)


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wr = Linear(2, DIMS // HEADS // 2, bias=False)


class Confidence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = [Linear(DIMS, 1)]


class LightGlue(nn.Module):
    """The whole matcher; its parameters have the names of the original's.

    Args:
        prune_above: images with more points than this lose points that have no match; what that
            saves must be more than the wait for their number. None for no images.
    """

    def __init__(self, prune_above: int | None = None) -> None:
        super().__init__()
        self.prune_above = prune_above
        self.input_proj, self.posenc = Linear(INPUTS, DIMS), Encoding()
        self.transformers = [Layer() for _ in range(LAYERS)]
        self.log_assignment = [Assignment() for _ in range(LAYERS)]
        self.token_confidence = [Confidence() for _ in range(LAYERS - 1)]

    def __call__(
        self, points: list[mx.array], descriptors: list[mx.array], size: tuple[int, int]
    ) -> Matches:
        """Match the points (N, 2) and descriptors (N, 128) of two images of a width and height."""
        if not all(map(len, points)):
            return Matches(np.zeros((0, 2), int), np.zeros(0), 0)
        states = [self.input_proj(d)[None] for d in descriptors]
        turns = [self._turns(p, size) for p in points]
        kept, total = [np.arange(len(p)) for p in points], sum(map(len, points))
        for number in range(LAYERS):
            states, sure, unsure = self.step(number, states, turns)
            if number == LAYERS - 1 or 1 - unsure.item() / total > DEPTH:
                break
            for i, confidence in enumerate(sure):
                if self.prune_above is None or len(kept[i]) <= self.prune_above:
                    continue
                likely = mx.sigmoid(self.log_assignment[number].matchability(states[i])).reshape(-1)
                unsettled = confidence.reshape(-1) <= _least(number)
                chosen = np.flatnonzero(np.array((likely > 1 - WIDTH) | unsettled))
                kept[i], rows = kept[i][chosen], mx.array(chosen)
                states[i] = states[i][:, rows]
                turns[i] = turns[i][0][:, :, rows], turns[i][1][:, :, rows]
        mx.eval(best := self.assign(number, *states))
        pairs, scores = _mutual(*map(np.array, best))
        pairs = np.stack([kept[i][pairs[:, i]] for i in range(2)], -1)
        return Matches(pairs, scores, number + 1)

    def step(
        self, number: int, states: list[mx.array], turns: list[tuple[mx.array, mx.array]]
    ) -> tuple[list[mx.array], list[mx.array], mx.array]:
        """The states of both images after a layer, how sure each point is, and how many are not."""
        layer = self.transformers[number]
        # In one batch, if both images have as many points.
        batches = _together(states), *map(_together, zip(*turns, strict=True))
        states = [layer.self_attn(s, t) for s, *t in zip(*batches, strict=True)]
        states = layer.cross_attn(states)
        if number == LAYERS - 1:
            return _apart(states), [], mx.array(0)
        (token,) = self.token_confidence[number].token
        sure = [mx.sigmoid(token(s)) for s in states]
        unsure = [(s < _least(number)).sum() for s in sure]
        return _apart(states), _apart(sure), unsure[0] + unsure[-1] * (len(unsure) - 1)

    def assign(self, number: int, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Each point's best match in the other image, and how sure those of the first image are."""
        scores = self.log_assignment[number](x, y)[0]
        return scores.argmax(1), scores.argmax(0), mx.exp(scores.max(1))

    def _turns(self, points: mx.array, size: tuple[int, int]) -> tuple[mx.array, mx.array]:
        """The rotation of channels by positions: factors of a pair, and of it the other way."""
        centred = (points - mx.array(size) / 2) / (max(size) / 2)
        angles = self.posenc.Wr(centred)[None, None, ..., None]
        sines = mx.sin(angles)
        return mx.cos(angles), mx.concatenate([-sines, sines], axis=-1)


def _together(arrays: Sequence[mx.array]) -> list[mx.array]:
    one, other = arrays
    return [mx.concatenate([one, other])] if one.shape == other.shape else [one, other]


def _apart(arrays: list[mx.array]) -> list[mx.array]:
    return list(mx.split(arrays[0], 2)) if len(arrays) == 1 else arrays


def _heads(x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)


def _joined(x: mx.array) -> mx.array:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _turned(x: mx.array, turns: Sequence[mx.array]) -> mx.array:
    pairs = mx.unflatten(x, -1, (-1, 2))
    return mx.flatten(pairs * turns[0] + pairs[..., ::-1] * turns[1], -2)


def _least(number: int) -> float:
    """How sure a point must be after a layer."""
    return min(1.0, 0.8 + 0.1 * math.exp(-4.0 * number / LAYERS))


def _mutual(right: np.ndarray, left: np.ndarray, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs that are each other's best, and how sure they are."""
    rows = np.arange(len(right))
    rows = rows[(left[right] == rows) & (best > LEAST)]
    return np.stack([rows, right[rows]], -1), best[rows]
