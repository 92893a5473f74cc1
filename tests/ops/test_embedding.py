"""Rows of a quantized matrix by their kernel, on the checked build."""

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
        dtype = mx.bfloat16 if biases is None else scales.dtype
        matrix = PackedMatrix(w, scales, biases, None)
        launch = dequantize_rows(Spec.of(numbers), matrix, Format(**fmt), dtype)
        return launch(numbers, w, scales, biases)

    ROWS.call("checked", **case)._replace(function=rows, by_kernel=True).check("checked")
