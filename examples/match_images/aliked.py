"""ALIKED: keypoints and descriptors of an image, in MLX.

Zhao et al., ALIKED: A Lighter Keypoint and Descriptor Extraction Network via Deformable
Transformation (https://arxiv.org/abs/2304.03608). A convolutional encoder, deformable in its
deeper half, gives features and scores; keypoints are the maxima of the scores, moved by a soft
argmax, and a descriptor gathers samples of the features around its keypoint.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from products import (
    Conv2d,
    deform_conv2d,
    joined,
    matmul,
    maxima,
    normalized,
    pointwise,
    pooled,
)

from mlx_qlayers import DeformConv2d, affine_grid, grid_sample

# The published model "n16": channels of the four blocks, of descriptors, and samples of each.
CHANNELS, DIMS, SAMPLES = (16, 32, 64, 128), 128, 16
RADIUS, TEMPERATURE = 2, 0.1


class Keypoints(NamedTuple):
    """The points that ALIKED finds in an image.

    Attributes:
        points: (N, 2) as (x, y), in pixels from the centre of the first.
        descriptors: (N, 128), of length one.
        scores: (N,), between 0 and 1.
    """

    points: mx.array
    descriptors: mx.array
    scores: mx.array


class DeformableConv(nn.Module):
    """A convolution whose taps another convolution moves, by at most a quarter of the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.offset_conv = Conv2d(inputs, 18, 3, padding=1)
        self.regular_conv = DeformConv2d(inputs, outputs, 3, padding=1)

    def __call__(self, x: mx.array, rest: mx.array | None = None, selu: bool = False) -> mx.array:
        most = max(x.shape[1:3]) / 4
        offsets = mx.clip(self.offset_conv(x), -most, most)
        return deform_conv2d(self.regular_conv, x, offsets, rest, selu)


class Block(nn.Module):
    """Two convolutions, into which weights.py folds their batch norms, and a residual, if any."""

    def __init__(self, inputs: int, outputs: int, deformable: bool, residual: bool) -> None:
        super().__init__()
        conv = DeformableConv if deformable else partial(Conv2d, kernel_size=3, padding=1)
        self.conv1, self.conv2 = conv(inputs, outputs), conv(outputs, outputs)
        if residual:
            self.downsample = Conv2d(inputs, outputs, 1)

    def __call__(self, x: mx.array) -> mx.array:
        rest = self.downsample(x) if "downsample" in self else None
        return self.conv2(self.conv1(x, selu=True), rest, selu=True)


class Descriptors(nn.Module):
    """For each keypoint, samples of the features at learned offsets, summed by matrices."""

    def __init__(self) -> None:
        super().__init__()
        numbers = 2 * SAMPLES
        # The second is SELU, which is part of the first here.
        self.offset_conv = [Conv2d(DIMS, numbers, 3), None, Conv2d(numbers, numbers, 1)]
        self.sf_conv = Conv2d(DIMS, DIMS, 1, bias=False)
        self.agg_weights = mx.zeros((SAMPLES, DIMS, DIMS))

    def __call__(self, features: mx.array, points: mx.array) -> mx.array:
        images, height, width, _ = features.shape
        last = mx.array([width - 1, height - 1], mx.float32)
        corner = mx.clip(points.astype(mx.int32) - 1, 0, last.astype(mx.int32) - 3)
        x, y = (corner[..., axis, None, None] for axis in (0, 1))
        steps, image = mx.arange(3), mx.arange(images).reshape(-1, 1, 1, 1)
        patches = features[image, y + steps[:, None], x + steps].reshape(-1, 3, 3, DIMS)
        first, _, second = self.offset_conv
        offsets = second(first(patches, selu=True))
        most = max(height, width) / 4
        offsets = mx.clip(offsets, -most, most).reshape(images, -1, 2, SAMPLES).swapaxes(2, 3)
        grid = 2 * (points[:, :, None] + offsets) / last - 1
        sampled = grid_sample(features, grid, align_corners=True)
        sampled = self.sf_conv(sampled, selu=True).reshape(1, -1, SAMPLES * DIMS)
        weights = self.agg_weights.reshape(1, SAMPLES * DIMS, DIMS)
        return normalized(matmul(sampled, weights)).reshape(images, -1, DIMS)


class ALIKED(nn.Module):
    """The whole extractor; its parameters have the names of the original's.

    Args:
        most: keypoints of an image at most, those with the highest scores.
        threshold: the least score of a keypoint.
    """

    def __init__(self, most: int = 1024, threshold: float = 0.2) -> None:
        super().__init__()
        self.most, self.threshold = most, threshold
        c1, c2, c3, c4 = CHANNELS
        self.block1 = Block(3, c1, False, False)
        self.block2 = Block(c1, c2, False, True)
        self.block3 = Block(c2, c3, True, True)
        self.block4 = Block(c3, c4, True, True)
        part = DIMS // 4
        self.conv1, self.conv2, self.conv3, self.conv4 = (
            Conv2d(channels, part, 1, bias=False) for channels in CHANNELS
        )
        self.score_head = [Conv2d(DIMS, 8, 1, bias=False)]
        for inputs, outputs in ((8, 4), (4, 4), (4, 1)):
            self.score_head += [None, Conv2d(inputs, outputs, 3, padding=1, bias=False)]
        self.desc_head = Descriptors()

    def __call__(self, images: mx.array) -> list[Keypoints]:
        """Find keypoints in images (B, H, W, 3) with values from 0 to 1."""
        features, scores, found = self.maps(images)
        pixels = [
            self._chosen(each) for each in np.array(found)
        ]  # their number is needed: it waits
        # In one batch, if all have as many.
        step = len(images) if len({*map(len, pixels)}) == 1 else 1
        keypoints: list[Keypoints] = []
        for i in range(0, len(images), step):
            batch = slice(i, i + step)
            chosen = mx.array(np.stack(pixels[batch]), mx.int32)
            keypoints += map(Keypoints, *self.describe(features[batch], scores[batch], chosen))
        return keypoints

    def maps(self, images: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Features (B, H, W, 128) of length one, and scores and their maxima (B, H, W)."""
        height, width = images.shape[1:3]
        above, left = (-height % 32) // 2, (-width % 32) // 2
        margins = (above, -height % 32 - above), (left, -width % 32 - left)
        x = (
            mx.pad(images, [(0, 0), *margins, (0, 0)], mode="edge")
            if sum(sum(margins, ()))
            else images
        )
        x1 = self.block1(x)
        x2 = self.block2(pooled(x1, 2))
        x3 = self.block3(pooled(x2, 4))
        x4 = self.block4(pooled(x3, 4))
        laterals = self.conv1, self.conv2, self.conv3, self.conv4
        levels = [conv(y, selu=True) for conv, y in zip(laterals, (x1, x2, x3, x4), strict=True)]
        grid = _corner_to_corner(x.shape)

        def raised(level: mx.array) -> mx.array:
            return grid_sample(level, grid, align_corners=True)

        # The first layer of the scores sums over levels, which are cheaper to raise afterwards.
        # The first layer of the scores sums over levels, which are cheaper to raise afterwards.
        first, *others = self.score_head[::2]
        weights = mx.split(first.weight, 4, axis=-1)
        rest = sum(raised(pointwise(y, w)) for y, w in zip(levels[1:], weights[1:], strict=True))
        scores = pointwise(levels[0], weights[0], rest, selu=True)
        for layer in others:
            scores = layer(scores, selu=layer is not others[-1])
        features = joined([levels[0], *map(raised, levels[1:])])
        inner = slice(above, above + height), slice(left, left + width)
        scores = mx.sigmoid(scores)[:, *inner, 0]
        return features[:, *inner], scores, maxima(scores, RADIUS)

    def _chosen(self, maxima: np.ndarray) -> np.ndarray:
        """The maxima that become keypoints, (N, 2) as (x, y)."""
        flat = maxima.reshape(-1)
        kept = np.flatnonzero(flat > self.threshold)
        if len(kept) == 0:
            kept = np.flatnonzero(flat > flat.mean())
        if len(kept) > self.most:
            kept = kept[np.argsort(-flat[kept], kind="stable")[: self.most]]
        return np.stack(np.divmod(kept, maxima.shape[1])[::-1], -1)

    def describe(
        self, features: mx.array, scores: mx.array, pixels: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The arrays of Keypoints for points near pixels (B, N, 2), as many in each image."""
        steps = range(-RADIUS, RADIUS + 1)
        around = mx.array([(x, y) for y in steps for x in steps])
        near = pixels[:, :, None] + around
        image = mx.arange(len(scores)).reshape(-1, 1, 1)
        shares = mx.softmax(scores[image, near[..., 1], near[..., 0]] / TEMPERATURE, axis=-1)
        points = pixels + (shares[..., None] * around).sum(axis=2)
        last = mx.array([scores.shape[2] - 1, scores.shape[1] - 1], mx.float32)
        grid = 2 * points[:, None] / last - 1
        found = grid_sample(scores[..., None], grid, align_corners=True).reshape(pixels.shape[:2])
        return points, self.desc_head(features, points), found


@lru_cache(4)
def _corner_to_corner(shape: tuple[int, ...]) -> mx.array:
    """The grid that samples images of any size at the pixels of a shape (B, H, W, C)."""
    same = mx.broadcast_to(mx.eye(2, 3), (shape[0], 2, 3))
    return affine_grid(same, shape, align_corners=True)
