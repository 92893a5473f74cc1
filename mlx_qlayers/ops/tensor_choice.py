"""Whether kernels of Metal 4's tensor operations are taken: where they run and were fastest."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import mlx.core as mx

from ..dispatch.measurements import Measurement
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..runtime import tensor_ops
from ..runtime.devices import device_of
from ..runtime.spec import Spec

TENSOR, CODES = "tensor operations", "tensor operations on packed codes"
# Of attention, where tensors hand nothing to each other: there where the first is wrong, or slower.
MEMORY = "tensor operations by way of threadgroup memory"
# The kernels by the paths by which a family measures them.
PATHS = {"tensor": TENSOR, "codes": CODES, "tensor_memory": MEMORY}


def by_tensors(best: Measurement | None) -> bool:
    """Whether they were measured to be fastest, and still run here."""
    return best is not None and best.path in PATHS and _runs(best.path)


def _runs(path: str) -> bool:
    """Whether a path's kernel runs here."""
    if path not in PATHS:
        return True
    codes = PATHS[path] == CODES
    if device_of().tensor_cores:
        return not codes  # the shim runs them
    return (tensor_ops.missing_codes() if codes else tensor_ops.missing()) is None


def in_turn(best: Measurement, kernels: Mapping[str, str]) -> list[str]:
    """The fastest kernel of a call, then others no slower than stock, if the proof fails."""
    seconds = best.evidence.seconds or {}
    rest = [p for p in kernels if seconds.get(p, inf) <= seconds.get("stock", 0) and _runs(p)]
    ranked = sorted(
        {*rest, best.path} & kernels.keys(), key=lambda p: (p != best.path, seconds.get(p, inf))
    )
    return [kernels[path] for path in ranked]


def takes_tensors(x: Spec | mx.array) -> bool:
    """Whether products of such rows may be by tensor operations: more than qmv takes, on an M5."""
    if tensor_ops.missing() is not None:
        return False
    return x.ndim > 1 and x.size > MAX_QMV_ROWS * x.shape[-1] > 0


def as_it_runs(best: Measurement | None) -> Measurement | None:
    """The measurement, or None if it is older than the system or the compiler."""
    lost = best is not None and best.path in PATHS and not by_tensors(best)
    return None if lost else best


def measured_beside(best: Measurement | None, kernel: str) -> dict[str, Any]:
    """Arguments of :func:`~mlx_qlayers.dispatch.choose` where a tensor kernel may be faster."""
    best = as_it_runs(best)
    if best is not None and by_tensors(best):
        return {"best": best, "by": PATHS[best.path], "wins": best.path}
    return {"best": best, "by": f"{kernel}; {without_tensors(best)}"}


def without_tensors(best: Measurement | None) -> str:
    """Why a call on an Apple GPU does without them."""
    if why := tensor_ops.missing():
        return f"no {TENSOR}: {why}"
    slower = best is not None and not PATHS.keys().isdisjoint(best.evidence.seconds or {})
    return f"{TENSOR} were slower" if slower else f"{TENSOR} were not measured"
