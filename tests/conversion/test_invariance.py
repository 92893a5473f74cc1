"""Batch-invariant models: logits are the same bits alone, in batches, in chunks, verified."""

import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from batches import Batches
from batches import converted as batch_invariant
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_qlayers import convert_model, explain, revert_model, use_backend
from mlx_qlayers.conversion import invariance
from mlx_qlayers.decode.quantized_caches import quantized

TEXTS = 64
MORE = "gemma3_text", "gemma4_text", "qwen3_moe"  # windows, which layers may share; experts
KINDS = {
    "own": None,
    "windows": lambda: RotatingKVCache(6),
    "bits": lambda: quantized(KVCache(), 32, 8),
    "quantized windows": lambda: quantized(RotatingKVCache(6), 32, 4),
}


def converted(name: str, **options: Any) -> nn.Module:
    model = build(name, ARCHITECTURES[name])
    convert_model(model, batch_invariant=True, calibrate=False, **options)
    return model


def caches(model: nn.Module, kind: str) -> list[Any]:
    make = KINDS[kind]
    return [make() for _ in model.layers] if make else make_prompt_cache(model)


def alone(model: nn.Module, kind: str, tokens: list[int]) -> mx.array:
    """The logits of a text, one token at a time."""
    cache = caches(model, kind)
    parts = [model(mx.array([[token]]), cache=cache)[0] for token in tokens]
    return mx.concatenate(parts)


def by_parts(model: nn.Module, kind: str, tokens: list[int], sizes: list[int]) -> tuple[Any, Any]:
    """The logits of a text in parts of such sizes, and the caches."""
    cache, parts, at = caches(model, kind), [], 0
    for size in sizes:
        parts.append(model(mx.array([tokens[at : at + size]]), cache=cache)[0])
        at += size
    return mx.concatenate(parts), cache


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("phi3", kind) for kind in KINDS), *((name, "own") for name in MORE)],
)
def test_the_same_bits_alone_in_chunks_and_in_a_batch(name, kind):
    """Of 64 texts of several lengths: parts of 1 to 16 tokens, then a batch that others leave."""
    explain(reset=True)
    model, rng = converted(name), random.Random(name + kind)
    texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(8, 20))] for _ in range(TEXTS)]
    wanted, held = [alone(model, kind, text) for text in texts[:24]], []
    # As many texts are the same again, at other places among other neighbours.
    texts = [texts[rng.randrange(24)] if i >= 24 else text for i, text in enumerate(texts)]
    order = [next(i for i in range(24) if texts[i] == text) for text in texts]
    for number, text in zip(order, texts, strict=True):
        sizes, left = [], len(text) - 4
        while left:
            sizes.append(rng.randint(1, min(left, 16)))
            left -= sizes[-1]
        logits, cache = by_parts(model, kind, text, sizes)
        assert mx.array_equal(logits, wanted[number][: len(text) - 4]), sizes
        held.append(cache)
    batch = [some[0].merge([*some]) for some in zip(*held, strict=True)]
    there = [*range(TEXTS)]
    for step in range(4):
        tokens = mx.array([[texts[i][len(texts[i]) - 4 + step]] for i in there])
        found = model(tokens, cache=batch)
        for i, logits in zip(there, found, strict=True):
            at = len(texts[i]) - 4 + step
            assert mx.array_equal(logits[0], wanted[order[i]][at]), (step, i)
        keep = sorted(rng.sample(range(len(there)), max(1, len(there) // 3)))
        there = [there[i] for i in keep]
        for c in batch:
            c.filter(keep)
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
    batches = Batches(batch_invariant("phi3", mx.bfloat16), texts=4)
    for _ in range(12):
        batches.one()
    assert batches.compared > 40_000 and not batches.differing


def test_stock_operators_are_refused():
    with pytest.raises(ValueError, match="takes no activations='int8'"):
        converted("phi3", activations="int8")
    with use_backend("reference"), pytest.raises(ValueError, match="needs kernels"):
        converted("phi3")
    model = converted("phi3")
    tokens, cache = mx.array([[3, 1, 4]]), caches(model, "own")
    with use_backend("reference"), pytest.raises(ValueError, match=r"takes no .* on reference"):
        model(tokens, cache=cache)
