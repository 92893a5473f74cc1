"""As few instructions as MLX's own kernels; the summary of the test run prints the table."""

import mlx.core as mx
import pytest
from instructions import (
    FEW,
    SINGLE,
    cells,
    main_loop,
    many_queries,
    qmv_rows,
    single_rows,
    widening,
)

from mlx_qlayers.formats import Format


def _note(record, *rows):
    for row in rows:
        record(
            "table: instructions (float, integer, memory, simd, matrix, all, 64-bit, cycles)",
            cells(row),
        )


@pytest.mark.parametrize("fmt", SINGLE, ids=str)
def test_one_row_takes_no_more_than_stock(fmt, record_property):
    stock, own = single_rows(fmt)
    _note(record_property, stock, own)
    assert own.total <= stock.total
    assert own.each("cycles") < 0.75 * stock.each("cycles")


@pytest.mark.parametrize(
    ("rows", "fmt", "dtype"),
    [
        *((4, *FEW[i]) for i in (0, 4)),
        *((8, *few) for few in FEW),
        *((16, *FEW[i]) for i in (1, 3)),
        (8, Format(32, 2), mx.bfloat16),
        (12, Format(32, 6), mx.bfloat16),
    ],
    ids=str,
)
def test_few_rows_take_the_matrix_products_of_the_result(rows, fmt, dtype, record_property):
    row = qmv_rows(rows, fmt, dtype)
    _note(record_property, row)
    assert 0 < row.counted["matrix"] <= row.needed * 9 / 8


def test_bfloat_is_widened_once(record_property):
    """Where matrix units convert, they convert four elements of a lane for each product."""
    for name, more in widening():
        record_property("table: instructions that widen bfloat, by product", [name, f"{more:.2f}"])
        assert 0 < more <= (2.5 if name == "qmv_matrix" else 1.25)


@pytest.mark.parametrize("mask", ["no", "additive"])
def test_masks_take_no_products_of_64_bits(mask, record_property):
    stock, own = many_queries(mask)
    _note(record_property, stock, own)
    assert own.counted["wide"] == 0
    assert own.total <= stock.total


def test_loops_are_counted_without_those_inside():
    text = """
    kernel void sums(const device float* x, const device int* n, device float* y,
                     uint i [[thread_position_in_grid]]) {
      float sum = 0;
      for (int j = 0; j < n[0]; j++) {
        float part = 0;
    #pragma clang loop unroll(disable)
        for (int k = 0; k < n[1]; k++) part += x[j + k];
        for (int k = 0; k < 4; k++) sum += part * x[j + k];
      }
      y[i] = sum;
    }
    """
    counted = main_loop(text, "sums")
    # Multiplications and additions in one.
    assert counted["float"] == 4
    assert counted["matrix"] == counted["simd"] == counted["wide"] == 0
