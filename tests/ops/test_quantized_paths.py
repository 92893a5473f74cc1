"""Which kernel ``auto`` takes where, without the devices."""

from __future__ import annotations

import time

import mlx.core as mx
import pytest

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.quantized_paths import FEW_ROWS, Way, way
from mlx_qlayers.runtime import backend

AFFINE = Format(64, 4)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(backend._missing, "cuda", lambda: None)


def chosen(rows, n, k, dtype=mx.bfloat16, **options):
    x, w = mx.zeros((rows, k), dtype), mx.zeros((n, k // 8), mx.uint32)
    return way("test", x, w, mx.zeros((n, k // 64), dtype), True, AFFINE, **options)


def test_few_rows_in_a_trace(on_cuda):
    for rows in (1, 8, 16):
        assert chosen(rows, 512, 512) == Way("cuda", FEW_ROWS)
    assert chosen(1, 37888, 3584, mx.float32) == Way("ops")


def test_few_rows_called_by_themselves(on_cuda):
    """A launch from Python must be worth its call; stock products of two to seven rows are slow."""
    for rows, n, path in ((1, 512, "ops"), (1, 37888, "cuda"), (8, 3584, "ops"), (4, 3584, "cuda")):
        assert chosen(rows, n, 3584, alone=True).path == path
    reasons = [d.reason for d in backend.explain(reset=True) if d.op == "test"]
    assert any("takes less time than Python" in reason for reason in reasons)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_64_rows_on_a_cpu_are_no_slower_than_the_reference(dtype):
    packed = mx.quantize(mx.random.normal((1024, 1024)).astype(dtype))
    x = mx.random.normal((64, 1024)).astype(dtype)
    seconds = {}
    for path in ("host", "ops"):
        with use_backend(path):
            seconds[path] = min(time_of(lambda: quantized_matmul(x, *packed)) for _ in range(4))
    assert seconds["host"] <= seconds["ops"]


def time_of(product):
    start = time.perf_counter()
    mx.eval(product())
    return time.perf_counter() - start
