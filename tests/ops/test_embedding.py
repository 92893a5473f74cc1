"""Rows of a quantized matrix by the kernel that runs on CUDA, on the checked build."""

import mlx.core as mx
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.dequantize import dequantize_rows
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime.spec import Spec
from tests.examples import RANDOM

ROWS = RANDOM["quantized_rows"]


@pytest.mark.parametrize("case", ROWS.awkward[:4], ids=str)
def test_rows_are_unpacked_and_rounded_once(case):
    def rows(numbers, w, scales, biases, **fmt):
        given = [a for a in (w, scales, biases) if a is not None]
        dtype = mx.bfloat16 if biases is None else scales.dtype
        matrix = PackedMatrix(w, scales, biases, None)
        return dequantize_rows(Spec.of(numbers), matrix, Format(**fmt), dtype)(numbers, *given)

    ROWS.call("checked", **case)._replace(function=rows, by_kernel=True).check("checked")
