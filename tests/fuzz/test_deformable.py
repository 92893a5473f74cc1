"""Deformable attention and convolution: random calls against numpy, and spoilt ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import deform_conv2d, deformable_attention
from tests.fuzz import arrays
from tests.fuzz.target import fuzz
from tests.numerics import assert_accurate, random, round_to, to64

EXTENT = st.integers(1, 9)
CALLS = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    shapes=st.lists(st.tuples(EXTENT, EXTENT), min_size=1, max_size=4).map(tuple),
    rows=st.tuples(st.integers(0, 3), st.integers(0, 17), st.integers(1, 3)),
    width=st.sampled_from([1, 8, 33]),
    points=st.sampled_from([1, 2, 3]),
    padding_mode=st.sampled_from(["zeros", "border"]),
    dtypes=st.tuples(arrays.DTYPES, arrays.DTYPES, arrays.DTYPES),
    reach=st.sampled_from([0.6, 2.0, 50.0]),
    layouts=st.tuples(arrays.LAYOUTS, arrays.LAYOUTS, arrays.LAYOUTS),
    backend=arrays.BACKENDS,
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


def expected(
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


@fuzz(CALLS)
def test_deformable_attention(case: SimpleNamespace) -> None:
    rng, dtypes = np.random.default_rng(case.seed), list(map(arrays.dtype_of, case.dtypes))
    batch, _, heads = case.rows
    pixels, samples = (
        sum(h * w for h, w in case.shapes),
        (*case.rows, len(case.shapes), case.points),
    )
    operands = [
        random(rng, (batch, pixels, heads, case.width), dtypes[0]),
        round_to(rng.uniform(0.5 - case.reach, 0.5 + case.reach, (*samples, 2)), dtypes[1]),
        random(rng, samples, dtypes[2]),
    ]
    operands = [
        arrays.laid_out(a, layout) for a, layout in zip(operands, case.layouts, strict=True)
    ]

    def run(values: mx.array, *others: mx.array) -> list[mx.array]:
        options: Any = {"padding_mode": case.padding_mode}
        return [deformable_attention(values, case.shapes, *others, **options)]

    dy = mx.ones((*case.rows[:2], heads * case.width), dtypes[0])
    with arrays.running(case.backend):
        (y,), gradients = mx.vjp(run, operands, [dy])
        mx.eval(y, gradients)
    assert y.shape == dy.shape and y.dtype == dtypes[0]
    assert [g.shape for g in gradients] == [a.shape for a in operands]
    if y.size:
        truth, terms = expected(*map(to64, operands), case)
        # Far away a float32 has few digits for the part between two pixels.
        unit = case.reach * 9 * 8
        rounded = round_to(truth, dtypes[0])
        assert_accurate(y, truth, rounded, terms=unit * terms.max(initial=0), what=f"{case}")


ONE_OR_TWO, SMALL = st.integers(1, 2), st.integers(1, 3)
CONVOLUTIONS = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    image=st.tuples(ONE_OR_TWO, EXTENT, EXTENT),
    kernel=st.tuples(SMALL, SMALL),
    # Of channels, and of offsets.
    groups=st.tuples(ONE_OR_TWO, SMALL),
    depth=SMALL,
    stride=st.tuples(ONE_OR_TWO, ONE_OR_TWO),
    padding=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    dilation=st.tuples(ONE_OR_TWO, ONE_OR_TWO),
    bias=st.booleans(),
    mask=st.booleans(),
    dtypes=st.tuples(arrays.DTYPES, arrays.DTYPES, arrays.DTYPES),
    reach=st.sampled_from([0.0, 1.0, 30.0]),
    layouts=st.tuples(arrays.LAYOUTS, arrays.LAYOUTS, arrays.LAYOUTS),
    backend=arrays.BACKENDS,
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


@fuzz(CONVOLUTIONS)
def test_deform_conv2d(case: SimpleNamespace) -> None:
    rng, dtypes = np.random.default_rng(case.seed), list(map(arrays.dtype_of, case.dtypes))
    (batch, *extents), (parts, groups), taps = case.image, case.groups, np.prod(case.kernel)
    channels, outputs = parts * groups * case.depth, 2 * parts
    options: Any = {name: getattr(case, name) for name in ("stride", "padding", "dilation")}
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(extents, case.kernel, *options.values(), strict=True)
    ]
    offsets = rng.uniform(-case.reach, case.reach, (batch, *size, 2 * taps * groups))
    given = [
        random(rng, (batch, *extents, channels), dtypes[0]),
        round_to(offsets, dtypes[1]),
        random(rng, (outputs, *case.kernel, channels // parts), dtypes[0]),
    ]
    given = [arrays.laid_out(a, layout) for a, layout in zip(given, case.layouts, strict=True)]
    bias = random(rng, (outputs,), dtypes[0])
    mask = random(rng, (batch, *size, taps * groups), dtypes[2]) if case.mask else None
    names = ["x", "offset", "weight", *["bias"] * case.bias, *["mask"] * case.mask]
    given += [bias] * case.bias + [mask] * case.mask

    def run(*values: mx.array) -> list[mx.array]:
        return [deform_conv2d(**dict(zip(names, values, strict=True)), **options)]

    dy = mx.ones((batch, *size, outputs), dtypes[0])
    with arrays.running(case.backend):
        (y,), gradients = mx.vjp(run, given, [dy])
        mx.eval(y, gradients)
    assert y.shape == dy.shape and y.dtype == dtypes[0]
    assert [g.shape for g in gradients] == [a.shape for a in given]
    x, offset, weight = map(to64, given[:3])
    shares = to64(mask) if case.mask else np.ones((batch, *size, taps * groups))
    truth = convolved(x, offset, shares, weight, case)
    terms = convolved(np.abs(x), offset, np.abs(shares), np.abs(weight), case)
    if case.bias:
        truth, terms = truth + to64(bias), terms + np.abs(to64(bias))
    # Samples and products are rounded to the dtype on the way.
    unit = mx.finfo(dtypes[0]).eps / mx.finfo(mx.float32).eps
    # Equal terms, added one after the other, lose more: the squares of all sums up to the last.
    grown = max(1.0, (weight[0].size / 3) ** 0.5)
    rounded = round_to(truth, dtypes[0])
    assert_accurate(y, truth, rounded, terms=2 * unit * grown * terms.max(), what=f"{case}")
