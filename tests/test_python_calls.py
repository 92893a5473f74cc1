"""How many Python functions a call enters that has been made before: each costs a tenth of a us."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from python_calls import calls, on, operations, token
from small_qwen import qwen

from mlx_qlayers.decode import engine

OPERATION = 8
# Of 28 layers.
STEP = 30
TOKEN = {"host": 250, "gpu": 60, "metal": 60}
CASES = [(path, name) for path in ("host", "gpu") for name in operations(path)]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_call_of_an_operation(path, name):
    with on(path):
        assert calls(operations(path)[name]) <= OPERATION


@pytest.mark.parametrize("path", TOKEN)
def test_a_token(path, record_property):
    with on(path):
        count = calls(token())
    record_property("table: Python calls of a token of 28 layers", [path, count])
    assert count <= TOKEN[path]


def test_a_token_by_its_graph_on_a_cpu():
    """141 launches of kernels, 28 of rotary embeddings, and what a step does besides."""
    with on("host"):
        assert calls(token(by_graph=True)) <= 215


@pytest.mark.parametrize("bits", [0, 8])
def test_a_step_where_stock_operations_are_what_is_fast(bits):
    """As many for few layers as for many."""
    token = mx.array([[1]])
    with on("gpu"):
        model = qwen()
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]]), cache=cache))
        cache = [c.to_quantized(32, bits) for c in cache] if bits else cache
        assert calls(lambda: engine.step(model, token, cache)) <= STEP
        assert engine.stopped(model) is None
