"""Adam whose moments take 8 bits, beside MLX's: numbers, size and where a training comes to."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_qlayers.training.optimizers import BLOCK, in_8_bits, packed, unpacked, values


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_rounded_to_the_nearest(signed):
    rng = np.random.default_rng(0)
    x = 10.0 ** rng.uniform(-9, 2, (5, 300)) * (rng.choice([-1, 1], (5, 300)) if signed else 1)
    x[0, :7] = 0
    codes, scales = packed(mx.array(x.astype(np.float32)), signed)
    assert (codes.dtype, codes.shape) == (mx.uint8, (-(-x.size // BLOCK), BLOCK))
    rows = np.pad(x.flatten(), (0, -x.size % BLOCK)).reshape(-1, BLOCK).astype(np.float32)
    most = np.abs(rows).max(1, keepdims=True)
    table = np.array(values(signed)[0], np.float32)
    assert len(table) == 256 == len(np.unique(table)) and table[-1] == 1
    assert (table[table > 0] > 0.1).sum() == (64 if signed else 128) + 1
    nearest = np.abs(rows[..., None] / most[..., None] - table).min(-1) * most
    found = np.array(unpacked(codes, scales, x.shape, signed))
    off = np.abs(np.pad(found.flatten(), (0, -x.size % BLOCK)).reshape(rows.shape) - rows)
    assert np.all(off <= nearest + 1e-6 * most)
    assert np.all(found[0, :7] == 0)


def trained(optimizer, dtype=mx.float32, steps=100, compiled=False):
    """A small network after some steps, and the losses of all."""
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    model.set_dtype(dtype)
    x, right = mx.random.normal((256, 64)), mx.random.normal((64, 64)) / 8
    y = mx.tanh(x @ right)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def loss(model):
        return nn.losses.mse_loss(model(x.astype(dtype)).astype(mx.float32), y)

    def step():
        value, gradients = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, gradients)
        return value

    run, found = mx.compile(step, inputs=state, outputs=state) if compiled else step, []
    for _ in range(steps):
        found.append(run())
        mx.eval(state, found[-1])
    assert all(a.dtype == dtype for _, a in tree_flatten(model.parameters()))
    return model, np.array([a.item() for a in found])


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_a_training_goes_where_that_of_float32_goes(kind):
    (stock, theirs), (model, ours) = (
        trained(each) for each in (kind(1e-3), in_8_bits(kind(learning_rate=1e-3)))
    )
    assert theirs[-1] < 0.1 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=0.05)
    mx.random.seed(1)
    began = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    trees = (dict(tree_flatten(m.parameters())) for m in (began, stock, model))
    start, theirs, ours = trees
    for name in start:
        far = mx.linalg.norm(theirs[name] - start[name])
        assert mx.linalg.norm(ours[name] - theirs[name]) < 0.05 * far, name


def test_adapters_in_bfloat16_stay_so():
    _, losses = trained(in_8_bits(optim.Adam(learning_rate=1e-3)), mx.bfloat16, 30, True)
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_refused():
    with pytest.raises(ValueError, match="those of Adam or AdamW, not SGD"):
        in_8_bits(optim.SGD(0.1))
    optimizer = optim.Adam(0.1)
    optimizer.init({"weight": mx.zeros(3)})
    with pytest.raises(ValueError, match="Adam has moments already"):
        in_8_bits(optimizer)
