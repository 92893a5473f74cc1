"""qvm, the product of vectors with a plain quantized matrix, against float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qvm import qvm_config
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.gpus import HERE, on_gpus
from tests.launchers import qvm
from tests.numerics import random
from tests.packed import DTYPES, FORMATS, check_product, random_packed
from tests.pairwise import in_turn, pairwise

AFFINE = Format(64, 4)
# Rows of x and of the matrix, and groups of columns.
SHAPES = [(1, 41, 3), (3, 8, 1), (7, 520, 1), (16, 1, 3)]


def sample(rng, rows, k, groups, fmt, dtype):
    packed = random_packed(rng, k, max(groups * fmt.group_size, 32), fmt, dtype)
    return random(rng, (rows, k), dtype), packed


def by_kernel(x, packed, fmt, bias=None, device="host", **changes):
    config = replace(qvm_config(device, len(x), fmt.dims(packed[0]), x.shape[1], fmt), **changes)
    with use_backend(HERE):
        return qvm(x, *packed, bias, fmt, config)


def check_all(fmt, dtype, shapes=SHAPES, **options):
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size)
    for shape in shapes:
        x, packed = sample(rng, *shape, fmt, dtype)
        check_product(by_kernel(x, packed, fmt, **options), x, packed, fmt, False)


@pytest.mark.parametrize(
    ("fmt", "dtype", "shapes"),
    in_turn(pairwise(FORMATS), DTYPES, (SHAPES[:2], SHAPES[2:])),
    ids=str,
)
def test_every_format(fmt, dtype, shapes):
    check_all(fmt, dtype, shapes)


@on_gpus
@pytest.mark.parametrize(("fmt", "dtype"), pairwise(FORMATS, DTYPES), ids=str)
def test_on_gpus(gpu, fmt, dtype):
    # M1 and M2 have registers for the sums of two rows; there no operation takes this kernel.
    check_all(fmt, dtype, [(1, 41, 3), (2, 8, 1)], device=gpu)


@pytest.mark.parametrize("device", ["host", "metal"])
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(AFFINE, mx.bfloat16), (Format(32, 3), mx.float32), (Format(16, 4, "nvfp4"), mx.float16)],
    ids=str,
)
def test_clean_with_checks(fmt, dtype, device):
    with checks():
        check_all(fmt, dtype, [(3, 300, 3), (1, 41, 1)], device=device)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("device", ["host", "metal"])
def test_reads_the_matrix_once(rows, device):
    rng = np.random.default_rng(rows)
    x, packed = sample(rng, rows, 41, 8, AFFINE, mx.float16)
    config = qvm_config(device, rows, 512, 41, AFFINE)
    with checks() as report:
        by_kernel(x, packed, AFFINE, device=device, parts=1)
    runs = AFFINE.group_size // config.run
    of_matrix = packed[0].nbytes + runs * (packed[1].nbytes + packed[2].nbytes)
    assert report.total("bytes_read") == of_matrix + 512 // config.run * x.nbytes


def test_bias_and_parts():
    rng = np.random.default_rng(3)
    for dtype in DTYPES:
        x, packed = sample(rng, 2, 200, 3, AFFINE, dtype)
        bias = random(rng, (192,), dtype)
        for parts in (1, 3):
            with trace() as launches:
                y = by_kernel(x, packed, AFFINE, bias, "metal", parts=parts)
            check_product(y, x, packed, AFFINE, False, bias)
            assert len(launches) == (1 if parts == 1 else 2)
