"""The records of all kernel families that are measured."""

from .attention.records import AttentionDecodeRecord, AttentionForwardRecord, LatentRecord
from .attention.step_record import AttentionStepRecord
from .gather_qmm.records import ExpertsRecord, GatherRecord, RouterRecord
from .grid_sample.launch import GridSampleRecord
from .quantized_matmul.records import QmmRecord, QmvRecord
from .quantized_matmul.skinny_record import SkinnyRecord
from .record import Record

RECORDS: dict[str, type[Record]] = {
    kind.family: kind
    for kind in (
        QmvRecord,
        SkinnyRecord,
        QmmRecord,
        AttentionDecodeRecord,
        AttentionStepRecord,
        AttentionForwardRecord,
        GridSampleRecord,
        ExpertsRecord,
        GatherRecord,
        RouterRecord,
        LatentRecord,
    )
}
