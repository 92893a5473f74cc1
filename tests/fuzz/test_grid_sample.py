"""Grid sampling: random calls against numpy, and calls as they should not be."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import GridSample, affine_grid, grid_sample
from tests.fuzz import arrays
from tests.fuzz.target import fuzz
from tests.numerics import assert_accurate, random, round_to, to64

MODES = st.sampled_from(["bilinear", "bilinear", "nearest", "bicubic"])
PADDING = st.sampled_from(["zeros", "border", "reflection"])
EXTENT = st.one_of(st.sampled_from([1, 2, 3, 17]), st.integers(1, 9))


SAMPLES = st.integers(2, 3).flatmap(
    lambda ndim: st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        batch=st.sampled_from([1, 2, 3, 0]),
        size=st.tuples(*[EXTENT] * ndim),
        out=st.tuples(*[st.integers(0, 6)] * ndim),
        channels=st.sampled_from([1, 2, 3, 4, 8, 17, 64, 0]),
        mode=MODES if ndim == 2 else st.sampled_from(["bilinear", "nearest"]),
        padding_mode=PADDING,
        align_corners=st.booleans(),
        deterministic=st.booleans(),
        dtypes=st.tuples(arrays.DTYPES, arrays.DTYPES),
        far=st.booleans(),
        values=st.sampled_from(["normal", "normal", "zeros", "tiny", "special"]),
        layouts=st.tuples(arrays.LAYOUTS, arrays.LAYOUTS),
        layer=st.booleans(),
        backend=arrays.BACKENDS,
        gradient=st.booleans(),
    )
)


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


@fuzz(SAMPLES)
def test_grid_sample(case: SimpleNamespace) -> None:
    rng, (dtype, of_grid) = np.random.default_rng(case.seed), map(arrays.dtype_of, case.dtypes)
    x = arrays.filled(rng, (case.batch, *case.size, case.channels), dtype, case.values)
    points = rng.uniform(-1.3, 1.3, (case.batch, *case.out, len(case.size)))
    if case.far:
        points *= rng.choice([1, 1, 50, 1000], points.shape)
    grid = round_to(points, of_grid)
    x, grid = (
        arrays.laid_out(a, layout) for a, layout in zip((x, grid), case.layouts, strict=True)
    )
    options: Any = {"mode": case.mode, "padding_mode": case.padding_mode}
    options |= {"align_corners": case.align_corners, "deterministic": case.deterministic}
    function: Any = GridSample(**options) if case.layer else partial(grid_sample, **options)
    dy = random(rng, (*grid.shape[:-1], case.channels), dtype)
    with arrays.running(case.backend):
        if case.gradient and case.values == "normal":
            (y,), gradients = mx.vjp(lambda *a: [function(*a)], [x, grid], [dy])
        else:
            y, gradients = function(x, grid), []
        mx.eval(y, gradients)
    assert y.shape == dy.shape and y.dtype == dtype
    if not y.size:
        return
    with np.errstate(all="ignore"):
        truth, terms, taps = sampled(to64(x), to64(grid), case)
    sure = np.isfinite(terms) & (terms < float(mx.finfo(dtype).max) / 4)
    if sure.any():
        found = mx.array(to64(y)[sure].astype(np.float32)).astype(dtype)
        most = terms[sure].max()
        least = 2.0**-14 if dtype == mx.float16 else 2.0**-126
        if (np.abs(to64(found) - truth[sure]) > least).any():
            base = round_to(truth[sure], dtype)
            assert_accurate(found, truth[sure], base, terms=most, what=f"{case}")
    if gradients:
        assert gradients[0].shape == x.shape and gradients[1].shape == grid.shape
        total, sums = np.zeros(x.shape), np.zeros(x.shape)
        for at, weight in taps:
            np.add.at(total, at, to64(dy) * weight[..., None])
            np.add.at(sums, at, np.abs(to64(dy)))
        base, most = round_to(total, dtype), 4 * sums.max()
        what = f"gradient of x of {case}"
        assert_accurate(gradients[0], total, base, terms=most, what=what)
        assert np.isfinite(to64(gradients[1])).all()


SIZES = st.one_of(st.tuples(*[st.integers(0, 9)] * 4), st.tuples(*[st.integers(0, 6)] * 5))


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        size=SIZES,
        align_corners=st.booleans(),
        dtype=arrays.DTYPES,
        layout=arrays.LAYOUTS,
    ),
    examples=60,
)
def test_affine_grid(case: SimpleNamespace) -> None:
    rng, n, dtype = (
        np.random.default_rng(case.seed),
        len(case.size) - 2,
        arrays.dtype_of(case.dtype),
    )
    theta = arrays.laid_out(random(rng, (case.size[0], n, n + 1), dtype), case.layout)
    if 0 in case.size[1:-1]:
        return
    steps = [np.linspace(-1, 1, e) if e > 1 else np.zeros(1) for e in case.size[1:-1]]
    if not case.align_corners:
        steps = [s * (e - 1) / e for s, e in zip(steps, case.size[1:-1], strict=True)]
    points = np.stack([*np.meshgrid(*steps, indexing="ij")][::-1], -1)
    truth = np.einsum("...j,nij->n...i", points, to64(theta)[..., :n])
    truth = truth + to64(theta)[..., n].reshape(-1, *[1] * n, n)
    # Independent roundings: of each sum, and of a step, which are two, and its product.
    terms = np.sqrt(n + 3) * np.abs(to64(theta)).sum(-1).max(initial=0)
    found = affine_grid(theta, case.size, case.align_corners)
    assert_accurate(found, truth, round_to(truth, dtype), terms=terms, what=f"{case}")
