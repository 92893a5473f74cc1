"""Calls that are not sound, with messages, and sound ones with arguments that no shipped call has.

Whatever stands in place of an argument, fuzzers assert that an error names it; here is what else a
message says: the shape that was expected, the bound, the names to choose from.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers import linalg
from mlx_qlayers.commands.examples import matrix, packed
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.attention import attention
from mlx_qlayers.ops.attention_step import attention_step, packed_rows
from mlx_qlayers.ops.embedding import quantized_rows
from mlx_qlayers.ops.experts import experts_chosen, experts_combined, experts_products
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.gated_delta import gated_delta
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.gptq import gptq
from mlx_qlayers.ops.int8_matmul import int8_matmul
from mlx_qlayers.ops.latent_attention import latent_attention
from mlx_qlayers.ops.linalg import subtract_product
from mlx_qlayers.ops.quantized_matmul import quantized_matmul
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.options import PackedMatrix, Rotation, Router
from tests.examples.calls import SHIPPED, Calls
from tests.examples.images import IMAGES
from tests.examples.losses import LOSSES

_ones, _zeros = mx.ones, mx.zeros


def _half(*shape: int) -> mx.array:
    return _zeros(shape, mx.float16)


_NV4, _FP4 = Format(16, 4, "nvfp4"), {"mode": "mxfp4", "group_size": 32}
# Of what holds a matrix in a format, by any operation.
_FORMATS = [
    ({"group_size": 48}, "group_size must be 32, 64, 128"),
    ({"bits": 7}, "bits must be 1, 2, 3, 4, 5, 6, 8"),
    ({"bits": True}, "bits must be"),
    ({"mode": "int4"}, "mode must be one of"),
]
_PRODUCTS = [
    *_FORMATS,
    ({"group_size": 32}, "group_size=32"),
    ({"bits": 8}, "bits=8"),
    ({"transpose": False}, "transpose=False"),
    ({"biases": None}, "biases is missing"),
    ({"scales": mx.array(1.0)}, "scales of shape"),
    ({"global_scale": mx.array(1.0)}, "global_scale must be None"),
]
_W = _zeros((72, 64), mx.uint32)
_F4 = matrix((72, 512), fmt=_NV4)
_MATMUL = Calls(
    quantized_matmul,
    [
        *_PRODUCTS,
        ({"x": mx.array(1.0)}, r"x must be \(\.\.\., K\), but its shape is \(\)"),
        ({"x": _ones((2, 64))}, r"x of shape \(2, 64\) must have 512 columns to go with w"),
        ({"w": _W[0]}, r"w must be \(\.\.\., N, W\), but its shape is \(64,\)"),
        ({"w": _W[:, :8]}, "w of shape"),
        ({"w": "text"}, "w must be an mx.array, not str"),
        ({"w": None}, "w must be an mx.array, not NoneType"),
        ({"scales": _ones((8, 8))}, "scales of shape"),
        ({"biases": _ones((72, 1))}, "biases of shape"),
        ({"biases": _ones((72, 8), mx.complex64)}, "biases must be floating"),
        ({"bias": _ones((15,))}, r"bias must be \(72,\), but its shape is \(15,\)"),
        (_FP4 | {"scales": _ones((72, 16), mx.uint8)}, "biases must be None"),
        (_FP4 | {"biases": None, "scales": _ones((72, 16))}, "scales must be uint8 in mode"),
        (_F4 | {"global_scale": _ones((2,))}, "global_scale must hold"),
        (_F4 | {"global_scale": mx.array(1)}, "global_scale must hold"),
    ],
    [
        {"bias": _ones((72,))},
        {"x": _ones((3, 1, 72)), "transpose": False, "bias": _ones((512,))},
        _F4 | {"global_scale": mx.array(1.0)},
    ],
)
_S4 = matrix((4, 72, 512), fmt=_NV4)
_GATHER = Calls(
    gather_qmm,
    [
        *_PRODUCTS,
        ({"x": _ones((128,))}, r"x must be \(\.\.\., M, K\), but its shape is \(128,\)"),
        ({"x": _ones((2, 1, 64))}, "x of shape"),
        ({"lhs_indices": mx.array([0, 1, 1])}, "do not broadcast"),
        ({"rhs_indices": mx.array([0, 1, 2])}, "rhs_indices do not broadcast"),
        ({"rhs_indices": mx.array([True, False])}, "rhs_indices must be integers"),
        (
            {"w": _zeros((0, 72, 64), mx.uint32)}
            | dict.fromkeys(("scales", "biases"), _ones((0, 72, 8))),
            r"w of shape \(0, 72, 64\) has nothing to choose",
        ),
        ({"x": _ones((0, 1, 512)), "lhs_indices": mx.array([0, 1])}, "has nothing to choose"),
        (_S4 | {"global_scale": _ones((3,))}, "global_scale must hold"),
        (_S4 | {"global_scale": _ones((4,), mx.int32)}, "global_scale must"),
    ],
    [_S4 | {"global_scale": _ones((4,)), "lhs_indices": mx.array([0, 1])}],
)
_ROWS = Calls(
    quantized_rows,
    [*_FORMATS, ({"numbers": _zeros(3)}, "numbers must be integers"), ({"bits": 3}, "12 words")],
    [{"numbers": mx.array([1])} | matrix((16, 128))],
)
_P, _B = (PackedMatrix(*packed((8, 512), mx.float32), bias) for bias in (None, _ones(8)))
_ALONE: dict[str, Any] = {"x": _zeros((2, 512)), "gate": None, "norm": None, "matrices": [_P]}
_FUSED = Calls(
    fused_products,
    [
        *_FORMATS,
        ({"matrices": []}, "matrices must have at least one element"),
        (
            {"x": _zeros((2, 32)), "norm": None},
            r"x of shape \(2, 32\) must have 512 columns to go with w",
        ),
        ({"x": mx.array(1.0)}, r"x must be \(\*R, K\), but its shape is \(\)"),
        ({"gate": "relu"}, "gate must be silu, gelu or gelu_approx or None, not 'relu'"),
        ({"matrices": [_P]}, r"gate needs two matrices of one shape, not shapes \[\(8, 64\)\]"),
        ({"norm": (_zeros(8), 0.1)}, r"the weight of norm must be \(512,\), but its shape is \(8,"),
        (_ALONE | {"residual": _zeros(8)}, r"residual must have the shape \(2, 8\) .* not \(8,\)"),
        (
            _ALONE | {"matrices": [_P._replace(bias=_zeros(9))]},
            r"bias must be \(8,\), but its shape is \(9",
        ),
        (_ALONE | {"deferred_weight": _zeros(9)}, r"deferred_weight must be \(8,\), .* is \(9,\)"),
        ({"partial_squares": _zeros((4, 2))}, r"partial_squares must be \(1, 32\), .* is \(4, 2\)"),
    ],
    [
        _ALONE | {"deferred_weight": _ones(8)},
        {"x": _zeros((2, 512)), "matrices": [_B, _P], "norm": (_ones(512), 1e-5)},
        _ALONE | {"matrices": [_B], "residual": _ones((2, 8))},
    ],
)
_EXPERTS = Calls(
    experts_products,
    [
        ({"gate": "tanh"}, "gate must be one of silu, gelu, gelu_approx or Clipped, with two"),
        ({"experts": mx.array([[0.5]])}, "experts must be integers"),
        ({"x": _ones((2, 64))}, r"x must be \(1, K\) or \(1, 2, K\), but its shape is \(2, 64\)"),
        ({"x": _ones((1, 32))}, "columns"),
        ({"norm": (_ones((1, 2)), 0.1)}, "norm must have partial_squares"),
    ],
)
_SUMS = Calls(experts_combined, [({"scores": _ones((1, 3))}, r"scores must be \(1, 2\)")])
_ROUTER = Calls(
    experts_chosen,
    [
        ({"router": Router(9)}, "top_k must be 1 to the 8 experts, not 9"),
        ({"router": Router(2, "tanh")}, "score must be one of"),
        ({"router": Router(2, groups=3)}, "groups must divide the 8 experts, not 3"),
        ({"router": Router(2, dropped=1)}, "dropped must be below the 1 groups, not 1"),
    ],
    [{"logits": _ones((1, 8)), "router": Router(2), "bias": _ones(8), "factors": _ones(8)}],
)
_INT8 = Calls(
    int8_matmul,
    [
        ({"w": _zeros((8, 16), mx.int8)}, r"w must be \(N, 272\), but its shape is \(8, 16\)"),
        ({"w": _zeros((150, 272))}, "w must be int8, not"),
        ({"scales": _zeros((150,), mx.float16)}, "scales must be float32"),
        ({"block": 2**70}, r"block must be one of \(0, 16, 32, 64, 128\) and divide 272, not 118"),
        ({"block": 64}, "block must be one of .* and divide 272, not 64"),
        ({"block": 16.0}, r"block must be an integer, not 16\.0"),
    ],
    [{"bias": _zeros((150,), mx.bfloat16)}],
)
_GPTQ = Calls(
    gptq,
    [
        ({"fmt": Format(32, 4, "mxfp4")}, "affine, in whole groups"),
        ({"fmt": Format(128, 4)}, "cannot hold rows of 64"),
        ({"hessian": mx.eye(64)[:32]}, r"hessian must be \(64, 64\), but its shape is \(32, 64\)"),
        ({"damping": 2**200}, "damping must be a finite number >= 0, not 16069"),
        ({"hessian": -100 * mx.eye(64)}, "not positive definite"),
    ],
    [{"w": _ones((5, 64)), "hessian": mx.eye(64), "fmt": Format(32, 4)}],
)
_SOLVE = Calls(
    linalg.solve_triangular,
    [({"a": _ones((2, 6, 6)), "b": _ones((5, 6, 1))}, "leading axes of .* cannot be broadcast")],
)
_INVERSE = Calls(
    linalg.cholesky_inv,
    [],
    [{"l": mx.eye(6)}],
)
_CHO_SOLVE = Calls(linalg.cho_solve, [], [{"l": mx.eye(6), "b": _ones((6, 2))}])
_SUBTRACT = Calls(subtract_product, [], [{"b": mx.eye(6), "a": _ones((6, 6)), "x": _ones((6, 6))}])
_ROTARY = Calls(
    rotary_embedding,
    [
        ({"dims": 7}, "dims must be even and at most 64, not 7"),
        ({"dims": 66}, "dims must be even and at most 64, not 66"),
        ({"dims": 8.0}, "dims must be even and at most 64, not 8.0"),
        ({"traditional": "x"}, "traditional must be True or False, not 'x'"),
        ({"base": (1e4,)}, r"base must be a finite number > 0 or None, not \(10000\.0,\)"),
        ({"base": 0}, "base must be a finite number > 0 or None, not 0"),
        ({"scale": float("nan")}, "scale must be a finite number, not nan"),
        ({"base": None}, "one of base and freqs must be given"),
        ({"base": None, "freqs": _zeros((3,))}, r"freqs must be \(32,\), but its shape is \(3,\)"),
    ],
)
_DELTA = Calls(
    gated_delta,
    [
        *(
            ({"norms": norms}, "norms must be an epsilon and two factors, finite")
            for norms in (3, (1e-6, 1.0), (1e-6, "1", 1.0), (1e-6, float("nan"), 1.0))
        ),
    ],
)
_LATENT = Calls(latent_attention, [], [{"mask": mx.arange(80).reshape(2, 1, 1, 40) % 4 != 1}])
_K, _K4 = _half(1, 2, 70, 64), packed((1, 2, 70, 64))
_ATTENTION = Calls(
    attention,
    [
        ({"q": np.zeros((2, 4, 3, 64))}, "q must be an mx.array, not ndarray of .*float64"),
        ({"k": _K4}, "k and v must both be packed or not, not tuple and array"),
        ({"k": _K4, "v": packed((1, 2, 70, 64), fmt=Format(32, 2))}, "v must hold rows of 128"),
        (
            {"q": _half(1, 4, 70, 48), "k": _K4, "v": _K4},
            "k must hold rows of 48 numbers, not 8 words in 1 groups",
        ),
        ({"scale": 2**200}, "scale must be a finite number, not 1606938"),
        ({"mask": "full"}, "mask must be None, 'causal' or an mx.array, not 'full'"),
        ({"mask": _zeros((3, 4))}, r"mask must broadcast to \(1, 4, 70, 70\).*\(3, 4\)"),
        ({"mask": _zeros((1, 1, 1, 1, 70))}, "mask must broadcast"),
    ],
    [{"sinks": _ones(4), "mask": mx.random.normal((70, 70)) < 1}],
)
_C4, _F32 = packed((1, 2, 256, 64)), packed((1, 2, 256, 64), mx.float32)
_APPEND4 = packed_rows(packed((1, 2, 16, 64)))
_STEP = Calls(
    attention_step,
    [
        ({"q": _half(1, 17, 512)}, r"q must be \(B, L, N\) with 1 <= L <= 16, but its shape"),
        ({"q": _half(1, 2, 512)}, r"k must be \(1, 2, 128\), but its shape is \(1, 1, 128\)"),
        (
            {"q": _half(1, 1, 200)},
            r"k_cache must be \(1, Hkv, S, D\) with 200 % \(Hkv \* D\) == 0.* is \(1, 2, 256, 64\)",
        ),
        ({"v_cache": _half()}, r"v_cache must be \(1, 2, 256, Dv\), but its shape is \(\)"),
        ({"v_cache": _half(1, 2, 256, 0), "v": _half(1, 1, 0)}, "v_cache must be"),
        ({"scale": 2**200}, "scale must be a finite number, not 160693"),
        ({"epsilon": "1", "norms": (_ones(64),) * 2}, "epsilon must be a finite number, not '1'"),
        ({"rotation": 64}, "rotation must be a Rotation, not 64"),
        ({"k": _half(1, 1, 64)}, r"k must be \(1, 1, 128\), but its shape is \(1, 1, 64\)"),
        ({"k_append": _half(1, 2, 0, 64)}, r"k_append must be \(1, 2, R, 64\) with R >= 1"),
        ({"v_append": _half(1, 2, 9, 64)}, r"v_append must be \(1, 2, 16, 64\), .* \(1, 2, 9, 6"),
        ({"k_cache": _zeros((1, 2, 256, 8), mx.uint32)}, "k_cache must be .*float16, or packed"),
        ({"k_cache": _C4}, "must be packed in 3 arrays each, or 1, not 3 and 1"),
        ({"k_cache": _C4, "v_cache": _C4}, r"k_append must be uint32, not mlx\.core\.float16"),
        ({"k_cache": _C4, "v_cache": _C4[::-1]}, r"v_cache must be \(packed, scales, biases\)"),
        (
            {"k_cache": _F32, "v_cache": _F32},
            "the scales of k_cache must be .*float16.* not .*float3",
        ),
        ({"positions": _zeros((7,), mx.int32)}, r"positions must be \(P,\) with P >= 8, but its"),
        (
            {"mask": _ones((1, 1, 1, 39), mx.bool_)},
            r"mask must be \(1, 1 or 8, 1, M\) with M >= 256",
        ),
        ({"sinks": _ones((3,))}, r"sinks must be \(8,\), but its shape is \(3,\)"),
        ({"norms": (_ones(16),) * 2}, r"q_norm must be \(64,\), but its shape is \(16,\)"),
        ({"norms": (_ones(64), 1.0)}, "k_norm must be an mx.array, not float"),
        ({"rotation": Rotation(66)}, "dims must be even and at most 64, not 66"),
        ({"freqs": _ones(32)}, "one of base and freqs must be given"),
    ],
    [
        {"norms": (_ones(64),) * 2, "sinks": _ones(8)},
        {"rotation": Rotation(64, base=None), "freqs": _ones(32)},
        {"k_cache": _C4, "v_cache": _C4, "k_append": _APPEND4, "v_append": _APPEND4},
    ],
)
_HERE = [calls for calls in globals().values() if isinstance(calls, Calls)]
_SHIPPED = [Calls(e.function, []) for e in SHIPPED.values() if e.function.__name__[0] != "_"]
OPERATIONS = {c.function.__name__: c for c in [*_SHIPPED, *_HERE, *IMAGES, *LOSSES]}
INVALID = [
    (name, change, message)
    for name, calls in OPERATIONS.items()
    for change, message in calls.invalid
]
