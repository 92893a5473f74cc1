"""GPTQ against its definition in float64, and codes packed as MLX packs them."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq, nearest, pack
from mlx_qlayers.runtime.tracing import trace
from tests.numerics import to64


def problem(n, k, batch=(), seed=0):
    """Weights, and a Hessian of inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, 3 * k, k)) @ (rng.normal(size=(k, k)) * np.logspace(0, -1, k))
    w, h = rng.normal(size=(*batch, n, k)), x.swapaxes(-1, -2) @ x
    return mx.array(w.astype(np.float32)), mx.array(h.astype(np.float32))


def loss(w, h, found, fmt):
    """Of the products with the inputs, in all."""
    wrong = to64(mx.dequantize(*found, *fmt)) - to64(w)
    return float((wrong @ to64(h) * wrong).sum())


def codes_of(packed, bits):
    words = np.unpackbits(np.array(packed).view(np.uint8), axis=-1, bitorder="little")
    return (words.reshape(*packed.shape[:-1], -1, bits) << np.arange(bits)).sum(axis=-1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_pack(bits):
    packed, _, _ = mx.quantize(mx.random.normal((3, 128), key=mx.random.key(0)), 64, bits)
    codes = mx.array(codes_of(packed, bits).astype(np.uint8))
    assert mx.array_equal(pack(codes, bits), packed)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("fmt", [Format(32, 3), Format(64, 4)], ids=str)
def test_every_code_is_the_nearest_to_what_the_columns_before_have_left(backend, fmt, act_order):
    """OBQ in float64, columns by columns of the whole inverse, given the scales."""
    w, h = problem(7, 192)
    w = w.astype(mx.bfloat16)
    with trace() as launches:
        found = gptq(w, h, fmt, act_order=act_order)
        mx.eval(found)
    kernel = "gptq_fixed_block" if act_order else "gptq_block"
    blocks = [run.kernel for run in launches].count(kernel)
    assert blocks == (0 if backend == "reference" else 2)
    codes = codes_of(found[0], fmt.bits)
    scales, biases = (np.repeat(to64(x), fmt.group_size, axis=1) for x in found[1:])
    left, hessian = to64(w), to64(h)
    hessian = hessian + 0.01 * np.trace(hessian) / 192 * np.eye(192)
    order = np.argsort(-np.diag(to64(h)), kind="stable") if act_order else np.arange(192)
    inverse, near = np.linalg.inv(hessian), 0
    for k in order:
        place = (left[:, k] - biases[:, k]) / scales[:, k]
        off = np.abs(codes[:, k] - np.clip(place, 0, 2**fmt.bits - 1))
        assert (off <= 0.501).all(), k
        near += (off > 0.499).sum()
        error = left[:, k] - (codes[:, k] * scales[:, k] + biases[:, k])
        left = left - np.outer(error, inverse[k]) / inverse[k, k]
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    assert near < 0.02 * codes.size


def test_less_is_lost_than_by_rounding(backend):
    w, h = problem(24, 256, (2,))
    for fmt in (Format(32, 3), Format(64, 4)):
        found = gptq(w, h, fmt)
        assert [x.shape for x in found] == [x.shape for x in mx.quantize(w, *fmt)]
        assert loss(w, h, found, fmt) < 0.5 * loss(w, h, mx.quantize(w, *fmt), fmt)


def test_ranges_that_leave_less_than_all_that_weights_span():
    w, fmt = problem(24, 256, (2,))[0], Format(64, 3)
    searched, plain = nearest(w, fmt), mx.quantize(w, *fmt)
    assert [x.shape for x in searched] == [x.shape for x in plain]
    identity = mx.broadcast_to(mx.eye(256), (2, 256, 256))
    assert loss(w, identity, searched, fmt) < 0.95 * loss(w, identity, plain, fmt)


def test_inputs_that_never_came():
    w, h = problem(5, 64)
    h[:, 7] = h[7] = 0
    found = gptq(w, h, Format(32, 4))
    assert np.isfinite(to64(mx.dequantize(*found, 32, 4))).all()
    zero = gptq(w, mx.zeros((64, 64)), Format(32, 4))
    assert np.isfinite(to64(mx.dequantize(*zero, 32, 4))).all()


def test_codes_that_fill_no_words():
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(mx.ones((5, 31)), 4)
