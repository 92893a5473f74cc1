"""Lets the layers of a converted model multiply prompts in 8-bit integers."""

from __future__ import annotations

import re

import mlx.nn as nn

from ..layers.int8_linear import Int8Linear
from ..layers.qlinear import QLinear
from .plan import modules

# Says of a fused module that products of many rows are those of its layers.
INT8_PROMPTS = "int8_prompts"
# The head multiplies a row of a prompt, and the loss of its digits would not be made up for.
_IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\.")


def join_int8(model: nn.Module) -> int:
    """Make the linear layers of decoder layers :class:`Int8Linear`; how many."""
    chosen = [m for path, m in modules(model) if _IN_LAYERS.search(path) and type(m) is QLinear]
    for layer in chosen:
        Int8Linear.joining(layer)
    for module in model.modules():
        if any(isinstance(part, Int8Linear) for part in module.modules()):
            vars(module)[INT8_PROMPTS] = True
    return len(chosen)


def leave_int8(model: nn.Module) -> None:
    """Undo :func:`join_int8`."""
    for module in model.modules():
        vars(module).pop(INT8_PROMPTS, None)
        if isinstance(module, Int8Linear):
            module.leave()
