"""Calls by tensor operations on an M5, as if it had been calibrated."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import apple_gpu
import mlx.core as mx

from mlx_qlayers import attention, explain, quantized_matmul, use_backend
from mlx_qlayers.commands.examples import examples
from mlx_qlayers.dispatch.measurements import entry_of
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.store import save
from mlx_qlayers.metal.attention.records import AttentionForwardRecord
from mlx_qlayers.metal.gather_qmm.records import GatherRecord
from mlx_qlayers.metal.quantized_matmul.records import QmmRecord
from mlx_qlayers.metal.record import Record, in_float32
from mlx_qlayers.reference.rounding import rounding_error

_ROWS, _K, _N, _WIDTH = 64, 128, 64, 64
# Of attention: B, H, Hkv, L, S, D, Dv.
_SHAPE = 1, 2, 2, _ROWS, _ROWS, _WIDTH, _WIDTH


def tensors() -> Iterator[tuple[str, str]]:
    """Attention with its gradients, and a product: why they went where they did, and results."""
    of_attention = AttentionForwardRecord(_SHAPE, mx.float16, True)
    of_product = QmmRecord(_ROWS, _N, _K, mx.float16, Format(64, 4), True)
    first, other = os.environ[apple_gpu.FASTEST].split()
    _calibrated(of_attention, first, "tensor", "tensor_memory")
    _calibrated(of_product, other, "tensor", "codes")
    x, w = (_normal((_ROWS, _K), i) for i in (4, 5))
    yield _held("attention", _attended, *_heads())
    yield _held("quantized_matmul", _product, x, *mx.quantize(w, 64, 4))


def other_tensors() -> Iterator[tuple[str, str]]:
    """Products with what follows them, with experts and of 8-bit integers; attention with a mask's
    gradient; gated delta; and QR, whose first kernel is not reached where another call's has failed
    that comes behind it."""
    _calibrated(QmmRecord(40, 72, 512, mx.bfloat16, Format(64, 4), True), "tensor", "codes")
    _calibrated(GatherRecord((400, 4, 72, 512), mx.float16, ("affine", 64, 4)), "tensor")
    for family in ("fused_products", "gather_qmm", "int8_matmul", "linalg"):
        for check in examples(family):
            if any(word in check.name for word in ("40 rows", "many", "70 rows", "qr")):
                yield check.name, _held("", check.run, *check.arrays)[1]
    of_attention = AttentionForwardRecord(_SHAPE, mx.float16, False)
    _calibrated(of_attention, "tensor", "tensor_memory")
    yield (
        "attention with a mask",
        _held("", _attended, *_heads(), _normal((1, 2, _ROWS, _ROWS), 3))[1],
    )
    for check in examples("gated_delta"):
        last = mx.arange(5) < mx.array([[5], [3]])
        masked = check._replace(arguments=check.arguments | {"mask": last})
        for name, given in ((check.name, check), (f"{check.name}, masked", masked)):
            yield name, _held("", given.run, *given.arrays, stock=_gated_delta)[1]


def _calibrated(record: Record, first: str, *paths: str) -> None:
    seconds = {**dict.fromkeys(paths, 2e-5), first: 1e-5, "stock": 4e-5}
    entry = entry_of(record, record.heuristic("metal"), first, seconds)
    save("Apple_M5", {record.key: entry})


def _normal(shape: tuple[int, ...], key: int) -> mx.array:
    return mx.random.normal(shape, mx.float16, key=mx.random.key(key))


def _heads() -> list[mx.array]:
    return [_normal((1, 2, _ROWS, _WIDTH), i) for i in range(3)]


def _attended(*arrays: mx.array) -> list[mx.array]:
    def run(q: mx.array, k: mx.array, v: mx.array, mask: Any = "causal") -> list[mx.array]:
        return [attention(q, k, v, scale=0.125, mask=mask)]

    outputs, gradients = mx.vjp(run, list(arrays), [mx.ones_like(arrays[0])])
    return [*run(*arrays), *outputs, *gradients]


def _gated_delta(*arrays: mx.array) -> list[mx.array]:
    """Stock's, whose state is rounded as its other arrays are."""
    return list(mx.fast.gated_delta_update(*arrays))


def _product(*arrays: mx.array) -> list[mx.array]:
    return [quantized_matmul(*arrays)]


def _held(name: str, run: Any, *arrays: mx.array, stock: Any = None) -> tuple[str, str]:
    explain(reset=True)
    found = run(*arrays)
    reasons = {each.reason: each.path for each in explain() if each.op == name}
    return f"{name}: {reasons}", differs(found, run, arrays, _K, 8, stock)


def differs(
    found: Any, run: Any, arrays: Sequence[Any], terms: int, steps: int, stock: Any = None
) -> str:
    """Why results of a call are neither right nor those of a stock operator, if they are not."""
    with use_backend("reference"):
        expected = run(*map(in_float32, arrays))
    errors = [rounding_error(a, b, terms, steps) for a, b in zip(found, expected, strict=True)]
    wrong = next((f"{error} > {most}" for error, most in errors if not error <= most), "")
    is_stock = wrong and stock and all(map(mx.array_equal, found, stock(*arrays)))
    return "" if is_stock else wrong
