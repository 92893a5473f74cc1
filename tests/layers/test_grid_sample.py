"""The module holds options, no parameters, and passes gradients to what feeds it."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_qlayers.layers.grid_sample import GridSample
from mlx_qlayers.ops.grid_sample import affine_grid, grid_sample


def test_options_reach_the_operator():
    mx.random.seed(1)
    x, grid = mx.random.normal((2, 5, 7, 3)), mx.random.uniform(-1.5, 1.5, (2, 4, 6, 2))
    options = {"mode": "bicubic", "padding_mode": "reflection", "align_corners": True}
    layer = GridSample(**options)
    assert mx.array_equal(layer(x, grid), grid_sample(x, grid, **options))
    assert layer.parameters() == {} and layer.trainable_parameters() == {}
    assert "mode='bicubic', padding_mode='reflection', align_corners=True" in repr(layer)


def test_gradient_reaches_the_layers_around_it():
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.locate = nn.Linear(12, 6)
            self.sample = GridSample()

        def __call__(self, x):
            theta = self.locate(x.reshape(len(x), -1)).reshape(-1, 2, 3)
            return self.sample(x, affine_grid(theta, x.shape))

    mx.random.seed(2)
    model, x = Transformer(), mx.random.normal((2, 3, 4, 1))
    _, gradients = nn.value_and_grad(model, lambda x: (model(x) ** 2).sum())(x)
    assert gradients["sample"] == {}
    assert mx.abs(gradients["locate"]["weight"]).max().item() > 0


@pytest.mark.parametrize("options", [{"mode": "linear"}, {"padding_mode": "edge"}])
def test_unknown_options(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        GridSample(**options)
