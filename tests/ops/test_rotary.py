"""rotary_embedding against float64: both pairings, frequencies, offsets, and the gradient."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.rotary import rotary_embedding
from tests.examples.elements import pairs_rotated
from tests.numerics import assert_accurate, random, to64

FREQS = mx.array(np.random.default_rng(9).uniform(1, 100, 12).astype(np.float32))


@pytest.mark.parametrize("base", [500_000.0, None])
def test_angles_are_as_exact_at_any_position(base, backend):
    """As if cosine and sine were rounded once, where the last bit of an angle is worth 2^-7."""
    x = random(np.random.default_rng(4), (1, 1, 3, 24))
    freqs = FREQS if base is None else None
    found = rotary_embedding(x, x, mx.array(100_003), dims=24, base=base, freqs=freqs, scale=0.7)
    if backend == "reference":
        return
    rates = 1 / to64(FREQS) if base is None else base ** (-np.arange(0, 24, 2) / 24)
    angle = 100_003 * 0.7 * rates
    x = to64(x).swapaxes(1, 2)
    truth = pairs_rotated(x, np.cos(angle), np.sin(angle), 24)
    c, s = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    assert_accurate(found[0], truth, pairs_rotated(x.astype(np.float32), c, s, 24))


@pytest.mark.parametrize("offset", [5, [3, 8]], ids=str)
def test_positions_and_frequencies_have_no_gradient(offset, backend):
    """MLX's own operator refuses to be differentiated by its frequencies on a GPU."""
    rng = np.random.default_rng(3)
    q, k = random(rng, (2, 3, 4, 24)), random(rng, (2, 3, 2, 24))

    def loss(q, freqs):
        found = rotary_embedding(q, k, mx.array(offset), dims=24, base=None, freqs=freqs)
        return sum((y * y[..., ::-1]).sum() for y in found)

    d_q, d_freqs = mx.grad(loss, (0, 1))(q, FREQS)
    assert mx.abs(d_q).max() > 0 and d_freqs.shape == FREQS.shape and not d_freqs.any()


def test_nothing_to_turn_is_explained():
    with use_backend("auto"):
        explain(reset=True)
        q, k = rotary_embedding(mx.zeros((1, 0, 2, 8)), mx.zeros((1, 0, 1, 8)), mx.array(0), dims=8)
        assert q.shape == (1, 2, 0, 8) and k.shape == (1, 1, 0, 8)
        assert explain()[0].reason == "there is nothing to rotate"
