"""A small spatial transformer undoes random rotations of digits: both gradients, end to end."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_qlayers.ops.grid_sample import affine_grid, grid_sample
from mlx_qlayers.runtime.backend import use_backend

LIMIT = np.pi / 2


def rotation(angle: mx.array) -> mx.array:
    """Affine maps (N, 2, 3) that turn by angles (N,)."""
    cos, sin, zero = mx.cos(angle), mx.sin(angle), mx.zeros_like(angle)
    rows = mx.stack([cos, -sin, zero, sin, cos, zero], axis=-1)
    return rows.reshape(-1, 2, 3)


def turn(x: mx.array, angle: mx.array) -> mx.array:
    return grid_sample(x, affine_grid(rotation(angle), x.shape))


class Transformer(nn.Module):
    """Estimates an angle, turns features back by it and classifies them.

    The features come from a convolution, which learns through the gradient of the image; the angle
    learns through the gradient of the grid.
    """

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.locate = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.features = nn.Conv2d(1, 4, 3, padding=1)
        self.classify = nn.Linear(256, 10)

    def angle(self, x: mx.array) -> mx.array:
        return LIMIT * mx.tanh(self.locate(x.flatten(1))[:, 0])

    def __call__(self, x: mx.array) -> mx.array:
        features = nn.relu(self.features(x))
        if self.turns:
            features = turn(features, self.angle(x))
        return self.classify(features.flatten(1))


def digits(seed: int) -> tuple[tuple[mx.array, mx.array, mx.array], ...]:
    """Rotated digits, their labels and angles, to train on and to test with."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(images))
    x = mx.array((images[order] / 16).reshape(-1, 8, 8, 1).astype(np.float32))
    angle = mx.array(rng.uniform(-1, 1, len(images)).astype(np.float32)) * LIMIT / 1.5
    everything = turn(x, angle), mx.array(labels[order]), angle
    return tuple(a[:1400] for a in everything), tuple(a[1400:] for a in everything)


def train(model: Transformer, x: mx.array, y: mx.array, epochs: int) -> None:
    def loss(model: Transformer, x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(x), y, reduction="mean")

    step = nn.value_and_grad(model, loss)
    optimizer = optim.Adam(learning_rate=optim.cosine_decay(2e-3, epochs * len(x) // 100))
    for epoch in range(epochs):
        order = mx.array(np.random.default_rng(epoch).permutation(len(x)))
        for start in range(0, len(x), 100):
            rows = order[start : start + 100]
            _, gradients = step(model, x[rows], y[rows])
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)


def accuracy(model: Transformer, x: mx.array, y: mx.array) -> float:
    return (mx.argmax(model(x), axis=-1) == y).mean().item()


@pytest.mark.slow
def test_a_spatial_transformer_learns_to_undo_rotations() -> None:
    with use_backend("host"):
        learnt, test = digits(seed=1)
        models = []
        for turns in (True, False):
            mx.random.seed(1)
            model = Transformer(turns)
            before = dict(tree_flatten(model.parameters()))
            train(model, *learnt[:2], epochs=16)
            models.append(model)
            after: dict[str, Any] = dict(tree_flatten(model.parameters()))
            still = {name for name in after if mx.array_equal(after[name], before[name])}
            assert still == set() if turns else all(name.startswith("locate") for name in still)
        turning, plain = (accuracy(model, *test[:2]) for model in models)
        estimated = np.array(models[0].angle(test[0]))
    assert turning > 0.9 and turning > plain + 0.03, f"{turning:.3f}, without turning {plain:.3f}"
    # Nobody told it the angles.
    assert np.corrcoef(estimated, np.array(test[2]))[0, 1] < -0.75
