"""The kernel families that can be tuned."""

from typing import Any

from ..family import Family
from .attention import AttentionDecodeFamily, AttentionForwardFamily, AttentionStepFamily
from .calls import ExpertsFamily, GatherFamily, LatentFamily, RouterFamily
from .grid_sample import GridSampleFamily
from .quantized_matmul import QmmFamily, QmvFamily
from .row_sum import RowSumFamily

_QUANTIZED = QmvFamily(), QmmFamily()
_ATTENTION = AttentionDecodeFamily(), AttentionStepFamily(), AttentionForwardFamily()
_FIXED = ExpertsFamily(), GatherFamily(), RouterFamily(), LatentFamily()
FAMILIES: dict[str, Family[Any, Any]] = {
    family.name: family
    for family in (RowSumFamily(), *_QUANTIZED, *_ATTENTION, GridSampleFamily(), *_FIXED)
}
