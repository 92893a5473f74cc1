"""A stock model and the same one whose steps of decoding are graphs."""

from __future__ import annotations

import mlx.nn as nn
from architecture_table import ARCHITECTURES
from architectures import Architecture, build

from mlx_qlayers import convert_model
from mlx_qlayers.conversion import compiled_step


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The stock model, and the same one whose steps are graphs."""
    return models_of(name, ARCHITECTURES[name])


def models_of(name: str, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
    """The same two of a changed architecture."""
    stock, model = (build(name, architecture) for _ in range(2))
    convert_model(model, verify=False)
    if not isinstance(model, compiled_step.step_class(type(stock))):  # its layers run together
        model.__class__ = compiled_step.step_class(type(model))
    return stock, model
