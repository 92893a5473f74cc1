"""Batch-invariant models: logits are the same bits alone, in batches, in chunks, verified."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from batches import Batches, converted
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_qlayers import convert_model, explain, revert_model, use_backend
from mlx_qlayers.conversion import invariance
from mlx_qlayers.decode.quantized_caches import quantized

MORE = "gemma3_text", "gemma4_text", "qwen3_moe"  # windows, which layers may share; experts
KINDS = {
    "windows": lambda: RotatingKVCache(6),
    "bits": lambda: quantized(KVCache(), 32, 8),
    "quantized windows": lambda: quantized(RotatingKVCache(6), 32, 4),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("phi3", kind) for kind in KINDS), *((name, "own") for name in ("phi3", *MORE))],
)
def test_the_same_bits_alone_in_chunks_and_in_a_batch(name, kind):
    """Texts of several lengths: in parts of any, then in batches that others leave."""

    def make(model: nn.Module) -> list[Any]:
        new = KINDS.get(kind)
        return [new() for _ in model.layers] if new else make_prompt_cache(model)

    explain(reset=True)
    batches = Batches(converted(name), make=make, texts=16, tokens=24)
    for _ in range(3):
        batches.one(steps=4)
    assert batches.compared > 30_000 and not batches.differing
    ran = [d for d in explain() if d.op == "attention" and d.calls]
    assert {d.path for d in ran} == {"host"}


class Neighbours(nn.Module):
    """Rows that depend on all that are computed with them."""

    def __call__(self, x: mx.array) -> mx.array:
        return x + 1e-3 * x.mean()


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe"])
def test_other_models_differ(name):
    """So does one of whose layers one sees the batch: the conversion says so, and is undone."""
    model = build(name, ARCHITECTURES[name])
    before = [*map(type, model.modules())]
    convert_model(model, calibrate=False)
    with pytest.raises(ValueError, match="differs by"):
        invariance.check_model(model)
    revert_model(model)
    model.model.norm = Neighbours()
    with pytest.raises(ValueError, match="not batch-invariant: a prompt in chunks differs by"):
        convert_model(model, batch_invariant=True, calibrate=False)
    assert before.count(type(model)) == 1
    assert not any("qlayers" in type(m).__module__ for m in model.modules())


def test_random_batches():
    """A share of the thousand of ``make invariance``."""
    batches = Batches(converted("phi3", mx.bfloat16), texts=4)
    for _ in range(12):
        batches.one()
    assert batches.compared > 40_000 and not batches.differing


def test_stock_operators_are_refused():
    with pytest.raises(ValueError, match="takes no activations='int8'"):
        converted("phi3", activations="int8")
    with use_backend("reference"), pytest.raises(ValueError, match="needs kernels"):
        converted("phi3")
    model = converted("phi3")
    tokens, cache = mx.array([[3, 1, 4]]), make_prompt_cache(model)
    with use_backend("reference"), pytest.raises(ValueError, match=r"takes no .* on reference"):
        model(tokens, cache=cache)
