"""Two pictures with a known homography between them, made from a sample picture of scikit-learn."""

from __future__ import annotations

import numpy as np

WIDTH, HEIGHT = 640, 480
# From pixels of the first picture to pixels of the second: turned, smaller, in perspective.
HOMOGRAPHY = np.array([[0.84, -0.17, 92.0], [0.12, 0.80, 18.0], [-1.1e-4, -1.6e-4, 1.0]])


# From pixels of a picture to those of its half.
HALF = np.array([[0.5, 0, -0.25], [0, 0.5, -0.25], [0, 0, 1]])


def pair() -> tuple[np.ndarray, np.ndarray]:
    """Both pictures, (480, 640, 3) of bytes."""
    from sklearn.datasets import load_sample_image

    china = load_sample_image("china.jpg").astype(np.float64)
    larger = np.diag([china.shape[1] / WIDTH, china.shape[0] / HEIGHT, 1.0])
    first = warped(china, larger)
    return first, warped(first.astype(np.float64), np.linalg.inv(HOMOGRAPHY))


def halved(picture: np.ndarray) -> np.ndarray:
    """Of every 2 x 2 pixels the mean."""
    parts = picture.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3)
    return np.rint(parts.mean((1, 3))).astype(np.uint8)


def warped(picture: np.ndarray, back: np.ndarray) -> np.ndarray:
    """A picture at other pixels, bilinear; ``back`` leads from the new pixels to the picture's."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    at = moved(np.stack([x, y], -1).reshape(-1, 2).astype(np.float64), back)
    size = np.array(picture.shape[1::-1])
    inside = ((at >= 0) & (at <= size - 1)).all(-1)
    low = np.clip(np.floor(at).astype(int), 0, size - 2)
    part = (at - low)[:, :, None]
    found = np.zeros((len(at), 3))
    for dx in (0, 1):
        for dy in (0, 1):
            share = (part[:, 0] if dx else 1 - part[:, 0]) * (part[:, 1] if dy else 1 - part[:, 1])
            found += share * picture[low[:, 1] + dy, low[:, 0] + dx]
    found[~inside] = 0
    return np.rint(found).astype(np.uint8).reshape(HEIGHT, WIDTH, 3)


def moved(points: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """Points (N, 2) where the homography puts them."""
    ends = np.concatenate([points, np.ones((len(points), 1))], 1) @ homography.T
    return ends[:, :2] / ends[:, 2:]
