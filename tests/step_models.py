"""A stock model and the same one whose steps of decoding are graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import Architecture, build

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.conversion import cache_slots, compiled, compiled_step, step_graph, step_slots
from mlx_qlayers.ops import attention_step


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


def attention_by_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let attention of a step be by attention_step wherever it has a kernel."""
    covered = attention_step._covers
    patch.setattr(cache_slots, "why_not", lambda *args: None if covered(*args) else "none")


@contextmanager
def as_graphs() -> Iterator[list[object]]:
    """Steps are graphs as on a GPU, but that MLX compiles nothing; gives their calls."""
    calls: list[object] = []
    run = step_graph.StepGraph.computed

    def counted(self: step_graph.StepGraph, *args: Any) -> list[Any]:
        calls.append(self)
        return run(self, *args)

    context = "reference", threading.get_ident()
    with pytest.MonkeyPatch.context() as patch, use_backend("reference"):
        attention_by_kernels(patch)
        patch.setattr(step_graph.StepGraph, "computed", counted)
        patch.setattr(compiled.Graph, "ready", lambda self, *args: self.graph)
        patch.setattr(
            compiled, "context", lambda: None if step_slots.current_step.get() else context
        )
        mx.disable_compile()
        try:
            yield calls
        finally:
            mx.enable_compile()
