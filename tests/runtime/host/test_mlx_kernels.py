"""The proof that the host backend tells the truth: MLX's own Metal kernels agree with MLX.

Every case runs in the checked build, which also finds nothing to complain about in kernels that
run on real hardware, and the first of each family in the fast build too. The summary of the test
run prints the table.
"""

import struct
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host import Uninitialised
from tests.numerics import ROUNDINGS
from tests.pairwise import in_turn, pairwise

from . import mlx_kernels as mk

Record = Callable[[str, Any], None]


def note(
    record: Record, kernel: str, case: str, error: float, dtype: mx.Dtype, checked: bool = True
) -> None:
    build = "checked" if checked else "fast"
    record("table: MLX's own kernels on the host backend", [kernel, case, build, f"{error:.2f}"])
    assert error <= ROUNDINGS[dtype], f"{kernel} {case}: {error} roundings off"


def quantized(
    kernel: str, bits: int, group: int, dtype: mx.Dtype, shape: tuple[int, int, int]
) -> Any:
    """x, a packed matrix and their product; rows of the matrix are groups along K, or along N."""
    m, n, k = shape
    mx.random.seed(bits * 1000 + group)
    transposed = kernel not in ("qvm", "qmm_n")
    w = mx.random.normal((n, k) if transposed else (k, n))
    wq, scales, biases = mx.quantize(w, group, bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    x = mx.random.normal((m, k)).astype(dtype)
    exact = mx.dequantize(wq, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
    # The tiled kernels keep weights in the dtype.
    weights = mk.float64(exact.astype(dtype) if "qmm" in kernel else exact, dtype)
    truth = mk.float64(x, dtype) @ (weights.T if transposed else weights)
    return x, (wq, scales, biases), truth


def _check_affine(
    kernel: str, bits: int, group: int, dtype: mx.Dtype, record: Record, checked: bool = True
) -> None:
    m, n, k = {
        "qmv_fast": (1, 24, 1024),
        "qmv": (2, 21, 384),
        "qmv_wide": (7, 40, 512),
        "qmv_quad": (3, 72, 128),
        "qvm": (2, 128, 256),
        "qmm_t": (37, 41, 256),
        "qmm_n": (37, 128, 96),
    }[kernel]
    k = max(k, group)
    x, packed, truth = quantized(kernel, bits, group, dtype, (m, n, k))
    launch = {
        "qmv_fast": ("false", (m, n // 8, 1), (32, 2, 1)),
        "qmv": ("false", (m, -(-n // 8), 1), (32, 2, 1)),
        "qmv_wide": ("4, 8, false", (2, -(-n // 8), 1), (32, 2, 1)),
        "qmv_quad": ("128, false", (m, -(-n // 64), 1), (32, 1, 1)),
        "qvm": ("false", (m, n // (2 * min(group, 32)), 1), (32, 2, 1)),
        "qmm_t": ("false, false", (-(-n // 32), -(-m // 32), 1), (32, 2, 2)),
        "qmm_n": ("false", (n // 32, -(-m // 32), 1), (32, 2, 2)),
    }[kernel]
    y, _ = mk.affine_product(kernel, x, packed, n, (group, bits), *launch, checked=checked)
    case = f"{bits} bits, groups of {group}, {mk.METAL_NAMES[dtype]}"
    error = mk.error(mk.float64(y, dtype), truth, dtype)
    note(record, f"affine_{kernel}", case, error, dtype, checked)


KERNELS = ("qmv_fast", "qmv", "qmv_wide", "qvm", "qmm_t", "qmm_n")
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


@pytest.mark.parametrize(
    ("kernel", "dtype", "bits", "group"),
    [
        *in_turn(pairwise(KERNELS), DTYPES, (2, 3, 4, 5, 6, 8), (32, 64, 128)),
        pytest.param("qmv_quad", mx.float16, 4, 64),
    ],
    ids=str,
)
def test_affine(kernel, dtype, bits, group, record_property):
    _check_affine(kernel, bits, group, dtype, record_property)


@pytest.mark.parametrize("kernel", [*KERNELS, "qmv_quad"])
def test_affine_in_the_fast_build(kernel, record_property):
    _check_affine(kernel, 4, 64, mx.float16, record_property, checked=False)


@pytest.mark.parametrize(
    ("kernel", "mode", "group", "bits"),
    [
        ("fp_qmv_fast", "mxfp4", 32, 4),
        ("fp_qmv", "mxfp8", 32, 8),
        ("fp_qmv_wide", "nvfp4", 16, 4),
    ],
)
def test_fp(kernel, mode, group, bits, record_property):
    n, k, m = (24, 1024, 1) if kernel == "fp_qmv_fast" else (21, 384, 3)
    arguments, truth = mk.fp_product(m, n, k, mode, group, bits)
    arguments |= {"in_vec_size": mk.i32(k), "out_vec_size": mk.i32(n), "M": mk.i32(m)}
    tail, groups = "false", (m, -(-n // 8), 1)
    if kernel == "fp_qmv_wide":
        tail, groups = "4, 16, false", (1, -(-n // 4), 1)
    loaded = mk.load("fp", f"{kernel}<half, {group}, {bits}, {tail}>", checked=True)
    y = mk.empty((m, n), mx.float16)
    mk.run(loaded, arguments, {"y": y}, groups, (32, 2, 1))
    error = mk.error(mk.float64(y, mx.float16), truth, mx.float16)
    note(record_property, kernel, mode, error, mx.float16)


@pytest.mark.parametrize(
    ("dtype", "looped"), [(mx.float16, False), (mx.bfloat16, True), (mx.float32, False)]
)
def test_softmax(dtype, looped, record_property):
    mx.random.seed(3)
    rows, size = 5, 1003
    x = (mx.random.normal((rows, size)) * 4).astype(dtype)
    truth = mk.float64(x, dtype)
    truth = np.exp(truth - truth.max(-1, keepdims=True))
    truth /= truth.sum(-1, keepdims=True)
    name = "softmax_looped" if looped else "softmax_single_row"
    loaded = mk.load("softmax", f"{name}<{mk.METAL_NAMES[dtype]}, float>", checked=True)
    out = mk.empty((rows, size), dtype)
    mk.run(
        loaded,
        {"in": x, "axis_size": mk.i32(size)},
        {"out": out},
        (rows, 1, 1),
        (1024 if looped else 256, 1, 1),
    )
    error = mk.error(mk.float64(out, dtype), truth, dtype)
    note(record_property, name, mk.METAL_NAMES[dtype], error, dtype)


def attention_inputs(
    dtype: mx.Dtype, heads: tuple[int, int], lengths: tuple[int, int], d: int, causal: bool
) -> tuple[mx.array, mx.array, mx.array, np.ndarray]:
    mx.random.seed(sum(heads) + sum(lengths) + d)
    (h, hk), (length, keys) = heads, lengths
    q, k, v = (
        mx.random.normal((1, a, b, d)).astype(dtype)
        for a, b in ((h, length), (hk, keys), (hk, keys))
    )
    qs, ks, vs = (mk.float64(x, dtype) for x in (q, k, v))
    ks, vs = (np.repeat(x, h // hk, axis=1) for x in (ks, vs))
    scores = qs @ ks.transpose(0, 1, 3, 2) * d**-0.5
    if causal:
        scores[..., np.triu(np.ones((length, keys), bool), 1 + keys - length)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return q, k, v, weights / weights.sum(-1, keepdims=True) @ vs


_PLAIN = {20: False, 21: False, 23: False, 24: False, 25: False}


def _sdpa_arguments(q: mx.array, k: mx.array, v: mx.array) -> dict[str, Any]:
    *_, keys, d = k.shape
    strides = {f"{name}_head_stride": mk.i64(keys * d) for name in "kv"}
    strides |= {f"{name}_seq_stride": mk.i64(d) for name in "kv"}
    scale = struct.pack("f", d**-0.5)
    return {"queries": q, "keys": k, "values": v, "N": mk.i32(keys), "scale": scale, **strides}


@pytest.mark.parametrize(("causal", "checked"), [(False, True), (True, True), (True, False)])
def test_sdpa_vector(causal, checked, record_property):
    h, hk, length, keys, d = 4, 2, 3, 139, 64
    q, k, v, truth = attention_inputs(mx.float16, (h, hk), (length, keys), d, causal)
    loaded = mk.load(
        "sdpa", "sdpa_vector<half, 64, 64>", checked=checked, constants={**_PLAIN, 22: causal}
    )
    out = mk.empty((1, h, length, d), mx.float16)
    arguments = _sdpa_arguments(q, k, v) | {"gqa_factor": mk.i32(h // hk)}
    mk.run(loaded, arguments, {"out": out}, (h, length, 1), (1024, 1, 1))
    error = mk.error(mk.float64(out, mx.float16), truth, mx.float16)
    case = "causal" if causal else "no mask"
    note(record_property, "sdpa_vector", case, error, mx.float16, checked)


def test_sdpa_vector_2pass(record_property):
    h, hk, length, keys, d, blocks = 4, 2, 2, 333, 64, 32
    q, k, v, truth = attention_inputs(mx.float16, (h, hk), (length, keys), d, True)
    constants = {**_PLAIN, 22: True, 26: blocks}
    first = mk.load("sdpa", "sdpa_vector_2pass_1<half, 64, 64>", checked=True, constants=constants)
    partials = mk.empty((1, h, length, blocks, d), mx.float16)
    sums, maxs = (mk.empty((1, h, length, blocks), mx.float32) for _ in range(2))
    outputs = {"out": partials, "sums": sums, "maxs": maxs}
    mk.run(first, _sdpa_arguments(q, k, v), outputs, (hk, 1, blocks), (32, h // hk, length))
    second = mk.load("sdpa", "sdpa_vector_2pass_2<half, 64>", checked=True)
    out = mk.empty((1, h, length, d), mx.float16)
    arguments = {"partials": partials, "sums": sums, "maxs": maxs, "blocks": mk.i32(blocks)}
    mk.run(second, arguments, {"out": out}, (h, length, 1), (1024, 1, 1))
    error = mk.error(mk.float64(out, mx.float16), truth, mx.float16)
    note(record_property, "sdpa_vector_2pass", "causal", error, mx.float16)


@pytest.mark.parametrize(("causal", "dtype"), [(True, mx.float16), (False, mx.float32)])
def test_steel_attention(causal, dtype, record_property):
    q, k, v, truth = attention_inputs(dtype, (4, 2), (45, 77), 64, causal)
    out, _ = mk.attention(q, k, v, (32, 32), causal=causal)
    error = mk.error(mk.float64(out, dtype), truth, dtype)
    case = f"{mk.METAL_NAMES[dtype]}, {'causal' if causal else 'no mask'}"
    note(record_property, "steel_attention", case, error, dtype)


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, False)])
def test_steel_gemm(ta, tb, record_property):
    m, n, k, tile = 45, 70, 37, 32
    mx.random.seed(6)
    a, b = mx.random.normal((m, k)).astype(mx.float16), mx.random.normal((k, n)).astype(mx.float16)
    truth = mk.float64(a, mx.float16) @ mk.float64(b, mx.float16)
    given = [mx.contiguous(x.T) if t else x for x, t in ((a, ta), (b, tb))]
    constants = {10: False, 100: False, 110: False, 200: False, 201: False, 202: False}
    flags = f"{str(ta).lower()}, {str(tb).lower()}"
    loaded = mk.load(
        "gemm", f"gemm<half, 32, 32, 16, 2, 2, {flags}, float>", checked=True, constants=constants
    )
    tiles_n, tiles_m = -(-n // tile), -(-m // tile)
    leading = (m if ta else k, k if tb else n, n)
    params = struct.pack("8i3q3i", m, n, k, *leading, tiles_n, tiles_m, 0, 0, 0, 0, k // 16, 0)
    out = mk.empty((m, n), mx.float16)
    mk.run(
        loaded,
        {"A": given[0], "B": given[1], "params": params + bytes(4)},
        {"D": out},
        (tiles_n, tiles_m, 1),
        (32, 2, 2),
    )
    error = mk.error(mk.float64(out, mx.float16), truth, mx.float16)
    note(record_property, "steel_gemm_fused", f"half, {flags}", error, mx.float16)


@pytest.mark.parametrize("argsort", [False, True])
def test_sort(argsort, record_property):
    rows, size = 3, 901
    x = np.random.default_rng(7).normal(size=(rows, size)).astype(np.float32)
    kind = "uint32_t, true" if argsort else "float, false"
    loaded = mk.load("sort", f"block_sort<float, {kind}, 256, 4>", checked=True)
    out = np.empty((rows, size), np.uint32 if argsort else np.float32)
    names = ("size_sorted_axis", "in_stride_segment_axis", "out_stride_segment_axis")
    arguments = {"inp": x, **{name: mk.i32(size) for name in names}}
    arguments |= {f"{side}_stride_sorted_axis": mk.i32(1) for side in ("in", "out")}
    mk.run(loaded, arguments, {"out": out}, (1, rows, 1), (256, 1, 1))
    wanted = mx.argsort(mx.array(x)) if argsort else mx.sort(mx.array(x))
    assert np.array_equal(out, np.array(wanted))
    note(record_property, "block_sort", "arg sort" if argsort else "sort", 0.0, mx.float32)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse, record_property):
    rows, size = 3, 1301
    x = np.random.default_rng(8).integers(-9, 9, (rows, size)).astype(np.int32)
    flags = f"true, {str(reverse).lower()}"
    loaded = mk.load("scan", f"contiguous_scan<int, int, CumSum<int>, 4, {flags}>", checked=True)
    out = np.empty((rows, size), np.int32)
    # Lanes beyond the last SIMD group read sums that nobody wrote, and drop them.
    tolerate = (Uninitialised,)
    arguments = {"in": x, "axis_size": mk.i64(size)}
    mk.run(loaded, arguments, {"out": out}, (1, rows, 1), (128, 1, 1), tolerate)
    assert np.array_equal(out, np.array(mx.cumsum(mx.array(x), -1, reverse=reverse)))
    case = "reverse" if reverse else "sum"
    note(record_property, "contiguous_scan", case, 0.0, mx.float32)
