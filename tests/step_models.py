"""A stock model and the same one whose steps of decoding are graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import machine
import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import Architecture, build
from machine import has_device

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.conversion.stepping import step_class
from mlx_qlayers.decode import engine
from mlx_qlayers.decode.twin import is_stepped
from mlx_qlayers.runtime.backend import backend
from mlx_qlayers.runtime.transformed import uncompiled


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The stock model, and the same one whose steps are graphs."""
    return models_of(name, ARCHITECTURES[name])


def models_of(name: str, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
    """The same two of a changed architecture."""
    stock, model = (build(name, architecture) for _ in range(2))
    convert_model(model, verify=False)
    if not is_stepped(model):  # its layers run together
        model.__class__ = step_class(type(model))
    return stock, model


@contextmanager
def on_a_gpu() -> Iterator[list[mx.array]]:
    """Graphs are made and run as where a GPU is MLX's default device; gives what steps gave."""
    found: list[mx.array] = []
    run = engine.Steps.run

    def kept(self: engine.Steps, *args: Any) -> mx.array | None:
        logits = run(self, *args)
        found.extend([] if logits is None else [logits])
        return logits

    with pytest.MonkeyPatch.context() as patch, machine.on_a_gpu():
        patch.setattr(engine.Steps, "run", kept)
        yield found


@contextmanager
def appending(rows: int) -> Iterator[None]:
    """Append buffers have so many rows."""
    with pytest.MonkeyPatch.context() as patch:
        has_device(patch, backend(), append_rows=rows)
        yield


@contextmanager
def capturing(around: Callable[[], Any]) -> Iterator[None]:
    """Call a function in front of each capture of a model."""
    export = mx.export_function

    def exported(*args: Any, **options: Any) -> Any:
        around()
        return export(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "export_function", exported)
        yield


@contextmanager
def as_graphs() -> Iterator[list[mx.array]]:
    """Steps are graphs as on a GPU, but that MLX compiles nothing; gives what they gave."""
    with on_a_gpu() as found, use_backend("reference"), uncompiled():
        yield found
