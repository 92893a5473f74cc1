"""A stock model and the same one whose steps of decoding are graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import Architecture, build
from devices import has_device
from machine import on_a_gpu

from mlx_qlayers import convert_model, explain, use_backend
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
def as_graphs() -> Iterator[None]:
    """Steps are graphs as on a GPU, but that MLX compiles nothing."""
    with on_a_gpu(), use_backend("reference"), uncompiled():
        yield


def left(model: nn.Module) -> int:
    """How many steps were left to a model that has run some, since ``explain`` forgot others."""
    assert engine.stopped(model) != "no step was run"
    return sum(each.calls for each in explain() if (each.op, each.path) == ("step", "layers"))
