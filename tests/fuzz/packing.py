"""Quantized matrices of any codes, and what their formats and rows are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from tests.fuzz.arrays import filled
from tests.packed import FORMATS

FORMAT = st.sampled_from(FORMATS)
ROWS = st.sampled_from([(), (1,), (1,), (0,), (2,), (3, 1), (7,), (2, 5), (16,), (17,), (1, 40)])


def packed(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    fmt: Format,
    dtype: mx.Dtype,
    values: str = "normal",
) -> tuple[mx.array, mx.array, mx.array | None]:
    """A matrix of any codes, (..., rows, columns), with scales and biases of a kind."""
    *leading, columns = shape
    words = rng.integers(0, 2**32, (*leading, columns * fmt.bits // 32), np.uint32)
    groups = (*leading, columns // fmt.group_size)
    if fmt.mode == "affine":
        kind = values if values != "special" else "normal"
        return mx.array(words), *(filled(rng, groups, dtype, kind) for _ in range(2))
    if fmt.bits == 8:  # 0x7f is no number in E4M3
        parts = words.view(np.uint8)
        parts[parts & 0x7F == 0x7F] = 0x38
    least, most = (0, 0x7E) if fmt.mode == "nvfp4" else (110, 131)
    return mx.array(words), mx.array(rng.integers(least, most, groups, np.uint8)), None
