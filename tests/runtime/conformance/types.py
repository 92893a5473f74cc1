"""half, bfloat, vectors, integers and bit patterns."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from .case import ROUND, Case, Rows, case

N = 96
_F32 = np.float32


def cases() -> Iterator[Case]:
    """Arithmetic of every narrow type, vectors, integers of every width, as_type."""
    for dtype in (mx.float16, mx.bfloat16):
        yield _narrow(dtype)
        yield _widening(dtype)
    yield _half()
    yield _vectors()
    # Not int8: whether Metal's 8-bit overloads take int8_t or char is not documented.
    for dtype in (mx.int32, mx.uint32, mx.int16, mx.uint16, mx.uint8):
        yield _integers(dtype)
    yield _integers_24()
    yield _bits()


def _case(name: str, arrays: list[mx.array], rows: Rows, **template: mx.Dtype) -> Case:
    inputs = "x y" if len(arrays) > 1 else "x"
    return case("types.metal", name, inputs, arrays, rows, N, **template)


def _values(dtype: mx.Dtype, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values of a narrow type over many magnitudes, as float32, zeros and subnormals among them."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-6, 6, (2, N))
    x, y = ROUND[dtype](rng.standard_normal((2, N)) * scale)
    x[:4] = ROUND[dtype](np.array([0.0, 2.0**-20, 1.0, -65504.0]))
    y[y == 0] = 1
    return x, y


def _narrow(dtype: mx.Dtype) -> Case:
    a, b = _values(dtype, 10)
    rounded = ROUND[dtype]
    rows = {
        "+": rounded(a + b),
        "-": rounded(a - b),
        "*": rounded(a * b),
        "/": rounded(a / b),
        "negation": -a,
        "+= then *=": rounded(rounded(a + b) * b),
        "< and ?:": np.where(a < b, a, b),
        "==, !=, <=": (a == a).astype(_F32) + (a != b) + (a <= b),
        "through float": rounded((a.astype(np.float64) * b + 1).astype(_F32)),
        "times a float": rounded(a * _F32(0.1)),
        "from int": rounded(rounded(np.trunc(a)) + 3),
        "as_type": -a,
    }
    arrays = [mx.array(a).astype(dtype), mx.array(b).astype(dtype)]
    return _case("narrow_arithmetic", arrays, rows, T=dtype)


def _widening(dtype: mx.Dtype) -> Case:
    a, _ = _values(dtype, 11)
    y = np.random.default_rng(12).standard_normal(N).astype(_F32) + _F32(3)
    rows = {
        "narrow + float": a + y,
        "float * narrow": y * a,
        "float - narrow": y - a,
        "narrow / float": a / y,
        "float += narrow": y + a,
        "to float": a,
        "to narrow and back": ROUND[dtype](y),
        "narrow < float": (a < y).astype(_F32),
    }
    return _case("narrow_widening", [mx.array(a).astype(dtype), mx.array(y)], rows, T=dtype)


def _half() -> Case:
    rounded = ROUND[mx.float16]
    x = rounded(np.random.default_rng(13).standard_normal(N) * 4)
    b, c = rounded(np.array(0.1)), _F32(1.5)
    a = rounded(x + _F32(1))

    fused = rounded(a.astype(np.float64) * b + c)
    rows = {
        "float literal to half": rounded(x + b),
        "half literal": rounded(x * c),
        "half += float": a,
        "half4 arithmetic": rounded(rounded(2 * a + c) + rounded(4 * b + c)),
        "half4 from a half": np.full(N, 0.5 * c + c),
        "max": np.maximum(a, c),
        "fma": fused,
        "abs": np.abs(a),
    }
    return _case("half_alone", [mx.array(x).astype(mx.float16)], rows)


def _vectors() -> Case:
    # Small integers: every order of every sum is exact.
    v = np.random.default_rng(14).integers(-8, 8, (N, 4)).astype(_F32)
    x, y, z, w = v.T
    low = v[:, :2]
    u = np.stack([x + x, y + y, y, x], axis=1)
    picked = np.where(v < u, u, v)
    scaled = v.copy()
    scaled[:, 2] = 7
    scaled = scaled * 2 - np.array([0.5, 1.5, 2.5, 3.5], _F32)
    whole = u.astype(np.int64)
    whole = (whole << 2) | (whole & 3)
    word = (0x01020304 + np.arange(N)).astype(np.uint32).view(np.uint8).reshape(N, 4)
    clamped = np.clip(scaled, 0, 1)
    rows = {
        "components": x + y * z - w,
        "v.xy, v.zyx": low[:, 1] + 2 * z + 4 * x,
        "w.xy += ": u[:, 0] + 3 * u[:, 1],
        "w.zw = ": u[:, 2] + 3 * u[:, 3],
        "dot": (v * u).sum(1),
        "cross": z * u[:, 1] - x * u[:, 3],
        "abs": np.abs(v[:, :3]).sum(1),
        "select": picked[:, 0] - picked[:, 3],
        "all, any": 1 + 4 * (low != u[:, :2]).any(1),
        "v[i], *=, -=": scaled.sum(1),
        "int4": (whole[:, 0] + whole[:, 1] * 3),
        "uchar4": word[:, 0] + 256.0 * word[:, 3],
        "min, max, clamp": np.minimum(scaled, u)[:, 1]
        + np.maximum(scaled, u)[:, 2]
        + clamped[:, 3],
        "packed_float3": y + 12 + 16,
        "vec<float, 2>": scaled[:, 0] / 4 - u[:, 0] / 4,
        "negation, conversion": -u[:, 0] + 4,
    }
    flat = mx.array(v.ravel())
    return _case("vectors", [flat], rows)


def _bit_string(value: int, bits: int) -> str:
    return format(value & (2**bits - 1), f"0{bits}b")


def _integers(dtype: mx.Dtype) -> Case:
    bits, signed = 8 * dtype.size, dtype in (mx.int32, mx.int16)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    rng = np.random.default_rng(bits)
    pairs = rng.integers(low, high, (2, N))
    pairs[0, :6], pairs[1, :6] = (
        [0, 1, low, high - 1, low, high - 1],
        [0, 1, low, high - 1, 1, high - 1],
    )
    mask = 2**bits - 1

    def wrap(value: int) -> int:
        value &= mask
        return value - 2**bits if signed and value >= 2 ** (bits - 1) else value

    def saturated(value: int) -> int:
        return min(max(value, low), high - 1)

    def rotated(a: int, by: int) -> int:
        by %= bits
        return ((a & mask) << by | (a & mask) >> (bits - by)) if by else a

    def extracted(a: int) -> int:
        field = (a & mask) >> 3 & 31
        return field - 32 if signed and field >= 16 else field

    functions: dict[str, Callable[[int, int], int]] = {
        "popcount": lambda a, b: _bit_string(a, bits).count("1"),
        "clz": lambda a, b: bits - (a & mask).bit_length(),
        "ctz": lambda a, b: ((a & mask) & -(a & mask)).bit_length() - 1 if a else bits,
        "reverse_bits": lambda a, b: int(_bit_string(a, bits)[::-1], 2),
        "rotate": lambda a, b: rotated(a, b & 15),
        "mulhi": lambda a, b: (a * b) >> bits,
        "madhi": lambda a, b: ((a * b) >> bits) + 5,
        "addsat": lambda a, b: saturated(a + b),
        "subsat": lambda a, b: saturated(a - b),
        "hadd": lambda a, b: (a + b) >> 1,
        "rhadd": lambda a, b: (a + b + 1) >> 1,
        "absdiff": lambda a, b: abs(a - b),
        "min": min,
        "max": max,
        "clamp": lambda a, b: min(max(a, 3), 50),
        "extract_bits": lambda a, b: extracted(a),
        "insert_bits": lambda a, b: (a & ~(63 << 2)) | ((b & 63) << 2),
        "select": lambda a, b: b if a > b else a,
        "median3": lambda a, b: sorted((a, b, 7))[1],
        "* + ^ - | ~ &": lambda a, b: a * b + (a ^ b) - (a | b) + (~a & b),
    }
    rows = {
        name: np.array([wrap(f(int(a), int(b))) for a, b in pairs.T])
        for name, f in functions.items()
    }
    arrays = [mx.array(ROUND[dtype](p)) for p in pairs]
    return _case("integers", arrays, rows, T=dtype)


def _integers_24() -> Case:
    x, y = np.random.default_rng(15).integers(-(10**6), 10**6, (2, N))
    a, b = np.fmod(x, 2000), np.fmod(y, 2000)
    divisor = np.where(b == 0, 1, b)
    rows = {
        "mul24": a * b,
        "mad24": a * b + 17,
        "/": np.trunc(a / divisor).astype(np.int64),
        "%": np.fmod(a, divisor),
        "abs": np.abs(a),
        ">>": a >> 3,
    }
    return _case("integers_24", [mx.array(v.astype(np.int32)) for v in (x, y)], rows)


def _bits() -> Case:
    x = np.random.default_rng(16).integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
    x[:5] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000, 0x80000000]
    # A signalling NaN may come back quiet: none among the inputs.
    x[(x & 0x7F800000) == 0x7F800000] |= 0x00400000
    x[:2] = [0x7F800000, 0xFF800000]
    f = x.view(np.float32)
    rows = {
        "float": x,
        "ushort2": x,
        "uchar4": x.view(np.uint8).reshape(N, 4).sum(1),
        "int": x.view(np.int32) >> 4,
        "ulong from uint2": ((x.astype(np.uint64) | np.uint64(2**32)) >> np.uint64(1)) & 0xFFFFFFFF,
        "isnan, isinf": np.isnan(f) + 2 * np.isinf(f),
        "signbit, isfinite": np.signbit(f) + 2 * np.isfinite(f),
    }
    rows = {name: ROUND[mx.uint32](row) for name, row in rows.items()}
    return _case("bit_patterns", [mx.array(x)], rows)
