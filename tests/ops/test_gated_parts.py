"""Gated feed-forward modules of many rows in parts that share the memory of dense weights."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.ops import gated_parts as ops
from tests.numerics import EPSILON, FACTOR, random, to64

FORMATS = [((64, 4, "affine"), (32, 8, "affine")), ((32, 4, "mxfp4"), (16, 4, "nvfp4"))]


@mock.patch.object(ops, "MOST_DENSE", 64 * 256 * 2)
def check(formats, rows, dtype=mx.bfloat16):
    """Of gate, up and down 64 rows at a time."""
    rng, k, width = np.random.default_rng(rows), 128, 192
    packed, dense = [], []
    for shape, fmt in zip(
        ((width, k), (width, k), (k, width)), (*formats[:1] * 2, formats[1]), strict=True
    ):
        group_size, bits, mode = fmt
        arrays = mx.quantize(random(rng, shape, dtype) / 8, group_size, bits, mode)
        packed += [*arrays, *[None] * (4 - len(arrays))]
        dense.append(to64(mx.dequantize(*arrays, group_size=group_size, bits=bits, mode=mode)))
    x, h = (random(rng, (rows, k), dtype) for _ in range(2))
    memory = ops.memory_of(x, width, x)
    found, pieces = ops.gated_parts(
        x, h, packed, tuple(Format(*f) for f in formats), "silu", memory
    )
    assert len(pieces) == len(ops.parts_of(width, 2 * k)) == 3
    for piece in pieces:
        mx.eval(piece)
    gate, up = to64(x) @ dense[0].T, to64(x) @ dense[1].T
    gated = gate / (1 + np.exp(-gate)) * up
    exact = to64(h) + gated @ dense[2].T
    # Rounded are both products, the gated rows, their product and the sum.
    unit = EPSILON[dtype] * (3 * np.abs(gated) @ np.abs(dense[2].T) + np.abs(exact) * 2)
    assert (np.abs(to64(found) - exact) <= FACTOR * unit).all()


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_against_float64(formats):
    with use_backend("host"):  # checks let nobody write into an input
        check(formats, 33)


@pytest.mark.cuda
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_on_cuda(formats):
    check(formats, 1033)
