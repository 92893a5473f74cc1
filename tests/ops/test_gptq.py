"""GPTQ beside rounding to the nearest, its launches, and codes packed as MLX packs them."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq, nearest, pack
from tests.examples import RANDOM
from tests.examples.rounding import inputs_seen
from tests.numerics import to64
from tests.packed import codes


def loss(w, h, found, fmt):
    """Of the products with the inputs, in all."""
    wrong = to64(mx.dequantize(*found, *fmt)) - to64(w)
    return float((wrong @ to64(h) * wrong).sum())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_pack(bits):
    packed, _, _ = mx.quantize(mx.random.normal((3, 128), key=mx.random.key(0)), 64, bits)
    found = mx.array(codes(packed, bits).astype(np.uint8))
    assert mx.array_equal(pack(found, bits), packed)


@pytest.mark.parametrize("act_order", [False, True])
def test_a_launch_for_each_block(act_order):
    call = RANDOM["gptq"].call("host", groups=6, n=1, act_order=act_order)
    blocks = ["gptq_fixed_block" if act_order else "gptq_block"] * 2
    assert [name for name in call.check("host")[1] if name.endswith("block")][-2:] == blocks


def test_less_is_lost_than_by_rounding(backend):
    w, h = inputs_seen(24, 256, (2,))
    for fmt in (Format(32, 3), Format(64, 4)):
        found = gptq(w, h, fmt)
        assert [x.shape for x in found] == [x.shape for x in mx.quantize(w, *fmt)]
        assert loss(w, h, found, fmt) < 0.5 * loss(w, h, mx.quantize(w, *fmt), fmt)


def test_ranges_that_leave_less_than_all_that_weights_span():
    w, fmt = inputs_seen(24, 256, (2,))[0], Format(64, 3)
    searched, plain = nearest(w, fmt), mx.quantize(w, *fmt)
    assert [x.shape for x in searched] == [x.shape for x in plain]
    identity = mx.broadcast_to(mx.eye(256), (2, 256, 256))
    assert loss(w, identity, searched, fmt) < 0.95 * loss(w, identity, plain, fmt)


def test_inputs_that_never_came():
    w, h = inputs_seen(5, 64)
    h[:, 7] = h[7] = 0
    found = gptq(w, h, Format(32, 4))
    assert np.isfinite(to64(mx.dequantize(*found, 32, 4))).all()
    zero = gptq(w, mx.zeros((64, 64)), Format(32, 4))
    assert np.isfinite(to64(mx.dequantize(*zero, 32, 4))).all()


def test_codes_that_fill_no_words():
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(mx.ones((5, 31)), 4)
