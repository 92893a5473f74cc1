"""Quantized matrices decoded with numpy in float64, from the formats' definitions."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import MODES, Format
from tests import oracles
from tests.numerics import assert_accurate, round_to, to64
from tests.pairwise import in_turn, pairwise

FORMATS = [
    Format(size, bits, mode)
    for mode, (sizes, widths) in MODES.items()
    for size in sizes
    for bits in widths
]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Each number of bits of each mode, with the group sizes in turn. qmv, fuzzers and GPUs take every
# format; other kernels unpack as qmv does.
EACH_WIDTH = [
    Format(sizes[n % len(sizes)], bits, mode)
    for mode, (sizes, widths) in MODES.items()
    for n, bits in enumerate(widths)
]
every_format_and_dtype = pytest.mark.parametrize(
    ("fmt", "dtype", "transpose"), pairwise(FORMATS, DTYPES, (True, False)), ids=str
)
# dequantize unpacks every format in every dtype; other kernels unpack as it does.
every_format = pytest.mark.parametrize(
    ("fmt", "transpose", "dtype"), in_turn(pairwise(FORMATS, (True, False)), DTYPES), ids=str
)
# E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP4 = np.concatenate([_E2M1, -_E2M1])
Packed = tuple[mx.array, mx.array, mx.array | None]


def _e4m3(codes: np.ndarray) -> np.ndarray:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def codes(w: mx.array, bits: int) -> np.ndarray:
    """The integers of each row, which are one little-endian stream of bits."""
    stream = np.unpackbits(np.ascontiguousarray(w).view(np.uint8), axis=-1, bitorder="little")
    weights = 1 << np.arange(bits)
    return (stream.reshape(*w.shape[:-1], stream.shape[-1] // bits, bits) * weights).sum(-1)


def dequantize64(w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format) -> np.ndarray:
    """The dense matrix in float64."""
    factors, offsets = _decoded(w, scales, biases, fmt)
    return factors + offsets


def terms64(w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format) -> np.ndarray:
    """The absolute terms that the elements are sums of, which cancel in affine modes."""
    factors, offsets = _decoded(w, scales, biases, fmt)
    return np.abs(factors) + np.abs(offsets)


def _decoded(
    w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format
) -> tuple[np.ndarray, np.ndarray]:
    q = codes(w, fmt.bits)
    groups = q.reshape(*q.shape[:-1], q.shape[-1] // fmt.group_size, fmt.group_size)
    if fmt.mode == "affine":
        assert biases is not None
        s, b = (np.array(a.astype(mx.float32), np.float64)[..., None] for a in (scales, biases))
        return (groups * s).reshape(q.shape), np.broadcast_to(b, groups.shape).reshape(q.shape)
    s = np.array(scales).astype(int)
    s = _e4m3(s) if fmt.mode == "nvfp4" else 2.0 ** (s - 127)
    values = _e4m3(groups) if fmt.bits == 8 else _FP4[groups]
    return (values * s[..., None]).reshape(q.shape), np.zeros(q.shape)


def random_packed(
    rng: np.random.Generator, rows: int, columns: int, fmt: Format, dtype: mx.Dtype = mx.float32
) -> Packed:
    """A quantized random matrix; its scales and biases in ``dtype`` where they are numbers."""
    # The stock quantizer refuses some numbers of rows in mode nvfp4.
    dense = mx.array(rng.normal(size=(-(-rows // 8) * 8, columns)).astype(np.float32))
    # On the CPU: for 1 bit MLX's CUDA quantizer launches nothing and leaves its results unset.
    with mx.stream(mx.cpu):
        w, scales, *biases = (a[:rows] for a in fmt.quantize(dense.astype(dtype)))
        mx.eval(w, scales, biases)
    return w, scales, biases[0] if biases else None


def random_experts(
    rng: np.random.Generator,
    count: int,
    rows: int,
    columns: int,
    fmt: Format,
    dtype: mx.Dtype = mx.float32,
) -> Packed:
    """So many of these in one stack."""
    w, scales, biases = random_packed(rng, count * rows, columns, fmt, dtype)
    w, scales = (a.reshape(count, rows, -1) for a in (w, scales))
    return w, scales, None if biases is None else biases.reshape(count, rows, -1)


def check_product(
    y: mx.array,
    x: mx.array,
    packed: Packed,
    fmt: Format,
    transpose: bool = True,
    bias: mx.array | None = None,
    factors: np.ndarray | float = 1.0,
) -> None:
    """Hold a product against float64 and against float32 sums rounded once."""
    dense, terms = (f(*packed, fmt) * factors for f in (dequantize64, terms64))
    if transpose:
        dense, terms = np.swapaxes(dense, -1, -2), np.swapaxes(terms, -1, -2)
    added = 0.0 if bias is None else to64(bias)
    single = to64(x).astype(np.float32), dense.astype(np.float32)
    rounded = oracles.product(*single) + np.float32(added)
    terms = np.abs(to64(x)) @ terms + np.abs(added)
    truth = to64(x) @ dense + added
    assert_accurate(y, truth, round_to(rounded, y.dtype), terms=terms.max(initial=0))


def check_gathered(
    y: mx.array,
    x: mx.array,
    packed: Packed,
    fmt: Format,
    left: mx.array | None,
    right: mx.array,
    transpose: bool = True,
    factors: mx.array | None = None,
) -> None:
    """The same for blocks of rows, by their numbers, and the matrices that they choose."""
    blocks = x.reshape(-1, *x.shape[-2:])
    left = mx.arange(len(blocks)).reshape(x.shape[:-2]) if left is None else left
    left, right = mx.broadcast_arrays(left, right)
    w, scales, biases = packed
    chosen = w[right], scales[right], None if biases is None else biases[right]
    unit = 1.0 if factors is None else to64(factors[right])[..., None, None] / (448 * 6)
    check_product(y, blocks[left], chosen, fmt, transpose, factors=unit)
