"""The kernel families that can be tuned."""

from __future__ import annotations

from typing import Any

from ..family import Family
from .attention_decode import ATTENTION_DECODE
from .attention_forward import ATTENTION_FORWARD
from .attention_step import ATTENTION_STEP
from .few_rows import FEW_ROWS
from .grid_sample import GRID_SAMPLE
from .quantized_tiles import QMM
from .row_sum import ROW_SUM

FAMILIES: dict[str, Family[Any]] = {
    family.name: family
    for family in (
        ROW_SUM,
        FEW_ROWS,
        QMM,
        ATTENTION_DECODE,
        ATTENTION_STEP,
        ATTENTION_FORWARD,
        GRID_SAMPLE,
    )
}
