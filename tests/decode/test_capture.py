"""A model's step as nodes: what is captured, what of it is a size, and what cannot be."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm.models.cache import make_prompt_cache
from small_qwen import qwen, snapshot

from mlx_qlayers import convert_model
from mlx_qlayers.decode.capture import Captured, Setting, Trace, Unsupported, solved
from mlx_qlayers.decode.emit import Program
from mlx_qlayers.decode.graph import Size
from mlx_qlayers.decode.rules import fused

PROMPT = mx.array([[5, 17, 3, 60, 2, 9, 44]])


def captured(model: nn.Module, length: int = 1) -> Captured:
    """The step of a model whose caches are all plain, for any batch size."""
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    numbers = range(len(cache))
    one = Setting(1, length, {(i, "offset"): 7 for i in numbers}, dict.fromkeys(numbers, 256))
    other = Setting(
        64, length, {(i, "offset"): 1007 for i in numbers}, dict.fromkeys(numbers, 5256)
    )
    return solved(Trace(model, cache, one), Trace(model, cache, other))


def stepped(model: nn.Module, step: Captured, batch: int, tokens: int = 3) -> list[mx.array]:
    """What a step gives for some tokens in turn, with rules applied to it and without."""
    found = []
    length = step.graph.outputs["logits"].shape[1]
    for graph in (step.graph, fused(step.graph)):
        cache = make_prompt_cache(model)
        model(mx.repeat(PROMPT, batch, axis=0) + mx.arange(batch)[:, None], cache=cache)
        program, rows = Program(graph, batch, step.weights), []
        for i in range(tokens):
            arrays = {
                f"cache.{n}.{k}": getattr(c, k)
                for n, c in enumerate(cache)
                for k in ("keys", "values")
            }
            arrays["tokens"] = mx.full((batch, length), 11 + i)
            made = program.run(arrays, {"0.offset": 7 + i * length})
            rows.append(made["logits"])
        found.append(mx.concatenate(rows, axis=1))
    return found


def expected(model: nn.Module, batch: int, length: int = 1, tokens: int = 3) -> mx.array:
    cache = make_prompt_cache(model)
    model(mx.repeat(PROMPT, batch, axis=0) + mx.arange(batch)[:, None], cache=cache)
    made = [model(mx.full((batch, length), 11 + i), cache=cache) for i in range(tokens)]
    return mx.concatenate(made, axis=1)


@pytest.mark.parametrize("length", [1, 4])
def test_one_capture_serves_all_batch_sizes(length: int) -> None:
    model = qwen()
    step = captured(model, length)
    for batch in (1, 2, 5):
        want = expected(model, batch, length)
        for found in stepped(model, step, batch):
            assert mx.abs(found - want).max() <= 1e-5 * mx.abs(want).max()


@pytest.mark.parametrize(
    "name", ["granite", "qwen3", "phi3", "mistral3", "gemma", "olmo2", "starcoder2"]
)
def test_models_with_plain_caches(name: str) -> None:
    model = build(name, ARCHITECTURES[name])
    want = expected(model, 2).astype(mx.float32)
    for found in stepped(model, captured(model), 2):
        assert mx.abs(found - want).max() <= 1e-2 * mx.abs(want).max(), name


def test_positions_and_sizes_have_names() -> None:
    nodes = captured(qwen()).graph.nodes()
    (update, *_) = (node for node in nodes if node.op == "SliceUpdate")
    assert update.shape == (Size(0, (("batch", 1),)), 2, Size(0, (("0.rows", 1),)), 32)
    assert update.arg[1][2] == Size(0, (("0.offset", 1),))


def test_the_model_stays_as_it_is_and_conversion_changes_nothing() -> None:
    model = qwen()
    before = snapshot(model)
    ops = [node.op for node in captured(model).graph.nodes()]
    assert snapshot(model) == before
    convert_model(model, verify=False)
    assert [node.op for node in captured(model).graph.nodes()] == ops


def test_a_dense_layer_is_five_launches() -> None:
    ops = [node.op for node in fused(captured(qwen()).graph).nodes()]
    assert ops.count("Products") == 2 * 4 + 1
    assert ops.count("Attention") == 2
    assert not {"QuantizedMatmul", "RMSNorm", "Softmax", "Sin", "Sigmoid"} & {*ops}


class Looks(nn.Module):
    """A model whose code looks at values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        return logits if logits.max().item() > 0 else -logits


class Counts(Looks):
    """A model that changes itself."""

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        self.calls = getattr(self, "calls", 0) + 1
        logits: mx.array = self.model(tokens, cache=cache)
        return logits


class Launches(Looks):
    """A model with a kernel of its own."""

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        kernel = mx.fast.metal_kernel("twice", ["x"], ["y"], "uint i = thread_position_in_grid.x;")
        more = {"output_shapes": [logits.shape], "output_dtypes": [logits.dtype]}
        ones = (1, 1, 1)
        (y,) = kernel(inputs=[logits], **more, grid=ones, threadgroup=ones, stream=mx.gpu)
        return y


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Looks, r"test_capture.py:\d+: .*item.* > 0"),
        (Counts, "changes calls of Counts"),
        (Launches, "launches a kernel of its own: custom_kernel_twice"),
    ],
)
def test_what_cannot_be_captured_is_named(kind: type[Looks], reason: str) -> None:
    model = qwen()
    whole = kind(model)
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    one = Setting(1, 1, {(i, "offset"): 7 for i in range(2)}, {})
    before = snapshot(whole)
    with pytest.raises(Unsupported, match=reason):
        Trace(whole, cache, one)
    assert snapshot(whole) == before and cache[0].offset == 7
