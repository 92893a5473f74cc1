"""Deformable attention and convolution: random calls against numpy, and spoilt ones."""

from __future__ import annotations

from functools import partial
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
        low = np.floor(pixel)
        part = (pixel - low).astype(np.float64)
        for x, y in ((0, 0), (1, 0), (0, 1), (1, 1)):
            at = low + np.array([x, y])
            inside = ((at >= 0) & (at < size)).all(-1)
            at = np.clip(at, 0, size - 1).astype(int)
            picked = values[image, start + at[..., 1] * width + at[..., 0], head]
            share = np.abs(1 - x - part[..., 0]) * np.abs(1 - y - part[..., 1])
            share = (share * inside * weights[:, :, :, level])[..., None]
            out += (picked * share).sum(3)
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


ATTEND = ["values", "shapes", "locations", "weights", "padding_mode"]
CONVOLVE = ["x", "offset", "weight", "bias", "mask", "stride", "padding", "dilation"]


@fuzz(arrays.changes(ATTEND), examples=40)
def test_deformable_attention_refuses(changed: dict[str, str]) -> None:
    arguments = {
        "values": mx.ones((2, 26, 3, 4)),
        "shapes": ((4, 5), (2, 3)),
        "locations": mx.full((2, 5, 3, 2, 2, 2), 0.5),
        "weights": mx.ones((2, 5, 3, 2, 2)),
        "padding_mode": "zeros",
    }
    arrays.same_answers(partial(deformable_attention, **arrays.spoilt(arguments, changed)))


@fuzz(arrays.changes(CONVOLVE), examples=40)
def test_deform_conv2d_refuses(changed: dict[str, str]) -> None:
    arguments = {
        "x": mx.ones((2, 5, 6, 4)),
        "offset": mx.zeros((2, 5, 6, 18)),
        "weight": mx.ones((3, 3, 3, 4)),
        "bias": mx.ones(3),
        "mask": mx.ones((2, 5, 6, 9)),
        "stride": 1,
        "padding": 1,
        "dilation": 1,
    }
    arrays.same_answers(partial(deform_conv2d, **arrays.spoilt(arguments, changed)))
