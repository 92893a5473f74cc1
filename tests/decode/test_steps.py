"""A token of small models by tails takes the kernels that it took before there were graphs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm.models.cache import make_prompt_cache
from step_launches import recorded

from mlx_qlayers import use_backend
from mlx_qlayers.decode.caches import arrays_of, facts, settings
from mlx_qlayers.decode.capture import capture
from mlx_qlayers.decode.emit import Program
from mlx_qlayers.decode.engine import _positions
from mlx_qlayers.decode.graph import Graph
from mlx_qlayers.decode.rules import fused
from mlx_qlayers.decode.rules.steps import Tails
from mlx_qlayers.runtime.backend import Mode, mode
from mlx_qlayers.runtime.tracing import trace

PROMPT = mx.array([[5, 17, 3, 60, 2, 9, 44, 1, 2]])
TOKEN = mx.array([[13]])
# What a graph computes for nobody, and a launch by launch run does.
UNUSED = {"rotary_at"}


def by_tails(name: str) -> tuple[Any, Graph, Any, dict[str, Any], dict[str, int]]:
    """A model, the graph of its step, its weights, what the graph takes, and positions."""
    model = build(name, ARCHITECTURES[name])
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    some = [facts(c, 1) for c in cache]
    step = capture(model, cache, *settings(some, 1, 1, 1, 256))
    graph, at = fused(step.graph, Tails([f.key for f in some], step.names)), _positions(some)
    arrays = {**arrays_of(cache), "tokens": TOKEN}
    for node in graph.nodes():
        if node.op != "Input":
            continue
        kind, _, rest = node.arg[0].partition(".")
        if kind == "tail":
            heads, width = node.shape[1], node.shape[3]
            arrays[node.arg[0]] = mx.zeros((1, heads, 8, width), node.dtype)
        elif kind == "tickets":
            arrays[node.arg[0]] = mx.zeros(64, mx.int32)
        elif kind == "at":
            arrays[node.arg[0]] = mx.array([at[rest], 0, *[at[rest]] * 8])
        elif kind == "ring":
            row, offset = at[f"{rest}._idx"], at[f"{rest}.offset"]
            size = at[f"{rest}.rows"]
            arrays[node.arg[0]] = mx.array([min(offset, size), 0, *[offset] * 8, row])
    want = model(TOKEN, cache=cache)
    return want, graph, step.weights, arrays, at


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3_text"])
def test_kernels_of_a_token(name: str) -> None:
    want, graph, weights, arrays, at = by_tails(name)
    with use_backend("host"), mode(Mode.INFERENCE), trace() as launches:
        made = Program(graph, 1, weights).run(arrays, at)
    assert mx.abs(made["logits"] - want).max() < 1e-4 * mx.abs(want).max()
    found = [each.kernel for each in launches]
    assert found == [each for each in recorded()[name] if each not in UNUSED]


def test_tails_hold_the_token() -> None:
    """As the cache has it where mlx-lm writes it."""
    _, graph, weights, arrays, at = by_tails("qwen3")
    assert "cache.0.keys" not in graph.outputs
    made = Program(graph, 1, weights).run(arrays, at)
    model = build("qwen3", ARCHITECTURES["qwen3"])
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    model(TOKEN, cache=cache)
    for i, c in enumerate(cache):
        for name in ("keys", "values"):
            row = getattr(c, name)[:, :, 9:10]
            assert mx.abs(made[f"tail.{i}.{name}"][:, :, :1] - row).max() < 1e-4
