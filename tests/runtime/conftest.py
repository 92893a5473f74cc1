"""A stand-in for ``mx.fast.metal_kernel``, so that the metal backend can be tested anywhere."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import explain


class MetalStandIn:
    """Remembers how it was called; returns what ``compute`` says, by default ones.

    Attributes:
        made: the arguments of each kernel's creation.
        called: the arguments of each launch.
        compute: makes the outputs from a launch's arguments.
    """

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []
        self.compute: Callable[[dict[str, Any]], list[mx.array]] = lambda call: [
            mx.ones(shape, dtype)
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]

    def __call__(self, **made: Any) -> Callable[..., list[mx.array]]:
        self.made.append(made)

        def launch(**call: Any) -> list[mx.array]:
            self.called.append(call)
            return self.compute(call)

        return launch


@pytest.fixture
def metal(monkeypatch):
    """The metal backend, forced, with a stand-in for MLX's function."""
    stand_in = MetalStandIn()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", stand_in)
    with use_backend("metal"):
        yield stand_in


@pytest.fixture(autouse=True)
def clean_decisions():
    """Each test sees only its own decisions."""
    explain(reset=True)
