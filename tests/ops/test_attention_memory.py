"""Attention of many queries over packed keys and of wide heads, in bounded memory."""

from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_same_sums, random

from mlx_qlayers import attention, use_backend
from mlx_qlayers.ops import attention as ops
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.spec import Spec

SEEN = mx.ones((1, 1, 1, 8), mx.bool_)


@pytest.mark.parametrize(
    ("device", "keys"),
    [("metal", 16), ("cuda", 16), ("cuda", (1 << 17) + 16)],  # of the last, head by head
)
def test_many_queries_of_packed_keys_are_of_dense_ones_on_a_gpu(device, keys, on, monkeypatch):
    """No product with packed keys, which has all scores for its result."""
    on(device)
    monkeypatch.delattr(mx, "quantized_matmul")
    q, k = (mx.random.normal((1, h, n, 64)) for h, n in ((4, 9), (2, keys)))
    packed = mx.quantize(k, 64, 8)
    dense, options = mx.dequantize(*packed, 64, 8), {"scale": 0.125, "mask": "causal"}
    expected = attention(q, dense, dense, **options)
    assert mx.array_equal(attention(q, packed, packed, **options), expected)


@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize(
    "keys, heads, bits, kernel",
    [
        *(
            (1 << 19, 1, bits, kernel)
            for bits, kernel in ((8, True), (4, True), (2, True), (6, False))
        ),
        (1 << 18, 2, 8, False),
        (1 << 10, 1, 8, False),
    ],
)
def test_packed_keys_of_a_head_that_would_be_much_memory_stay_packed(
    device, keys, heads, bits, kernel, on, monkeypatch
):
    on(device)
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **_: None)
    shapes = ((2 * bits, mx.uint32), (1, mx.float32), (1, mx.float32))
    packed = [Spec((1, heads, keys, n), dtype) for n, dtype in shapes] * 2
    arrays = Spec((1, 4, 9, 64), mx.float32), *packed, None, None
    plan = ops._plan(arrays, (3, 3), 0.1, "causal", None, None)
    assert kernel == (plan.choice is not None and plan.choice.path == device)
    assert not kernel or ("packed keys" in plan.choice.reason and plan.gradients)


@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "causal"}, {"window": 5}, {"mask": SEEN[..., :1]}, {"softcap": 2.0}],
    ids=str,
)
def test_wide_heads_do_not_keep_all_scores(options, device, on, monkeypatch):
    rng = np.random.default_rng(2)
    q, k, v = (random(rng, (1, h, n, d)) for h, n, d in ((4, 19, 576), (1, 33, 576), (1, 33, 512)))
    options, joined = {"scale": 0.05, **options}, Mock(wraps=mx.concatenate)
    if isinstance(options.get("mask"), mx.array):
        options["mask"] = mx.arange(33) % 4 < mx.arange(1, 20)[:, None]
    with use_backend("reference"):
        expected = attention(q, k, v, **options)
    on(device)
    advance_epoch()
    monkeypatch.setattr(ops, "MOST_SCORES", 4 * 33 * 6)
    monkeypatch.setattr(mx, "concatenate", joined)
    assert_same_sums(attention(q, k, v, **options), expected)
    assert joined.called  # by parts of the queries


@pytest.mark.parametrize(
    "width, dtype, kernel",
    [(576, mx.bfloat16, True), (576, mx.float32, False), (584, mx.bfloat16, False)],
)
def test_wide_heads_are_for_the_forward_kernel_on_cuda(width, dtype, kernel, on, monkeypatch):
    """Work that MLX is given before the GPU is done stays in memory, one part after another."""
    on("cuda")
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **_: None)
    shapes = (4, 16384, width), (1, 16384, width), (1, 16384, 512)
    arrays = [Spec((1, *shape), dtype) for shape in shapes]
    plan = ops._plan([*arrays, None, None], (0, 0), 0.1, "causal", None, None)
    assert (plan.choice.path, len(plan.gradients)) == (("cuda", 1) if kernel else ("reference", 0))


@pytest.mark.cuda
@pytest.mark.parametrize("widths", [(192, 192), (256, 256), (512, 512), (576, 512)], ids=str)
def test_memory_of_wide_heads_grows_with_the_queries(widths):
    """Twice the queries and keys take twice the memory, and not that of scores.

    From 2^30 scores on: so many stock operators may have in turn.
    """
    taken = []
    for length in (8192, 16384):
        q, v = (mx.zeros((1, 16, length, d), mx.bfloat16) for d in widths)
        for _ in range(2):  # what is kept for all calls is there after the first
            mx.eval(q, v)
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            mx.eval(attention(q, q[:, :1], v[:, :1], scale=0.05, mask="causal"))
        taken.append(mx.get_peak_memory() - before)
    assert taken[1] < min(2.2 * taken[0], 16 * 8192 * 8192)


def test_gradients_need_what_was_given_the_result_and_one_number_for_a_query():
    """Between the two passes, in arrays of the queries' size; all scores are 16 of them."""
    q, k, v = (random(np.random.default_rng(i), (1, 2, 1024, 64)) for i in range(3))
    held = []

    def loss(*given):
        y = attention(*given, scale=0.125, mask="causal")
        mx.eval(y)
        held.append(mx.get_active_memory() - before)
        return y.sum()

    with use_backend("host"):
        mx.eval(q, k, v)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(loss, argnums=(0, 1, 2))(q, k, v))
    assert held[0] < 1.1 * q.nbytes and mx.get_peak_memory() - before < 5 * q.nbytes
