"""Where attention is the stock operator alone, and what that is given."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from attention_cases import expect, make
from numerics import assert_accurate, random, to64

from mlx_qlayers import attention, explain, use_backend
from mlx_qlayers.metal.attention.forward import Scores
from mlx_qlayers.ops import attention_stock
from mlx_qlayers.ops.attention_stock import alone

# B, H, Hkv, L, S, D, Dv
SHAPE, ONE_QUERY = (2, 4, 2, 16, 24, 32, 32), (2, 4, 2, 1, 24, 32, 32)
CALLS = [
    (SHAPE, "none", {}),
    (SHAPE, "causal", {}),
    (SHAPE, "causal", {"window": 3}),
    (SHAPE, "none", {"window": 3}),
    (SHAPE, "causal", {"window": 30}),
    (SHAPE, "boolean", {}),
    (SHAPE, "causal", {"sinks": True}),
    (SHAPE, "causal", {"sinks": True, "window": 3}),
    (SHAPE, "padded", {"sinks": True}),
    (ONE_QUERY, "causal", {}),
    (ONE_QUERY, "none", {"window": 24}),
    ((2, 4, 2, 24, 16, 32, 32), "causal", {"window": 3}),
]


@pytest.fixture(params=["cuda", "metal"])
def gpu(request, monkeypatch):
    """A GPU of that kind, as far as this file asks for one; what is computed is on the CPU."""
    monkeypatch.setattr(attention_stock, "backend", lambda: request.param)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    attention_stock._mask.cache_clear()
    yield request.param
    attention_stock._mask.cache_clear()


def given(shape=SHAPE, kind="causal", extra=None, dtype=mx.float32):
    """Arguments of ``alone`` but for the reason, and of ``attention``."""
    _, (q, k, v), options = make(0, shape, dtype, kind, extra)
    options.setdefault("sinks", None)
    mask = options["mask"]
    scores = Scores(options["scale"], isinstance(mask, str), options.get("window"))
    return (q, k, v, mask, options["sinks"], scores), options


@pytest.mark.parametrize("shape, kind, extra", CALLS)
def test_is_what_the_reference_gives(shape, kind, extra, gpu):
    arguments, options = given(shape, kind, extra)
    q, k, v, mask, sinks, _ = arguments
    with use_backend("ops"):
        expected, wanted = mx.vjp(lambda *a: [attention(*a, **options)], [q, k, v], [q])
    run = alone(*arguments, "a reason")
    assert run is not None
    array = None if isinstance(mask, str) else mask
    explain(reset=True)
    # What is kept is made while something is traced, and used afterwards.
    found, gradients = mx.vjp(lambda *a: [run(*a, array, sinks)], [q, k, v], [q])
    compiled = mx.compile(lambda *a: run(*a, array, sinks))
    for out in (*found, compiled(q, k, v), run(q, k, v, array, sinks)):
        assert mx.allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients, wanted, strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert [(d.op, d.path, d.reason, d.calls) for d in explain()] == [
        ("attention", "ops", "a reason", 3)
    ]


def test_what_needs_more_than_the_operator_is_left(gpu):
    (q, k, v, mask, sinks, scores), _ = given()

    def left(*, why="a reason", q=q, k=k, v=v, mask=mask, sinks=sinks, scores=scores):
        return alone(q, k, v, mask, sinks, scores, why) is None

    assert not left()
    assert left(why=None)
    assert left(scores=Scores(1.0, True, softcap=2.0))
    assert left(q=q.astype(mx.float16)) and left(sinks=mx.zeros(4, mx.float16))
    assert left(k=tuple(mx.quantize(k, 32, 8)), v=tuple(mx.quantize(v, 32, 8)))
    assert left(mask=mx.zeros((16, 24))), "minus infinity must become a number"
    seen = mx.ones((16, 24), mx.bool_)
    assert not left(mask=seen) and left(mask=seen, scores=Scores(1.0, window=3))
    assert left(q=q[:, :, :1], scores=Scores(1.0, True, 3)), "most keys need not be read"
    long = mx.zeros((1, 1, 2048, 32))
    assert left(q=long, k=long, v=long, scores=Scores(1.0, True, 3)), "too much to keep"
    with use_backend("ops"):
        assert left()


def test_on_a_cpu_it_is_left():
    (*arguments,), _ = given()
    with mx.stream(mx.cpu):
        assert alone(*arguments, "a reason") is None


def test_masks_are_shared_and_bounded(gpu):
    arguments, _ = given(extra={"window": 3})
    for heads in (4, 2, 2):
        q, *rest = arguments
        run = alone(q[:, :heads], *rest, "a reason")
        run(q[:, :heads], *rest[:2], None, None)
    info = attention_stock._mask.cache_info()
    assert (info.misses, info.hits) == (1, 2)
    assert info.maxsize * attention_stock._BYTES <= 32 << 20
    mask = attention_stock._mask(16, 24, 3, mx.float32 if gpu == "cuda" else mx.bool_)
    assert attention_stock._mask.cache_info().misses == 1 and mask.shape == (16, 24)


@pytest.mark.cuda
@pytest.mark.parametrize("length", [200, 256])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_window_is_as_accurate_as_with_a_mask_of_booleans(dtype, length):
    """Forward and with gradients, of batches too: cuDNN is given one mask for all heads."""
    shape, extra = (2, 8, 2, length, length, 128, 128), {"window": 64}
    rng, arrays, options = make(0, shape, dtype, "causal", extra)
    cotangent = random(rng, arrays[0].shape, dtype)
    truth = expect(arrays, options, dtype, cotangent=to64(cotangent))
    mask = attention_stock.visible(length, length, 64)

    def stock(*a):
        return [mx.fast.scaled_dot_product_attention(*a, scale=options["scale"], mask=mask)]

    rough, rough_gradients = mx.vjp(stock, arrays, [cotangent])
    explain(reset=True)
    found, gradients = mx.vjp(lambda *a: [attention(*a, **options)], arrays, [cotangent])
    assert [d.path for d in explain() if d.op == "attention"] == ["ops"]
    for name, actual, stocks in zip(
        ("out", "q", "k", "v"), (*found, *gradients), (*rough, *rough_gradients), strict=True
    ):
        exact, _, terms = truth[name]
        assert_accurate(actual, exact, stocks, terms=terms, what=name)
