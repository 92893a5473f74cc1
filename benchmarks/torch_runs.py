"""Functions of PyTorch on the arrays that this package's own get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from harness import GPU, Run, Task

_HALF = {mx.float16: torch.float16, mx.bfloat16: torch.bfloat16}


def as_torch(array: mx.array) -> Any:
    """A copy of the same dtype."""
    dtype = _HALF.get(array.dtype, torch.float32)
    copy = torch.from_numpy(np.array(array.astype(mx.float32)))
    return copy.to("cuda" if GPU else "cpu", dtype)


def torch_run(task: Task, function: Callable[..., Any], inputs: Sequence[Any]) -> Run:
    """The results that a task asks of a function; the last of the tensors is the cotangent."""
    *primals, cotangent = (each.requires_grad_(task.gradients) for each in inputs)

    def run() -> list[Any]:
        out = function(*primals)
        return [out, *(torch.autograd.grad(out, primals, cotangent) if task.gradients else ())]

    return run
