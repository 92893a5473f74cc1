"""Calls by tensor operations on an M5, as if it had been calibrated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import apple_gpu
import mlx.core as mx

from mlx_qlayers import attention, explain, quantized_matmul, use_backend
from mlx_qlayers.commands.doctor_checks import checks
from mlx_qlayers.conversion.verify import in_float32
from mlx_qlayers.dispatch.measurements import entry_of
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.store import save
from mlx_qlayers.metal.attention.records import AttentionForwardRecord
from mlx_qlayers.metal.gather_qmm.records import GatherRecord
from mlx_qlayers.metal.quantized_matmul.records import QmmRecord
from mlx_qlayers.metal.record import Record
from mlx_qlayers.reference.rounding import rounding_error

_ROWS, _K, _N, _WIDTH = 64, 128, 64, 64


def tensors() -> Iterator[tuple[str, str]]:
    """Attention with its gradients, and a product: why they went where they did, and results."""
    attending = (1, 2, 2, _ROWS, _ROWS, _WIDTH, _WIDTH), mx.float16, True
    of_attention = AttentionForwardRecord(*attending)
    of_product = QmmRecord(_ROWS, _N, _K, mx.float16, Format(64, 4), True)
    first, other = os.environ[apple_gpu.FASTEST].split()
    _calibrated(of_attention, first, "tensor", "tensor_memory")
    _calibrated(of_product, other, "tensor", "codes")
    normal = partial(mx.random.normal, dtype=mx.float16)
    q, k, v = (normal((1, 2, _ROWS, _WIDTH), key=mx.random.key(i)) for i in range(3))
    x, w = (normal((_ROWS, _K), key=mx.random.key(i)) for i in (4, 5))
    yield _held("attention", _attended, q, k, v)
    yield _held("quantized_matmul", _product, x, *mx.quantize(w, 64, 4))


def other_tensors() -> Iterator[tuple[str, str]]:
    """Products with what follows them, with experts and of 8-bit integers; gated delta; and QR,
    whose first kernel is not reached where another call's has failed that comes behind it."""
    _calibrated(QmmRecord(40, 72, 512, mx.bfloat16, Format(64, 4), True), "tensor", "codes")
    _calibrated(GatherRecord((400, 4, 72, 512), mx.float16, ("affine", 64, 4)), "tensor")
    for family in ("fused_products", "gather_qmm", "int8_matmul", "linalg", "gated_delta"):
        for check in checks(family):
            if any(word in check.name for word in ("40 rows", "many", "70 rows", "qr", "columns")):
                yield check.name, _held("", check.run, *check.arrays)[1]


def _calibrated(record: Record, first: str, *paths: str) -> None:
    seconds = {**dict.fromkeys(paths, 2e-5), first: 1e-5, "stock": 4e-5}
    entry = entry_of(record, record.heuristic("metal"), first, seconds)
    save("Apple_M5", {record.key: entry})


def _attended(*arrays: mx.array) -> list[mx.array]:
    run = partial(attention, scale=0.125, mask="causal")
    given = list(arrays)
    outputs, gradients = mx.vjp(lambda *a: [run(*a)], given, [mx.ones_like(arrays[0])])
    return [run(*arrays), *outputs, *gradients]


def _product(*arrays: mx.array) -> list[mx.array]:
    return [quantized_matmul(*arrays)]


def _held(name: str, run: Any, *arrays: mx.array) -> tuple[str, str]:
    explain(reset=True)
    found = run(*arrays)
    reasons = {each.reason: each.path for each in explain() if each.op == name}
    with use_backend("reference"):
        expected = run(*map(in_float32, arrays))
    errors = [rounding_error(a, b, _K, 8) for a, b in zip(found, expected, strict=True)]
    wrong = next((f"{error} > {most}" for error, most in errors if not error <= most), "")
    return f"{name}: {reasons}", wrong
