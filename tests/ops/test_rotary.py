"""rotary_embedding against float64: both pairings, frequencies, offsets, and the gradient."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.gpus import GPUS
from tests.numerics import assert_accurate, random, round_to, to64


@pytest.fixture(params=["reference", "host", "checked", *GPUS], autouse=True)
def path(request):
    """The reference, the fast and the checked build of the host backend, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield name


def turned(x, offset, dims, traditional=False, base=10000.0, scale=1.0, freqs=None, dtype=None):
    """(B, L, H, D) to (B, H, L, D), with every number in ``dtype``."""
    x = to64(x).astype(dtype).swapaxes(1, 2)
    start = np.broadcast_to(np.array(offset), x.shape[:1])
    positions = (start[:, None] + np.arange(x.shape[2])).astype(dtype) * dtype(scale)
    if freqs is None:
        rates = np.exp2(-np.log2(dtype(base)) * np.arange(0, dims, 2).astype(dtype) / dtype(dims))
    else:
        rates = dtype(1) / to64(freqs).astype(dtype)
    angle = (positions[..., None] * rates.astype(dtype))[:, None]
    return pairs_turned(x, np.cos(angle), np.sin(angle), dims, traditional)


def pairs_turned(x, c, s, dims, traditional=False):
    """The leading ``dims`` elements, turned by angles with these cosines and sines."""
    y, half = x.copy(), dims // 2
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(half), slice(half, dims))
    )
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


FREQS = mx.array(np.random.default_rng(9).uniform(1, 100, 12).astype(np.float32))
CASES = [
    ((1, 1, 4, 2, 32), 7, {"dims": 32}),
    ((1, 1, 7, 1, 40), 100_000, {"dims": 40, "base": 500_000.0}),
    ((3, 1, 3, 3, 32), [5, 0, 4000], {"dims": 32, "traditional": True}),
    ((2, 5, 6, 2, 41), [1, 9], {"dims": 24, "scale": 0.25}),
    ((1, 3, 5, 1, 30), 11, {"dims": 24, "base": None, "freqs": FREQS}),
    ((9, 2, 2, 1, 8), list(range(9)), {"dims": 8}),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "offset", "options"), CASES, ids=str)
def test_against_float64(shape, offset, options, dtype, path):
    batch, length, heads, kv_heads, width = shape
    rng = np.random.default_rng(width)
    q, k = (random(rng, (batch, length, n, width), dtype) for n in (heads, kv_heads))
    with trace() as launches:
        found = rotary_embedding(q, k, mx.array(offset), **options)
    assert len(launches) == (path != "reference") and {run.backend for run in launches} <= {path}
    for x, y in zip((q, k), found, strict=True):
        truth = turned(x, offset, **options, dtype=np.float64)
        rounded = round_to(turned(x, offset, **options, dtype=np.float32), dtype)
        assert y.dtype == dtype
        assert_accurate(y, truth, rounded, what=path)


@pytest.mark.parametrize("base", [500_000.0, None])
def test_angles_are_as_exact_at_any_position(base, path):
    """As if cosine and sine were rounded once, where the last bit of an angle is worth 2^-7."""
    x = random(np.random.default_rng(4), (1, 1, 3, 24))
    freqs = FREQS if base is None else None
    found = rotary_embedding(x, x, mx.array(100_003), dims=24, base=base, freqs=freqs, scale=0.7)
    if path == "reference":
        return
    rates = 1 / to64(FREQS) if base is None else base ** (-np.arange(0, 24, 2) / 24)
    angle = 100_003 * 0.7 * rates
    x = to64(x).swapaxes(1, 2)
    truth = pairs_turned(x, np.cos(angle), np.sin(angle), 24)
    c, s = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    assert_accurate(found[0], truth, pairs_turned(x.astype(np.float32), c, s, 24))


@pytest.mark.parametrize("offset", [5, [3, 8]], ids=str)
def test_positions_and_frequencies_have_no_gradient(offset):
    """MLX's own operator refuses to be differentiated by its frequencies on a GPU."""
    rng = np.random.default_rng(3)
    q, k = random(rng, (2, 3, 4, 24)), random(rng, (2, 3, 2, 24))

    def loss(q, freqs):
        found = rotary_embedding(q, k, mx.array(offset), dims=24, base=None, freqs=freqs)
        return sum((y * y[..., ::-1]).sum() for y in found)

    d_q, d_freqs = mx.grad(loss, (0, 1))(q, FREQS)
    assert mx.abs(d_q).max() > 0 and d_freqs.shape == FREQS.shape and not d_freqs.any()


def test_nothing_to_turn_is_explained(path):
    if path != "reference":
        return
    with use_backend("auto"):
        explain(reset=True)
        q, k = rotary_embedding(mx.zeros((1, 0, 2, 8)), mx.zeros((1, 0, 1, 8)), mx.array(0), dims=8)
        assert q.shape == (1, 2, 0, 8) and k.shape == (1, 1, 0, 8)
        assert explain()[0].reason == "there is nothing to turn"


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (2, 3, 4, 0)], ids=str)
def test_nothing_to_turn(shape):
    q, k = mx.ones(shape), mx.ones((*shape[:2], 2, shape[3]))
    with use_backend("auto"):
        found = rotary_embedding(q, k, mx.arange(shape[0]), dims=shape[3])
    assert [y.shape for y in found] == [x.swapaxes(1, 2).shape for x in (q, k)]
    if shape[2] == 0:
        with use_backend("reference"):
            turned_alone = rotary_embedding(k, k, mx.arange(2), dims=8)[1]
        assert mx.array_equal(found[1], turned_alone)
