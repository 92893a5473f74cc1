"""Whether kernels of Metal 4's tensor operations are taken: where they run and were fastest."""

from __future__ import annotations

import mlx.core as mx

from ..dispatch.measurements import Found
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..runtime import tensor_ops
from ..runtime.backend import backend
from ..runtime.spec import Spec

TENSOR = "tensor operations"
# The path by which a family measures them.
PATH = "tensor"


def by_tensors(best: Found | None) -> bool:
    """Whether they were measured to be fastest, and still run here."""
    return best is not None and best.path == PATH and tensor_ops.missing() is None


def takes_tensors(x: Spec | mx.array) -> bool:
    """Whether products of such rows may be by tensor operations: more than qmv takes, on an M5."""
    if backend() != "metal" or tensor_ops.missing() is not None:
        return False
    return x.ndim > 1 and x.size > MAX_QMV_ROWS * x.shape[-1] > 0


def as_it_runs(best: Found | None) -> Found | None:
    """What was measured; None where that was before the system or the compiler changed."""
    return None if best is not None and best.path == PATH and not by_tensors(best) else best


def without_tensors(best: Found | None) -> str:
    """Why a call on an Apple GPU does without them."""
    if why := tensor_ops.missing():
        return f"no {TENSOR}: {why}"
    slower = best is not None and PATH in (best.evidence.seconds or {})
    return f"{TENSOR} were slower" if slower else f"{TENSOR} were not measured"
