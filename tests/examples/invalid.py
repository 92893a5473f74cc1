"""Sound calls of every operation with all their arguments, and calls that are not, with messages.

Whatever stands in place of an argument, fuzzers assert that an error names it; here is what else a
message says: the shape that was expected, the bound, the names to choose from.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers import linalg
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.attention import attention
from mlx_qlayers.ops.attention_step import attention_step, packed_rows
from mlx_qlayers.ops.embedding import quantized_rows
from mlx_qlayers.ops.exp import exp
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
from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.options import PackedMatrix, Rotation, Router
from tests.examples.adapters import ADAPTERS
from tests.examples.calls import Calls
from tests.examples.images import IMAGES
from tests.examples.losses import LOSSES

_ones, _zeros = mx.ones, mx.zeros


def _matrix(*shape: int, mode: str = "affine", group_size: int | None = None) -> dict[str, Any]:
    parts = mx.quantize(_ones(shape or (16, 128)), group_size, mode=mode)
    return dict(zip(("w", "scales", "biases"), (*parts, None), strict=False))


def _packed(*shape: int, group_size: int = 64, bits: int = 4, dtype: mx.Dtype = mx.float32) -> Any:
    return tuple(mx.quantize(_zeros(shape, dtype), group_size, bits))


_M, _FP4 = _matrix(), _matrix(mode="nvfp4") | {"mode": "nvfp4"}
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
_MATMUL = Calls(
    quantized_matmul,
    [
        {"x": _ones((2, 128)), "bias": _ones((16,))} | _M,
        {"x": _ones((3, 1, 16)), "transpose": False, "bias": _ones((128,))} | _M,
        {"x": _ones((2, 128)), "global_scale": mx.array(1.0)} | _FP4,
    ],
    [
        *_PRODUCTS,
        ({"x": mx.array(1.0)}, r"x must be \(\.\.\., K\), but its shape is \(\)"),
        ({"x": _ones((2, 64))}, r"x of shape \(2, 64\) must have 128 columns to go with w"),
        ({"w": _M["w"][0]}, r"w must be \(\.\.\., N, W\), but its shape is \(16,\)"),
        ({"w": _M["w"][:, :8]}, "w of shape"),
        ({"w": "text"}, "w must be an mx.array, not str"),
        ({"w": None}, "w must be an mx.array, not NoneType"),
        ({"scales": _M["scales"][:8]}, "scales of shape"),
        ({"biases": _M["biases"][:, :1]}, "biases of shape"),
        ({"biases": _M["biases"].astype(mx.complex64)}, "biases must be floating"),
        ({"bias": _ones((15,))}, r"bias must be \(16,\), but its shape is \(15,\)"),
        ({"mode": "mxfp4", "scales": _ones((16, 4), mx.uint8)}, "biases must be None"),
        ({"mode": "mxfp8", "biases": None, "scales": _ones((16, 2))}, "scales"),
        (_FP4 | {"global_scale": _ones((2,))}, "global_scale must hold"),
        (_FP4 | {"global_scale": mx.array(1)}, "global_scale must hold"),
    ],
)
_S, _S4 = _matrix(4, 16, 128), _matrix(4, 16, 128, mode="nvfp4") | {"mode": "nvfp4"}
_CHOSEN = {"x": _ones((2, 1, 128)), "rhs_indices": mx.array([0, 3])}
_GATHER = Calls(
    gather_qmm,
    [
        _CHOSEN | _S,
        _CHOSEN | _S | {"x": _ones((2, 1, 16)), "transpose": False},
        _CHOSEN | _S4 | {"global_scale": _ones((4,)), "lhs_indices": mx.array([0, 1])},
    ],
    [
        *_PRODUCTS,
        ({"x": _ones((128,))}, r"x must be \(\.\.\., M, K\), but its shape is \(128,\)"),
        ({"x": _ones((2, 1, 64))}, "x of shape"),
        ({"lhs_indices": mx.array([0, 1, 1])}, "do not broadcast"),
        ({"rhs_indices": mx.array([0, 1, 2])}, "rhs_indices do not broadcast"),
        ({"rhs_indices": mx.array([True, False])}, "rhs_indices must be integers"),
        (
            {name: a[:0] for name, a in _S.items()},
            r"w of shape \(0, 16, 16\) has nothing to choose",
        ),
        ({"x": _ones((0, 1, 128)), "lhs_indices": mx.array([0, 1])}, "has nothing to choose"),
        (_S4 | {"global_scale": _ones((3,))}, "global_scale must hold"),
        (_S4 | {"global_scale": _ones((4,), mx.int32)}, "global_scale must"),
    ],
)
_ROWS = Calls(
    quantized_rows,
    [{"numbers": mx.array([1]), **_M}],
    [*_FORMATS, ({"numbers": _zeros(3)}, "numbers must be integers"), ({"bits": 3}, "12 words")],
)
_P, _B = (PackedMatrix(*_matrix(8, 64).values(), bias) for bias in (None, _ones(8)))
_FUSED = Calls(
    fused_products,
    [
        {"x": _zeros((2, 64)), "matrices": [_P], "deferred_weight": _ones(8)},
        {"x": _zeros((2, 64)), "matrices": [_B, _P], "gate": "silu", "norm": (_ones(64), 1e-5)},
        {"x": _zeros((2, 64)), "matrices": [_B], "residual": _ones((2, 8))},
    ],
    [
        *_FORMATS,
        ({"matrices": []}, "matrices must have at least one element"),
        ({"x": _zeros((2, 32))}, r"x of shape \(2, 32\) must have 64 columns to go with w"),
        ({"x": mx.array(1.0)}, r"x must be \(\*R, K\), but its shape is \(\)"),
        ({"gate": "relu"}, "gate must be silu, gelu or gelu_approx or None, not 'relu'"),
        ({"gate": "silu"}, r"gate needs two matrices of one shape, not shapes \[\(8, 8\)\]"),
        ({"norm": (_zeros(8), 0.1)}, r"the weight of norm must be \(64,\), but its shape is \(8,"),
        ({"residual": _zeros(8)}, r"residual must have the shape \(2, 8\) .* not \(8,\)"),
        ({"matrices": [_P._replace(bias=_zeros(9))]}, r"bias must be \(8,\), but its shape is \(9"),
        ({"deferred_weight": _zeros(9)}, r"deferred_weight must be \(8,\), .* is \(9,\)"),
        ({"partial_squares": _zeros((4, 2))}, r"partial_squares must be \(2, 4\), .* is \(4, 2\)"),
    ],
)
_E = PackedMatrix(*_matrix(4, 8, 64).values())
_PICKED: dict[str, Any] = {"x": _ones((1, 64)), "experts": mx.array([[3, 0]])}
_EXPERTS = Calls(
    experts_products,
    [_PICKED | {"matrices": [_E, _E], "gate": "silu"}],
    [
        ({"gate": "tanh"}, "gate must be one of silu, gelu, gelu_approx or Clipped, with two"),
        ({"experts": mx.array([[0.5]])}, "experts must be integers"),
        ({"x": _ones((2, 64))}, r"x must be \(1, K\) or \(1, 2, K\), but its shape is \(2, 64\)"),
        ({"x": _ones((1, 32))}, "columns"),
        ({"norm": (_ones((1, 2)), 0.1)}, "norm must have partial_squares"),
    ],
)
_SUMMED = _PICKED | {"x": _ones((1, 2, 64)), "scores": _ones((1, 2)), "matrix": _E}
_SUMS = Calls(
    experts_combined, [_SUMMED], [({"scores": _ones((1, 3))}, r"scores must be \(1, 2\)")]
)
_ROUTER = Calls(
    experts_chosen,
    [{"logits": _ones((1, 8)), "router": Router(2), "bias": _ones(8), "factors": _ones(8)}],
    [
        ({"router": Router(9)}, "top_k must be 1 to the 8 experts, not 9"),
        ({"router": Router(2, "tanh")}, "score must be one of"),
        ({"router": Router(2, groups=3)}, "groups must divide the 8 experts, not 3"),
        ({"router": Router(2, dropped=1)}, "dropped must be below the 1 groups, not 1"),
    ],
)
_INT8 = Calls(
    int8_matmul,
    [
        {
            "x": _zeros((3, 32), mx.float16),
            "w": _zeros((8, 32), mx.int8),
            "scales": _zeros(8),
            "bias": _zeros((8,), mx.float16),
        }
    ],
    [
        ({"w": _zeros((8, 16), mx.int8)}, r"w must be \(N, 32\), but its shape is \(8, 16\)"),
        ({"w": _zeros((8, 32))}, "w must be int8, not"),
        ({"scales": _zeros((8,), mx.float16)}, "scales must be float32"),
        ({"block": 2**70}, r"block must be one of \(0, 16, 32, 64, 128\) and divide 32, not 118"),
        ({"block": 64}, "block must be one of .* and divide 32, not 64"),
        ({"block": 16.0}, r"block must be an integer, not 16\.0"),
    ],
)
_GPTQ = Calls(
    gptq,
    [{"w": _ones((5, 64)), "hessian": mx.eye(64), "fmt": Format(32, 4)}],
    [
        ({"fmt": Format(32, 4, "mxfp4")}, "affine, in whole groups"),
        ({"fmt": Format(128, 4)}, "cannot hold rows of 64"),
        ({"hessian": mx.eye(64)[:32]}, r"hessian must be \(64, 64\), but its shape is \(32, 64\)"),
        ({"damping": 2**200}, "damping must be a finite number >= 0, not 16069"),
        ({"hessian": -100 * mx.eye(64)}, "not positive definite"),
    ],
)
_CHOLESKY = Calls(
    linalg.cholesky,
    [{"a": mx.eye(6), "check": False}],
    [({"a": _ones((3, 3), mx.float16)}, "a must be float32, not .*float16")],
)
_SOLVE = Calls(
    linalg.solve_triangular,
    [{"a": mx.eye(6), "b": _ones((6, 6))}],
    [({"a": _ones((2, 6, 6)), "b": _ones((5, 6, 1))}, "leading axes of .* cannot be broadcast")],
)
_INVERSE = Calls(
    linalg.cholesky_inv,
    [{"l": mx.eye(6)}],
    [({"l": _ones((2, 3))}, r"l must be \(\.\.\., N, N\), but its shape is \(2, 3\)")],
)
_CHO_SOLVE = Calls(linalg.cho_solve, [{"l": mx.eye(6), "b": _ones((6, 2))}], [])
_QR = Calls(
    linalg.qr,
    [{"a": mx.eye(6) + _ones((6, 6))}],
    [({"mode": "full"}, "mode must be reduced, r or raw, not 'full'")],
)
_SUBTRACT = Calls(subtract_product, [{"b": mx.eye(6), "a": _ones((6, 6)), "x": _ones((6, 6))}], [])
_EXP = Calls(
    exp,
    [{"x": _ones((2, 3))}],
    [
        ({"x": mx.arange(4)}, r"x must be float32, float16 or bfloat16, not .*int32"),
        ({"strided": "x"}, "strided must be True or False, not 'x'"),
    ],
)
_SWIGLU = Calls(
    swiglu,
    [{"gate": _ones((2, 3)), "x": _ones((2, 3))}],
    [
        ({"gate": mx.arange(4)}, r"gate must be float32, float16 or bfloat16, not .*int32"),
        ({"x": _ones((2, 4))}, r"x must be \(2, 3\), but its shape is \(2, 4\)"),
        ({"x": _ones((2, 3), mx.float16)}, "x must be float32 as gate, not .*float16"),
    ],
)
_ROTARY = Calls(
    rotary_embedding,
    [{"q": _zeros((2, 3, 4, 8)), "k": _zeros((2, 3, 2, 8)), "offset": mx.array(7), "dims": 8}],
    [
        ({"dims": 7}, "dims must be even and at most 8, not 7"),
        ({"dims": 10}, "dims must be even and at most 8, not 10"),
        ({"dims": 8.0}, "dims must be even and at most 8, not 8.0"),
        ({"traditional": "x"}, "traditional must be True or False, not 'x'"),
        ({"base": (1e4,)}, r"base must be a finite number > 0 or None, not \(10000\.0,\)"),
        ({"base": 0}, "base must be a finite number > 0 or None, not 0"),
        ({"scale": float("nan")}, "scale must be a finite number, not nan"),
        ({"base": None}, "one of base and freqs must be given"),
        ({"base": None, "freqs": _zeros((3,))}, r"freqs must be \(4,\), but its shape is \(3,\)"),
    ],
)
_DELTA_SHAPES = {"q": (1, 3, 1, 32), "k": (1, 3, 1, 32), "v": (1, 3, 2, 8), "g": (1, 3, 2)}
_DELTA_SHAPES |= {"beta": (1, 3, 2), "state": (1, 2, 8, 32)}
_THREE = _zeros((1, 3, 3, 32))
_DELTA = Calls(
    gated_delta,
    [{name: _ones(shape) for name, shape in _DELTA_SHAPES.items()}],
    [
        *(
            ({"norms": norms}, "norms must be an epsilon and two factors, finite")
            for norms in (3, (1e-6, 1.0), (1e-6, "1", 1.0), (1e-6, float("nan"), 1.0))
        ),
        (
            {"q": _THREE, "k": _THREE},
            r"v must be \(1, 3, H, Dv\) with H % 3 == 0.* is \(1, 3, 2, 8\)",
        ),
    ],
)
_LATENT_SHAPES = {"q": (1, 2, 1, 32), "r": (1, 2, 1, 32), "c": (1, 1, 9, 32), "p": (1, 1, 9, 32)}
_LATENT = Calls(
    latent_attention,
    [
        {n: _ones(s) for n, s in _LATENT_SHAPES.items()}
        | {"last": mx.array(3), "scale": 0.1, "mask": mx.arange(9).reshape(1, 1, 1, 9) % 4 != 1}
    ],
    [
        ({"last": mx.array([3])}, r"last must be \(\), but its shape is \(1,\)"),
        ({"mask": _ones((1, 1, 1, 9))}, "mask must be bool, not"),
    ],
)
_Q, _K = _zeros((2, 4, 3, 64)), _zeros((2, 2, 5, 64))
_K4 = _packed(2, 2, 5, 64)
_ATTENTION = Calls(
    attention,
    [
        {
            "q": _Q,
            "k": _K,
            "v": _K,
            "scale": 0.1,
            "sinks": _ones(4),
            "mask": _ones((3, 5), mx.bool_),
        },
        {"q": _Q, "k": _K4, "v": _K4, "scale": 0.1},
        {"q": _zeros((2, 4, 20, 64)), "k": _K, "v": _K, "scale": 0.1, "mask": "causal"},
    ],
    [
        ({"q": np.zeros((2, 4, 3, 64))}, "q must be an mx.array, not ndarray of .*float64"),
        ({"v": _K.astype(mx.uint32)}, "v must be float32.*uint32"),
        ({"k": _K4}, "k and v must both be packed or not, not tuple and array"),
        ({"k": _K4, "v": _packed(2, 2, 5, 64, group_size=32, bits=2)}, "v must hold rows of 128"),
        (
            {"q": _Q[..., :48], "k": _K4, "v": _K4},
            "k must hold rows of 48 numbers, not 8 words in 1 groups",
        ),
        ({"scale": "1"}, "scale must be a finite number, not '1'"),
        ({"scale": 2**200}, "scale must be a finite number, not 1606938"),
        ({"scale": float("nan")}, "scale must be a finite number, not nan"),
        ({"window": 2.0}, r"window must be .* or None, not 2\.0"),
        ({"mask": "full"}, "mask must be None, 'causal' or an mx.array, not 'full'"),
        ({"mask": _zeros((3, 4))}, r"mask must broadcast to \(2, 4, 3, 5\).*\(3, 4\)"),
        ({"mask": _zeros((1, 1, 1, 1, 5))}, "mask must broadcast"),
        ({"sinks": _zeros(4, mx.int32)}, "sinks must be float32.*int32"),
    ],
)
_CACHE = {"k_cache": (1, 2, 40, 64), "v_cache": (1, 2, 40, 64), "k_append": (1, 2, 17, 64)}
_CACHE |= {"v_append": (1, 2, 17, 64), "q": (1, 1, 256), "k": (1, 1, 128), "v": (1, 1, 128)}
_STEP: dict[str, Any] = {name: _zeros(shape) for name, shape in _CACHE.items()}
_STEP |= {"positions": mx.array([17, 9, *[26] * 6]), "scale": 0.1, "rotation": Rotation(64)}
_C4, _H4 = _packed(1, 2, 40, 64), _packed(1, 2, 40, 64, dtype=mx.float16)
_TAIL4 = packed_rows(mx.quantize(_zeros((1, 2, 17, 64)), 64, 4))
_WEIGHTS = _ones(64), _ones(64)
_DECODE = Calls(
    attention_step,
    [
        _STEP | {"norms": _WEIGHTS, "sinks": _ones(4)},
        _STEP | {"rotation": Rotation(64, base=None), "freqs": _ones(32)},
        _STEP | {"k_cache": _C4, "v_cache": _C4, "k_append": _TAIL4, "v_append": _TAIL4},
    ],
    [
        ({"q": _zeros((1, 17, 256))}, r"q must be \(B, L, N\) with 1 <= L <= 16, but its shape"),
        ({"q": _zeros((1, 2, 256))}, r"k must be \(1, 2, 128\), but its shape is \(1, 1, 128\)"),
        (
            {"q": _zeros((1, 1, 200))},
            r"k_cache must be \(1, Hkv, S, D\) with 200 % \(Hkv \* D\) == 0.* is \(1, 2, 40, 64\)",
        ),
        ({"v_cache": _zeros(())}, r"v_cache must be \(1, 2, 40, Dv\), but its shape is \(\)"),
        ({"v_cache": _zeros((1, 2, 40, 0)), "v": _zeros((1, 1, 0))}, "v_cache must be"),
        ({"scale": 2**200}, "scale must be a finite number, not 160693"),
        ({"epsilon": "1"}, "epsilon must be a finite number, not '1'"),
        ({"rotation": 64}, "rotation must be a Rotation, not 64"),
        ({"k": _zeros((1, 1, 64))}, r"k must be \(1, 1, 128\), but its shape is \(1, 1, 64\)"),
        ({"k_append": _zeros((1, 2, 0, 64))}, r"k_append must be \(1, 2, R, 64\) with R >= 1"),
        (
            {"v_append": _zeros((1, 2, 16, 64))},
            r"v_append must be \(1, 2, 17, 64\), .* \(1, 2, 16, 64",
        ),
        ({"k_cache": _zeros((1, 2, 40, 8), mx.uint32)}, "k_cache must be .*float32, or packed"),
        ({"k_cache": _C4}, "must be packed in 3 arrays each, or 1, not 3 and 1"),
        ({"k_cache": _C4, "v_cache": _C4}, r"k_append must be uint32, not mlx\.core\.float32"),
        ({"k_cache": _C4, "v_cache": _C4[::-1]}, r"v_cache must be \(packed, scales, biases\)"),
        (
            {"k_cache": _H4, "v_cache": _H4},
            "the scales of k_cache must be .*float32.* not .*float1",
        ),
        ({"positions": _zeros((7,), mx.int32)}, r"positions must be \(P,\) with P >= 8, but its"),
        (
            {"mask": _ones((1, 1, 1, 39), mx.bool_)},
            r"mask must be \(1, 1 or 4, 1, M\) with M >= 40",
        ),
        ({"sinks": _ones((3,))}, r"sinks must be \(4,\), but its shape is \(3,\)"),
        ({"norms": (_ones(16),) * 2}, r"q_norm must be \(64,\), but its shape is \(16,\)"),
        ({"norms": (_ones(64), 1.0)}, "k_norm must be an mx.array, not float"),
        ({"rotation": Rotation(66)}, "dims must be even and at most 64, not 66"),
        ({"freqs": _ones(32)}, "one of base and freqs must be given"),
    ],
)
_HERE = [calls for calls in globals().values() if isinstance(calls, Calls)]
OPERATIONS = {calls.function.__name__: calls for calls in [*_HERE, *ADAPTERS, *IMAGES, *LOSSES]}
INVALID = [
    (name, change, message)
    for name, calls in OPERATIONS.items()
    for change, message in calls.invalid
]
