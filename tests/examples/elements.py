"""Random calls of operations element by element: exp, gates, and rotary embedding."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.ops.exp import _TAKES, Exp, exp
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.ops.swiglu import swiglu
from tests.examples import arrays
from tests.examples.arrays import DTYPES, dtype_of, filled, laid_out, placed
from tests.examples.calls import Call, Numbers, Random, declared
from tests.numerics import IN_FLOAT32, ROUNDINGS, random, round_to, to64


def _exp(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    x = laid_out(filled(rng, case.shape, dtype_of(case.dtype), case.values), case.layouts[0])

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        y = np.exp(n["x"])
        once = to64(round_to(y, x.dtype)) if n["x"].dtype == np.float32 else y
        found = {"0": y, "x": once * up[0]}
        # MLX's own operator is not as exact as a kernel of this package.
        loose = ROUNDINGS[mx.float32] * stock
        most = float(mx.finfo(x.dtype).max) * 0.99
        d_terms = np.where(y < most, np.abs(found["x"]) * loose, np.inf)
        found["x"] = np.where(y < most, found["x"], 0)
        return found, {"0": y * loose, "x": d_terms}

    function = (lambda x, **_: Exp()(x)) if case.layer else exp
    options = {"strided": case.strided}
    return Call(function, {"x": x}, options, case.shape, expected, ["x"], x.size > 0)


_SHAPES = [(), (0,), (1,), (7,), (8,), (0, 3), (3, 0, 2), (7, 41), (257,), (2, 3, 4, 5)]
EXP = Random(
    {
        "shape": (
            (5, 9),
            st.sampled_from(_SHAPES) | st.lists(st.integers(0, 9), max_size=6).map(tuple),
        ),
        "dtype": ("float32", DTYPES),
        "values": ("normal", arrays.VALUES),
        "layer": [False, True],
    }
    | declared(_TAKES),
    _exp,
    [
        {"shape": shape, "dtype": dtype, "strided": i % 2 == 1, "layer": i == 3}
        for i, shape in enumerate(_SHAPES)
        for dtype in ("float32", "float16", "bfloat16")
    ],
)


def _swiglu(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    both = [filled(rng, case.shape, dtype_of(case.dtype), case.values) for _ in range(2)]
    given = placed(("gate", "x"), both, case.layouts)

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        gate, x = n["gate"], n["x"]
        share = 1 / (1 + np.exp(-gate))
        slope = share * (1 + gate * (1 - share))
        found = {"0": gate * share * x, "gate": up[0] * (x * slope), "x": up[0] * (gate * share)}
        # MLX's own operators round each result, and the slope is a difference near its zero. Their
        # products on the way may be more than a float holds.
        loose = ROUNDINGS[both[0].dtype] * IN_FLOAT32[both[0].dtype] * (4 if stock else 1)
        if stock:
            most = mx.finfo(both[0].dtype).max ** 0.5
            loose = np.where(np.maximum(np.abs(gate), np.abs(x)) < most, loose, np.inf)
        return found, {
            "0": np.abs(found["0"]) * loose,
            "gate": np.abs(up[0] * x) * (share + np.abs(gate * share)) * loose,
            "x": np.abs(found["x"]) * loose,
        }

    return Call(swiglu, given, {}, case.shape, expected, ["gate", "x"], both[0].size > 0)


SWIGLU = Random(
    {"shape": EXP.fields["shape"], "dtype": EXP.fields["dtype"], "values": EXP.fields["values"]},
    _swiglu,
    [
        {"shape": shape, "dtype": dtype}
        for shape in _SHAPES
        for dtype in ("float32", "float16", "bfloat16")
    ],
)


def rotated(
    x: np.ndarray,
    offset: Any,
    dims: int,
    traditional: bool = False,
    base: float | None = 10000.0,
    scale: float = 1.0,
    freqs: mx.array | None = None,
) -> np.ndarray:
    """(B, L, H, D) to (B, H, L, D), with every number in the dtype of ``x``."""
    kind, y = x.dtype.type, x.swapaxes(1, 2).copy()
    if not dims:
        return y
    start = np.broadcast_to(np.array(offset), x.shape[:1])
    positions = (start[:, None] + np.arange(x.shape[1])).astype(kind) * kind(scale)
    if freqs is None:
        rates = np.exp2(-np.log2(kind(base)) * np.arange(0, dims, 2).astype(kind) / kind(dims))
    else:
        rates = kind(1) / to64(freqs).astype(kind)
    angle = (positions[..., None] * rates.astype(kind))[:, None]
    return pairs_rotated(y, np.cos(angle), np.sin(angle), dims, traditional)


def pairs_rotated(
    x: np.ndarray, c: np.ndarray, s: np.ndarray, dims: int, traditional: bool = False
) -> np.ndarray:
    """The leading ``dims`` elements, rotated by angles with these cosines and sines."""
    y, half = x.copy(), dims // 2
    first, second = slice(half), slice(half, dims)
    if traditional:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


def frequencies(case: SimpleNamespace, rng: np.random.Generator, dims: int) -> mx.array | None:
    return mx.abs(random(rng, (dims // 2,))) * 50 + 1 if case.base is None else None


def _rotary(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, dims = dtype_of(case.dtype), min(case.dims, case.width // 2 * 2)
    rows = [random(rng, (case.batch, case.length, n, case.width), dtype) for n in case.heads]
    freqs = frequencies(case, rng, dims)
    given = placed(("q", "k", "freqs"), (*rows, freqs), case.layouts)
    starts = case.offsets[0] if case.kind == "one" else [*case.offsets[: case.batch]]
    given["offset"] = mx.array(starts, dtype_of("int32" if case.kind == "one" else case.kind))
    turns = {"traditional": case.traditional, "base": case.base, "freqs": given["freqs"]}

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        ways = [("0", n["q"], 1), ("1", n["k"], 1)]
        # The gradient is the rotation by the opposite angle.
        ways += [(name, y.swapaxes(1, 2), -1) for name, y in zip("qk", up, strict=False)]
        found, terms = {}, {}
        # MLX's own operator computes angles in float32, and some roundings more.
        angle = (np.max(starts, initial=0) + case.length) * abs(case.scale)
        loose = ROUNDINGS[dtype] * IN_FLOAT32[dtype] + 4 * angle
        for name, x, way in ways:
            y = rotated(x, starts, dims, scale=way * case.scale, **turns)
            found[name] = y if way > 0 else y.swapaxes(1, 2)
            # Ours: a unit of the sine and half of one each of product and sum, twice as many as one
            # rounding; |a cos| + |b sin| is no more than the length of a pair.
            often = loose if stock or way < 0 else 2 * np.sqrt(2)
            terms[name] = np.abs(x).max(initial=0) * often * (dims > 0)
        return found, terms

    shape = case.batch, case.heads[0], case.length, case.width
    options = {"dims": dims, "scale": case.scale, "base": case.base}
    options |= {"traditional": case.traditional}
    full = 0 not in (*rows[0].shape, *rows[1].shape, dims)
    gradients = ["q", "k"] if case.gradient else []
    return Call(rotary_embedding, given, options, shape, expected, gradients, full)


_INT = st.integers(0, 50) | st.just(100_000)
ROTARY = Random(
    {
        "batch": [2, 0, 1, 3, 4],
        "length": [3, 0, 1, 2, 4, 5, 70],
        "heads": ((4, 2), st.tuples(*[st.integers(0, 5)] * 2)),
        "width": (24, st.integers(0, 41) | st.sampled_from([64, 128])),
        "dims": (24, st.integers(0, 64).map(lambda n: 2 * n)),
        "offsets": ((5, 0, 4000, 9), st.tuples(*[_INT] * 4)),
        "kind": ["int32", "int64", "uint32", "one"],
        "traditional": [False, True],
        "base": [10000.0, None, 1.5, 500.0, 1e6],
        "scale": [1.0, 0.25, 4.0, -1.0, 0.0],
        "dtype": ("float32", DTYPES),
        "gradient": [False, True],
    },
    _rotary,
    [
        change | {"dtype": ("float32", "float16", "bfloat16")[(i + j) % 3]}
        for i, change in enumerate(
            (
                {"batch": 1, "length": 1, "width": 40, "dims": 40, "offsets": (100_000,)}
                | {"kind": "one", "base": 5e5},
                {"batch": 3, "length": 1, "heads": (3, 3), "traditional": True, "gradient": True},
                {"heads": (6, 2), "width": 41, "scale": 0.25, "length": 5, "gradient": True},
                {"batch": 1, "heads": (5, 1), "width": 30, "base": None, "kind": "one"},
                {"batch": 4, "length": 2, "width": 8, "dims": 8, "kind": "int64"},
            )
        )
        for j in range(2)
    ]
    + [{"batch": 0}, {"length": 0}, {"heads": (0, 2)}, {"width": 0}, {"dims": 0}],
)
