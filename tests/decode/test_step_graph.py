"""The graph of a token on an NVIDIA GPU: as many primitives a layer as there are kernels.

The graphs of the benchmark, of models as wide as 7B with few layers, without a GPU.
"""

from collections import Counter
from functools import partial
from typing import Any

import architectures
import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from decoding_model import cache_of
from mlx_lm.models.cache import make_prompt_cache
from python_calls import calls
from recorded_gpu import (
    Recorded,
    primitives,
    recorded_gpu,
    starting,
    used,
    wide_model,
    zeros,
)

from mlx_qlayers import convert_model


def begun(model: nn.Module, rows: int) -> list[Any]:
    """Caches of so many rows behind a few tokens."""
    cache = make_prompt_cache(model)
    keys = zeros((1, 4, rows, 128), mx.bfloat16)
    for each in cache:
        each.keys = each.values = keys
        each.offset = rows - 240
    for _ in range(4):
        mx.eval(token(model, cache))
    return cache


def token(model: nn.Module, cache: list[Any]) -> mx.array:
    """The next token, as an array."""
    return model(zeros((1, 1), mx.int32), cache=cache).argmax(-1)


def of_token(name: str, layers: int, rows: int) -> tuple[Counter[str], list[Recorded]]:
    """The primitives of a token, and its kernels."""
    with recorded_gpu() as seen:
        model = wide_model(name, num_hidden_layers=layers)
        cache = begun(model, rows)
        return primitives(token(model, cache)), used(seen, token(model, cache))


def sizes(kernels: list[Recorded]) -> tuple[int, int]:
    """The inputs and the outputs of kernels."""
    return sum(len(each.inputs) for each in kernels), sum(len(each.outputs) for each in kernels)


# Attention of long caches takes semaphores. Results for other launches lie in one array, and so do
# their weights.
def test_a_layer_of_qwen2_is_five_kernels_and_nothing_else():
    rows, arrays = 4352, (19, 6)
    few, more = (of_token("qwen2", layers, rows) for layers in (2, 4))
    assert more[0].total() - few[0].total() == 2 * 5
    assert len(more[1]) - len(few[1]) == 2 * 5
    assert few[0].total() <= 2 * 5 + 17 and starting(few[0]) <= 2 * 5 + 6
    # MLX looks at their inputs, and at their outputs.
    pairs = zip(*(sizes(kernels) for _, kernels in (few, more)), strict=True)
    assert [b - a for a, b in pairs] == [2 * each for each in arrays]
    # It also hashes their text.
    assert max(kernel.text for kernel in more[1]) < 1400


@pytest.mark.parametrize(
    ("name", "others", "none"),
    [
        ("exaone4", 25, {"Gather", "Arange"}),
        ("spark2_5", 24, {"Gather", "Arange", "Contiguous"}),
        ("qwen3_5", 37, {"CompiledBroadcastMultiply", "Convolution", "Contiguous"}),
        ("mixtral", 21, {"AsType"}),
    ],
)
def test_a_small_model(name, others, none):
    """The mask of a full window is one launch, copies of heads are none, norms are part of
    attention and of the gated delta rule, and residuals of the sums of experts."""
    with recorded_gpu():
        model = architectures.build(name, ARCHITECTURES[name], mx.bfloat16)
        convert_model(model, verify=False, calibrate=False)
        cache = make_prompt_cache(model)
        for _ in range(12):
            mx.eval(token(model, cache))
        found = primitives(token(model, cache))
    assert starting(found) == others and not found.keys() & none


@pytest.mark.parametrize(("name", "batch", "bits"), [("qwen3_moe", 1, 0), ("phi3", 2, 8)])
def test_a_token_behind_another_takes_python_few_calls(name, batch, bits):
    """As many for all layers, but for one that goes through their caches."""
    found = []
    for layers in (2, 4):
        with recorded_gpu():
            model = wide_model(name, num_hidden_layers=layers)
            cache = make_prompt_cache(model) if bits else cache_of(model, batch)
            for each in cache:
                each.update_and_fetch(*[zeros((batch, 4, 300, 128), mx.bfloat16)] * 2)
            cache = [each.to_quantized(64, bits) for each in cache] if bits else cache
            mx.eval([each.state for each in cache])
            step = partial(model, zeros((batch, 1), mx.int32), cache=cache)
            found.append(calls(step))
    assert found[1] - found[0] <= 3 and found[0] <= 42


def test_tokens_of_another_dtype_take_as_little():
    """A change of dtype begins anew; what follows is as it is with the other one."""
    found = []
    with recorded_gpu():
        model = wide_model("qwen2", num_hidden_layers=2)
        cache = begun(model, 512)
        for dtype in (mx.int32, mx.uint32):
            for _ in range(2):
                y = model(zeros((1, 1), dtype), cache=cache)
                kinds = primitives(y)
                mx.eval(y)
            found.append(kinds)
    assert found[1] - found[0] == Counter(["View int32"]) and not found[0] - found[1]
