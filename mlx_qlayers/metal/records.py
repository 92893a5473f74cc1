"""The records of all kernel families that are measured."""

from .attention.records import AttentionDecodeRecord, AttentionForwardRecord, LatentRecord
from .attention.step_record import AttentionStepRecord
from .gather_qmm.records import ExpertsRecord, GatherRecord, RouterRecord
from .grid_sample.launch import GridSampleRecord
from .quantized_matmul.records import QmmRecord, QmvRecord
from .quantized_matmul.skinny_record import SkinnyRecord
from .record import Record

_PRODUCTS = QmvRecord, SkinnyRecord, QmmRecord, ExpertsRecord, GatherRecord, RouterRecord
_ATTENTION = AttentionDecodeRecord, AttentionStepRecord, AttentionForwardRecord, LatentRecord
_EVERY: tuple[type[Record], ...] = *_PRODUCTS, *_ATTENTION, GridSampleRecord
RECORDS = {kind.family: kind for kind in _EVERY}
