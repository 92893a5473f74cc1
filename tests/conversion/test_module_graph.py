"""Modules of a model whose step is no graph compute what they did, in fewer launches."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import logits
from mlx_lm.models.deepseek_v41 import DeepseekV41SwiGLU

from mlx_qlayers import convert_model, revert_model, use_backend
from mlx_qlayers.conversion import compiled
from mlx_qlayers.conversion.module_graph import graph_class
from tests.numerics import assert_same_sums

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from recorded_gpu import primitives

NAME = "deepseek_v41"


@pytest.fixture
def graphs(monkeypatch):
    """As on a GPU, with MLX's own operators."""
    monkeypatch.setattr(compiled, "context", lambda: ("test",))
    with use_backend("reference"):
        yield


def test_a_model_whose_cache_is_its_own(graphs):
    """It decodes as before, and a sum of a row, an epsilon and a quotient are two launches."""
    stock, model = (build(NAME, ARCHITECTURES[NAME]) for _ in range(2))
    report = convert_model(model, verify=False)
    ours = {row.path for row in report.fusions if row.kind == "graph"}
    assert ours == {
        f"model.layers.{i}.{part}" for i in (0, 1) for part in ("attn_hc", "ffn_hc", "mlp.gate")
    }
    for wanted, given in zip(*logits([stock, model], "own", 1, VOCABULARY), strict=True):
        assert_same_sums(given, wanted)
    mixed, streams = model.layers[0].attn_hc, mx.zeros((1, 1, 4, 128))
    (before, now) = (primitives(*part(streams)) for part in (stock.layers[0].attn_hc, mixed))
    assert now.total() < 0.6 * before.total() and "Add" not in now
    revert_model(model)
    assert [type(part) for part in model.modules()] == [type(part) for part in stock.modules()]


class Scaled(nn.Module):
    """Counts its calls in Python: a graph calls it once."""

    def __init__(self, looks: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.scale, self.looks, self.counts, self.seen = mx.array(3.0), looks, counts, 0

    def __call__(self, x: Any) -> Any:
        CALLS.append(x)
        if self.counts:
            self.seen += 1
        return x * self.scale if not self.looks or self.scale.item() < 4 else x


CALLS: list[Any] = []


@pytest.mark.parametrize(
    ("options", "rows", "calls"),
    [({}, 4, 1), ({}, 4000, 3), ({"looks": True}, 4, 4), ({"counts": True}, 4, 4)],
    ids=str,
)
def test_what_is_one_graph(options, rows, calls, graphs):
    """Not a module that looks at values or changes itself, nor what has many rows."""
    module, x = Scaled(**options).eval(), mx.ones((rows, 8))
    module.__class__ = type("Own", (Scaled,), {"__call__": Scaled.__call__})  # a cache of its own
    module.__class__ = graph_class(type(module))
    CALLS.clear()
    assert all(mx.array_equal(module(x), 3 * x) for _ in range(3))
    assert len(CALLS) == calls and module.seen == 3 * ("counts" in options)
    module.scale = mx.array(2.0)
    assert mx.array_equal(module(x), 2 * x)
    if not options:
        assert math.isclose(mx.grad(lambda x: module(x).sum())(x)[0, 0].item(), 2)


def test_what_takes_more_stays_as_it_is():
    assert "more than an array" in str(graph_class(DeepseekV41SwiGLU))
    assert "no method of a model" in str(graph_class(nn.RMSNorm))
