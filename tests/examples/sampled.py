"""Random calls of what samples images and volumes, and their results in float64."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import GridSample, affine_grid
from mlx_qlayers.ops.deform_conv2d import deform_conv2d
from mlx_qlayers.ops.deformable_attention import _TAKES, deformable_attention
from mlx_qlayers.ops.grid_sample import _NAMES, grid_sample
from mlx_qlayers.ops.signature import Signature
from tests.examples.arrays import DTYPES, dtype_of, filled, placed
from tests.examples.calls import Call, Numbers, Random, declared
from tests.numerics import IN_FLOAT32, random, round_to

EXTENT = st.sampled_from([1, 2, 3, 17]) | st.integers(1, 9)
KINDS = ("float32",) * 3, st.tuples(DTYPES, DTYPES, DTYPES)


def pad(pixel: np.ndarray, size: int, padding: str, align: bool) -> np.ndarray:
    """Positions in float32, brought back in."""
    f, one = np.float32, np.float32(1)
    if padding == "zeros":
        return pixel
    if padding == "reflection":
        low, period = (f(0), f(2 * (size - 1))) if align else (f(-0.5), f(2 * size))
        if period == 0:
            return np.zeros_like(pixel)
        distance = np.abs(pixel - low)
        distance = distance - np.floor(distance / period) * period
        pixel = np.where(distance > period - distance, period - distance, distance) + low
    return np.clip(pixel, f(0), f(size) - one)


def cubic(t: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -0.75 at a distance."""
    a, t = -0.75, np.abs(t)
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    return np.where(t <= 1, near, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a)


def axis_taps(
    g: np.ndarray, size: int, case: SimpleNamespace
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions, -1 where outside, and weights along one axis; positions are float32's."""
    f = np.float32
    pixel = (g.astype(f) + f(1)) * f((size - 1 if case.align_corners else size) / 2)
    if not case.align_corners:
        pixel = f(0.5) * (f(2) * pixel - f(1))
    if case.mode != "bicubic":
        pixel = pad(pixel, size, case.padding_mode, case.align_corners)
    if case.mode == "nearest":
        steps = [(np.round(pixel), np.ones(g.shape))]
    else:
        low = np.floor(pixel)
        part = (pixel - low).astype(np.float64)
        taps = (0, 1) if case.mode == "bilinear" else (-1, 0, 1, 2)
        shares = (1 - part, part) if case.mode == "bilinear" else [cubic(part - k) for k in taps]
        steps = [(low + f(k), share) for k, share in zip(taps, shares, strict=True)]
    found = []
    for at, weight in steps:
        if case.mode == "bicubic" and case.padding_mode != "zeros":
            at = np.floor(pad(at, size, case.padding_mode, case.align_corners))
        inside = (at >= 0) & (at < size)
        found.append((np.where(inside, at, -1).astype(int), np.where(inside, weight, 0.0)))
    return found


def sampled(
    x: np.ndarray, grid: np.ndarray, case: SimpleNamespace
) -> tuple[np.ndarray, np.ndarray, Any]:
    """The samples in float64, their absolute terms, and each tap's pixels and weights."""
    size = x.shape[1:-1]
    axes = [axis_taps(grid[..., i], n, case) for i, n in enumerate(reversed(size))][::-1]
    images = np.arange(x.shape[0]).reshape(-1, *[1] * (grid.ndim - 2))
    out = np.zeros((*grid.shape[:-1], x.shape[-1]))
    terms, taps = np.zeros_like(out), []
    for corner in itertools.product(*axes):
        at = tuple(each[0] for each in corner)
        inside = np.logical_and.reduce([a >= 0 for a in at])
        weight = np.prod([each[1] for each in corner], axis=0)
        pixel = np.where(inside[..., None], x[(images, *at)], 0)
        out += pixel * weight[..., None]
        # Weights are polynomials whose terms cancel.
        large = [np.abs(each[1]) + (3 if case.mode == "bicubic" else 1) for each in corner]
        terms += np.abs(pixel) * np.prod(large, axis=0)[..., None]
        taps.append(((images, *at), np.where(inside, weight, 0)))
    return out, terms, taps


def _grid_sample(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, of_grid, _ = map(dtype_of, case.dtypes)
    ndim = len(case.size)
    out = (*case.out, 2)[:ndim]
    if ndim == 3 and case.mode == "bicubic":
        case.mode = "bilinear"
    points = rng.uniform(-1.3, 1.3, (case.batch, *out, ndim))
    if case.far:
        points *= rng.choice([1, 1, 50, 1000], points.shape)
    x = filled(rng, (case.batch, *case.size, case.channels), dtype, case.values)
    given = placed(("x", "grid"), (x, round_to(points, of_grid)), case.layouts)
    options: dict[str, Any] = {
        name: getattr(case, name)
        for name in ("mode", "padding_mode", "align_corners", "deterministic")
    }

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        # Positions are float32's, whatever adds up.
        x, grid = (n[name].astype(np.float64) for name in ("x", "grid"))
        y, terms, taps = sampled(x, grid, case)
        sure = np.isfinite(terms) & (terms < float(mx.finfo(dtype).max) / 4)
        found, terms = {"0": np.where(sure, y, 0)}, {"0": np.where(sure, terms, np.inf)}
        if up:
            total, large = np.zeros(x.shape), np.zeros(x.shape)
            for at, weight in taps:
                np.add.at(total, at, up[0] * weight[..., None])
                np.add.at(large, at, np.abs(up[0]))
            found["x"], terms["x"] = total, 4 * large.max()
        return found, terms

    function = (lambda x, grid, **_: GridSample(**options)(x, grid)) if case.layer else grid_sample
    shape = (case.batch, *out, case.channels)
    gradients = ["x", "grid"] if case.gradient and case.values == "normal" else []
    full = 0 not in (*given["x"].shape, *given["grid"].shape)
    return Call(function, given, options, shape, expected, gradients, full)


GRID_SAMPLE = Random(
    {
        "batch": [2, 1, 3, 0],
        "size": ((5, 7), st.tuples(EXTENT, EXTENT) | st.tuples(EXTENT, EXTENT, EXTENT)),
        "out": ((4, 6), st.tuples(*[st.integers(0, 6)] * 2)),
        "channels": [3, 1, 2, 4, 8, 17, 64, 0],
        "align_corners": [False, True],
        "deterministic": [False, True],
        "dtypes": KINDS,
        "far": [False, True],
        "values": ["normal", "normal", "zeros", "tiny", "special"],
        "layer": [False, True],
        "gradient": [False, True],
    }
    | declared(Signature("\n".join(_NAMES))),
    _grid_sample,
    [
        *(
            {"mode": mode, "padding_mode": padding, "dtypes": (dtype,) * 3, "gradient": True}
            for dtype, mode, padding in (
                ("float16", "bilinear", "zeros"),
                ("bfloat16", "nearest", "border"),
                ("float16", "bicubic", "reflection"),
                ("bfloat16", "bicubic", "border"),
                ("bfloat16", "bilinear", "reflection"),
            )
        ),
        *(
            {name: value, "gradient": True}
            for name, value in (("batch", 0), ("channels", 0), ("out", (0, 6)), ("out", (3, 0)))
        ),
        {"size": (2, 2, 2), "out": (3, 0), "gradient": True},
    ],
)


def _affine_grid(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    n, extents, dtype = len(case.size) - 2, case.size[1:-1], dtype_of(case.dtype)
    given = placed(("theta",), [random(rng, (case.size[0], n, n + 1), dtype)], case.layouts)

    def expected(numbers: Numbers, *_: Any) -> tuple[Numbers, Numbers]:
        theta = numbers["theta"].astype(np.float64)
        steps = [np.linspace(-1, 1, e) if e > 1 else np.zeros(1) for e in extents]
        if not case.align_corners:
            steps = [s * (e - 1) / e for s, e in zip(steps, extents, strict=True)]
        points = np.stack([*np.meshgrid(*steps, indexing="ij")][::-1], -1)
        truth = np.einsum("...j,nij->n...i", points, theta[..., :n])
        # Independent roundings: of each sum, and of a step, which are two, and its product.
        terms = np.sqrt(n + 3) * np.abs(theta).sum(-1).max(initial=0)
        return {"0": truth + theta[..., n].reshape(-1, *[1] * n, n)}, {"0": terms}

    options = {"size": case.size, "align_corners": case.align_corners}
    return Call(affine_grid, given, options, (*case.size[:-1], n), expected, by_kernel=False)


_SIDE = st.integers(1, 9)
AFFINE_GRID = Random(
    {
        "size": (
            (2, 3, 4, 1),
            st.tuples(st.integers(0, 9), _SIDE, _SIDE, st.just(1))
            | st.tuples(st.integers(0, 6), _SIDE, _SIDE, _SIDE, st.just(3)),
        ),
        "align_corners": [False, True],
        "dtype": ("float32", DTYPES),
    },
    _affine_grid,
    [{}, {"size": (0, 3, 4, 1)}],
)


def around(
    pixel: np.ndarray, size: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of positions (..., 2) the four neighbours, as x, y and share; outside a share is zero."""
    low = np.floor(pixel)
    part = (pixel - low).astype(np.float64)
    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1)):
        at = low + np.array([x, y])
        inside = ((at >= 0) & (at < size)).all(-1)
        at = np.clip(at, 0, size - 1).astype(int)
        share = np.abs(1 - x - part[..., 0]) * np.abs(1 - y - part[..., 1])
        yield at[..., 0], at[..., 1], share * inside


def expected_of(
    values: np.ndarray, locations: np.ndarray, weights: np.ndarray, case: SimpleNamespace
) -> tuple[np.ndarray, np.ndarray]:
    """The sums in float64 from positions in float32, and the absolute terms."""
    batch, queries, heads = weights.shape[:3]
    out = np.zeros((batch, queries, heads, values.shape[3]))
    terms, start, f = np.zeros_like(out), 0, np.float32
    image, head = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None]
    for level, (height, width) in enumerate(case.shapes):
        size = np.array([width, height])
        pixel = locations[:, :, :, level].astype(f) * f(size) - f(0.5)
        if case.padding_mode == "border":
            pixel = np.clip(pixel, 0, f(size - 1))
        for x, y, share in around(pixel, size):
            picked = values[image, start + y * width + x, head]
            out += (picked * (share * weights[:, :, :, level])[..., None]).sum(3)
            terms += np.abs(picked * weights[:, :, :, level][..., None]).sum(3)
        start += height * width
    return tuple(a.reshape(batch, queries, -1) for a in (out, terms))


def _deformable_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    kinds = [dtype_of(d) for d in case.dtypes]
    batch, queries, heads = case.rows
    pixels = sum(h * w for h, w in case.shapes)
    samples = (*case.rows, len(case.shapes), case.points)
    reach = rng.uniform(0.5 - case.reach, 0.5 + case.reach, (*samples, 2))
    values = random(rng, (batch, pixels, heads, case.width), kinds[0])
    names = "values", "locations", "weights"
    operands = values, round_to(reach, kinds[1]), random(rng, samples, kinds[2])
    given = placed(names, operands, case.layouts)

    def expected(n: Numbers, *_: Any) -> tuple[Numbers, Numbers]:
        y, terms = expected_of(*(n[name].astype(np.float64) for name in names), case)
        # Far away a float32 has few digits for the part between two pixels.
        return {"0": y}, {"0": case.reach * 9 * 8 * terms.max(initial=0)}

    options = {"shapes": case.shapes, "padding_mode": case.padding_mode}
    shape = batch, queries, heads * case.width
    full = all(a.size for a in given.values())
    return Call(deformable_attention, given, options, shape, expected, names, full)


DEFORMABLE_ATTENTION = Random(
    {
        "shapes": (
            ((5, 7), (3, 2)),
            st.lists(st.tuples(_SIDE, _SIDE), min_size=1, max_size=4).map(tuple),
        ),
        "rows": ((2, 5, 3), st.tuples(st.integers(0, 3), st.integers(0, 17), st.integers(1, 3))),
        "width": [8, 1, 33],
        "points": [2, 1, 3],
        "dtypes": KINDS,
        "reach": [0.6, 2.0, 50.0],
    }
    | declared(_TAKES),
    _deformable_attention,
    [
        {},
        {"dtypes": ("bfloat16", "float32", "float16"), "padding_mode": "border", "reach": 2.0},
        *({"rows": rows} for rows in ((0, 5, 3), (2, 0, 3))),
        {"width": 0},
        {"points": 0},
    ],
)


def convolved(
    x: np.ndarray, offset: np.ndarray, mask: np.ndarray, weight: np.ndarray, case: SimpleNamespace
) -> np.ndarray:
    """The products in float64, without a bias, from positions in float32."""
    parts, groups = case.groups
    batch, height, width, channels = x.shape
    _, down, across, _ = offset.shape
    kh, kw = case.kernel
    moves = offset.reshape(batch, down, across, groups, kh, kw, 2).astype(np.float32)
    shares = mask.reshape(batch, down, across, groups, kh, kw)
    values = x.reshape(batch, height, width, groups, -1)
    image = np.arange(batch)[:, None, None, None]
    sampled = np.zeros((batch, down, across, kh, kw, channels))
    for i, j in np.ndindex(kh, kw):
        rows, columns = (
            np.arange(n) * s - p + k * d
            for n, s, p, k, d in zip(
                (down, across), case.stride, case.padding, (i, j), case.dilation, strict=True
            )
        )
        move = moves[..., i, j, :]
        pixel = np.stack(
            [columns[:, None] + move[..., 1], rows[:, None, None] + move[..., 0]], -1
        ).astype(np.float32)
        for at_x, at_y, share in around(pixel, np.array([width, height])):
            picked = values[image, at_y, at_x, np.arange(groups)]
            picked = picked * (share * shares[..., i, j])[..., None]
            sampled[:, :, :, i, j] += picked.reshape(batch, down, across, channels)
    sampled = sampled.reshape(batch, down, across, kh, kw, parts, -1)
    weight = weight.reshape(parts, -1, *weight.shape[1:])
    return np.einsum("byxijpd,poijd->byxpo", sampled, weight).reshape(batch, down, across, -1)


def _deform_conv2d(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    kinds = [dtype_of(d) for d in case.dtypes]
    (batch, *extents), (parts, groups) = case.image, case.groups
    taps, outputs = int(np.prod(case.kernel)), 2 * parts
    channels = parts * groups * case.depth
    options: dict[str, Any] = {n: getattr(case, n) for n in ("stride", "padding", "dilation")}
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(extents, case.kernel, *options.values(), strict=True)
    ]
    offsets = rng.uniform(-case.reach, case.reach, (batch, *size, 2 * taps * groups))
    names = "x", "offset", "weight", "bias", "mask"
    operands = (
        random(rng, (batch, *extents, channels), kinds[0]),
        round_to(offsets, kinds[1]),
        random(rng, (outputs, *case.kernel, channels // parts), kinds[0]),
        random(rng, (outputs,), kinds[0]) if case.bias else None,
        random(rng, (batch, *size, taps * groups), kinds[2]) if case.mask else None,
    )
    given = placed(names, operands, case.layouts)

    def expected(n: Numbers, *_: Any) -> tuple[Numbers, Numbers]:
        x, offset, weight = (n[name].astype(np.float64) for name in names[:3])
        shares = n.get("mask", np.ones((batch, *size, taps * groups)))
        bias = n.get("bias", np.zeros(outputs))
        truth = convolved(x, offset, shares, weight, case) + bias
        terms = convolved(np.abs(x), offset, np.abs(shares), np.abs(weight), case) + np.abs(bias)
        # Samples and products are rounded to the dtype on the way. Equal terms, added one after
        # the other, lose more: the squares of all sums up to the last.
        grown = max(1.0, (weight[0].size / 3) ** 0.5)
        return {"0": truth}, {"0": 2 * IN_FLOAT32[kinds[0]] * grown * terms.max(initial=0)}

    full = given["x"].size > 0
    shape = (batch, *size, outputs)
    return Call(deform_conv2d, given, options, shape, expected, names, full)


_ONE_OR_TWO, _SMALL = st.integers(1, 2), st.integers(1, 3)
_TWO = st.tuples(_ONE_OR_TWO, _ONE_OR_TWO)
DEFORM_CONV2D = Random(
    {
        "image": ((2, 6, 5), st.tuples(_ONE_OR_TWO, EXTENT, EXTENT)),
        "kernel": ((3, 3), st.tuples(_SMALL, _SMALL)),
        # Of channels, and of offsets.
        "groups": ((1, 1), st.tuples(_ONE_OR_TWO, _SMALL)),
        "depth": [2, 1, 3],
        "stride": ((1, 1), _TWO),
        "padding": ((2, 2), st.tuples(st.integers(2, 4), st.integers(2, 4))),
        "dilation": ((1, 1), _TWO),
        "bias": [False, True],
        "mask": [False, True],
        "dtypes": KINDS,
        "reach": [1.0, 0.0, 30.0],
    },
    _deform_conv2d,
    [
        {"kernel": (1, 1), "depth": 3, "mask": True, "dtypes": (dtype, "float32", "float32")}
        for dtype in ("float16", "bfloat16")
    ]
    + [{"image": (0, 5, 6)}],
)
