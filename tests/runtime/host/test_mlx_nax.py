"""The yardstick of tensor operations: MLX's kernels for the M5 agree with float64 on its layout.

They assume that layout, as MLX runs them on nothing else: under another one they are wrong, which
is what the other layouts are for.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host import Undefined
from tests.numerics import ROUNDINGS

from . import mlx_kernels as mk
from .test_mlx_kernels import attention_inputs, note, quantized

M, N, K, TILE = 70, 75, 128, 64
ALIGNED = {200: False, 201: False, 202: False}


def _affine(bits: int, group: int, dtype: mx.Dtype, plain: bool, layout: str) -> float:
    name = "qmm_n" if plain else "qmm_t"
    n = 128 if plain else N
    x, packed, truth = quantized(name, bits, group, dtype, (M, n, K))
    launch = "false" if plain else "false, false", (-(-n // TILE), -(-M // TILE), 1), (32, 2, 2)
    y, _ = mk.affine_product(
        *(f"{name}_nax", x, packed, n, (group, bits), *launch), tensor_layout=layout
    )
    return mk.error(mk.float64(y, dtype), truth, dtype)


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "plain"), [(4, 64, mx.float16, False), (3, 32, mx.bfloat16, True)]
)
def test_affine(bits, group, dtype, plain, record_property):
    error = _affine(bits, group, dtype, plain, "m5")
    case = f"{bits} bits, groups of {group}, {mk.METAL_NAMES[dtype]}"
    note(record_property, f"affine_qmm_{'n' if plain else 't'}_nax", case, error, dtype)


def test_another_layout_shows():
    assert _affine(4, 64, mx.float16, False, "strips") > 20 * ROUNDINGS[mx.float16]
    with pytest.raises(Undefined, match="no valid element"):
        _affine(4, 64, mx.float16, False, "random")


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_fp(mode, group, bits, record_property):
    arguments, truth = mk.fp_product(M, N, K, mode, group, bits)
    arguments |= {"K": mk.i32(K), "N": mk.i32(N), "M": mk.i32(M)}
    function = f"fp_qmm_t_nax<half, {group}, {bits}, false, false>"
    loaded = mk.load("fp_nax", function, checked=True, constants=ALIGNED)
    y = mk.empty((M, N), mx.float16)
    mk.run(loaded, arguments, {"y": y}, (-(-N // TILE), -(-M // TILE), 1), (32, 2, 2))
    error = mk.error(mk.float64(y, mx.float16), truth, mx.float16)
    note(record_property, "fp_qmm_t_nax", mode, error, mx.float16)


@pytest.mark.parametrize(
    ("d", "causal", "dtype"),
    [(64, True, mx.bfloat16), pytest.param(256, False, mx.float16, marks=pytest.mark.thorough)],
)
def test_attention(d, causal, dtype, record_property):
    q, k, v, truth = attention_inputs(dtype, (2, 1), (75, 101), d, causal)
    out, _ = mk.attention(q, k, v, (64, 32), causal=causal, nax=True)
    error = mk.error(mk.float64(out, dtype), truth, dtype)
    assert np.isfinite(error)
    note(record_property, "attention_nax", f"{mk.METAL_NAMES[dtype]}, D = {d}", error, dtype)
