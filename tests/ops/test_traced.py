"""Calls that are traced once do what the same calls do untraced."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from numerics import random

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.ops import quantized_matmul as products
from mlx_qlayers.ops import traced as traces
from mlx_qlayers.ops.differentiable import gradients_are_left_out
from mlx_qlayers.ops.traced import Traced


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Let products be traced as on a GPU, on the path that can be traced here."""

    def place() -> tuple[str, int, str]:
        return "ops", threading.get_ident(), repr(mx.default_stream(mx.default_device()))

    monkeypatch.setattr(products, "place", place)
    with use_backend("ops"):
        yield


def problem(rows: int = 3):
    rng = np.random.default_rng(rows)
    return random(rng, (rows, 128)), mx.quantize(random(rng, (40, 128)))


def test_traced_once_for_every_shape():
    seen = []

    def double(x, w):
        seen.append(gradients_are_left_out())
        return [2 * x, w]

    run = Traced(double)
    for size in (3, 4, 3, 4):
        assert run(mx.ones(size), None)[0].tolist() == [2.0] * size
    assert seen == [True, True]


def test_traced_no_more_than_so_often(monkeypatch):
    monkeypatch.setattr(traces, "MOST_TRACES", 2)
    seen = []
    run = Traced(lambda x, w: seen.append(x.size) or 2 * x)
    for _ in range(2):
        for size in (3, 4, 5):
            assert run(mx.ones(size), None).tolist() == [2.0] * size
    assert seen == [3, 4, 5, 5]


def test_the_product_and_its_gradients(on_a_gpu):
    x, packed = problem()

    def loss(function):
        return lambda x, scales: mx.sin(function(x, packed[0], scales, packed[2])).sum()

    for _ in range(2):  # traced, then as traced before
        y, stock = quantized_matmul(x, *packed), mx.quantized_matmul(x, *packed)
        assert mx.array_equal(y, stock)
        ours, theirs = (
            mx.grad(loss(f), (0, 1))(x, packed[1]) for f in (quantized_matmul, mx.quantized_matmul)
        )
        assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    compiled = mx.compile(mx.grad(loss(quantized_matmul)))
    assert mx.allclose(compiled(x, packed[1]), ours[0], atol=1e-5)


def test_every_call_is_counted(on_a_gpu):
    x, packed = problem()
    quantized_matmul(x, *packed)
    explain(reset=True)
    for _ in range(3):
        quantized_matmul(x, *packed)
    mx.grad(lambda x: quantized_matmul(x, *packed).sum())(x)
    calls = {d.op: d.calls for d in explain()}
    assert calls == {"quantized_matmul": 4}


def test_wrong_arguments_are_named(on_a_gpu):
    x, (w, scales, biases) = problem()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x of shape \(3, 100\) must have 128 columns"):
            quantized_matmul(x[:, :100], w, scales, biases)
        with pytest.raises(ValueError, match="biases is missing"):
            quantized_matmul(x, w, scales)
        for bits in ([4], 4.0):
            with pytest.raises(ValueError, match="bits must be"):
                quantized_matmul(x, w, scales, biases, bits=bits)
    assert mx.array_equal(
        quantized_matmul(x, w, scales, biases, bits=4), quantized_matmul(x, w, scales, biases)
    )


def test_other_dtypes_of_the_same_shapes(on_a_gpu):
    x, (w, scales, biases) = problem()
    quantized_matmul(x, w, scales, biases)
    for dtype in (mx.float16, mx.bfloat16):
        y = quantized_matmul(x.astype(dtype), w, scales.astype(dtype), biases.astype(dtype))
        mixed = quantized_matmul(x.astype(dtype), w, scales, biases)
        assert (y.dtype, mixed.dtype) == (dtype, mx.float32)


def test_threads_have_traces_of_their_own(on_a_gpu):
    x, packed = problem(5)
    mx.eval(x, packed)  # streams belong to threads, and so does what was not evaluated
    found = []

    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(20):
                y = quantized_matmul(x, *packed)
                mx.eval(y)
            found.append(y)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = mx.quantized_matmul(x, *packed)
    assert len(found) == 4 and all(mx.array_equal(y, expected) for y in found)
