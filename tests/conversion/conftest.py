"""The path of a GPU, as far as it runs without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from step_models import as_graphs, attention_by_kernels

from mlx_qlayers import explain, use_backend
from mlx_qlayers.conversion import compiled, compiled_step, step_slots
from mlx_qlayers.runtime.backend import Mode, current


@pytest.fixture(params=["compiled", "kernels"])
def gpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compute as on a GPU, in the two halves that can be had on a CPU.

    ``compiled`` runs the graphs that ``mx.compile`` makes, of MLX's operators. ``kernels`` calls
    the same functions with the same arguments, but each time, so that every launch in them is a
    kernel of the host build: that one needs the values of its inputs, which a graph has not.
    """
    backend = {"compiled": "reference", "kernels": "host"}[request.param]

    def context() -> tuple[str, int, str] | None:
        if current.get().mode is not Mode.EAGER:
            return None
        stream = mx.default_stream(mx.default_device())
        return f"{backend} {request.node.name}", threading.get_ident(), repr(stream)

    monkeypatch.setattr(compiled, "context", context)
    explain(reset=True)
    if backend == "host":
        mx.disable_compile()
    try:
        with use_backend(backend):
            yield request.param
    finally:
        mx.enable_compile()
    ours = [d for d in explain() if d.op in ("fused_products", "attention_step")]
    assert {d.path for d in ours} <= {backend}
    kernels = {d.op for d in explain() if d.op.startswith("kernel ")}
    assert not kernels if backend == "reference" else kernels or not ours


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a step is by attention_step wherever it has a kernel."""
    attention_by_kernels(monkeypatch)


@pytest.fixture
def graphs() -> Iterator[list[object]]:
    """Every call of a graph; as on a GPU, but that MLX compiles nothing, which takes minutes."""
    with as_graphs() as calls:
        yield calls


@pytest.fixture
def compiled_steps(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of decoding are graphs that MLX compiles, as on a GPU, of its own operators."""

    def context() -> tuple[str, int] | None:
        eager = current.get().mode is Mode.EAGER and not step_slots.current_step.get()
        return ("reference", threading.get_ident()) if eager else None

    monkeypatch.setattr(compiled, "context", context)
    with use_backend("reference"):
        yield


@pytest.fixture
def steps(by_kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """What each step gave that ran as a graph."""
    found: list[mx.array] = []
    run = compiled_step._Plan.run

    def kept(self: compiled_step._Plan, *args: Any) -> mx.array | None:
        logits: mx.array | None = run(self, *args)
        found.extend([] if logits is None else [logits])
        return logits

    monkeypatch.setattr(compiled_step._Plan, "run", kept)
    return found
