"""Steps of decoding as one graph with rotating, quantized and batched caches."""

from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from numerics import assert_same_model, assert_same_states
from step_models import pair

from mlx_qlayers.decode import engine

# Prompt, largest size of the cache, tokens that it keeps: behind prompts that are longer, as long,
# and that have fewer tokens than are kept.
RINGS = [(11, 8, 0), (8, 8, 2), (1, 16, 4), (2, 7, 4)]


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_rings(ring, graphs):
    """More than twice around, and with several tokens at once in between."""
    prompt, size, keep = ring
    results, tokens = [], mx.random.randint(0, VOCABULARY, (1, 60), key=mx.random.key(1))
    for model in pair("phi3"):
        cache = [RotatingKVCache(size, keep) for _ in make_prompt_cache(model)]
        at, parts = 0, []
        for length in (prompt, *[1] * 35, 3, 1, 1, 1):
            parts.append(model(tokens[:, at : at + length], cache=cache))
            at += length
        results.append(mx.concatenate(parts, axis=1)[0])
    assert len(graphs) >= 38
    assert_same_model(*reversed(results), bits=None, what=f"{ring}")


@pytest.mark.parametrize(("name", "keep"), [("gemma3_text", 0), ("phi3", 2)])
def test_a_full_ring_is_read_beside_an_append_buffer(name, keep, graphs):
    """Until that is full, or somebody takes the ring's keys: then it has none of them."""
    results, buffers = [], list[mx.array | None]()
    tokens = mx.random.randint(0, VOCABULARY, (2, 60), key=mx.random.key(1))
    for model in pair(name):
        cache = make_prompt_cache(model)
        if keep:
            cache = [RotatingKVCache(8, keep) for _ in cache]
        parts = [model(tokens[:, :11], cache=cache)]
        for i in range(11, 36):
            parts.append(model(tokens[:, i : i + 1], cache=cache))
            if i == 30:
                mx.eval(cache[0].state)
            for each in (steps for steps in engine._steps.values() if steps.model() is model):
                rings = [t for last in each.progress.values() for t in last.state.append_buffers]
                buffers += [rings[0].buffers[0]] if rings else []
        results.append(mx.concatenate(parts, axis=1))
    assert_same_states(*reversed(results), bits=None, what=name)
    assert [i for i, buffer in enumerate(buffers) if buffer is None] == [30 - 11]
    runs = [len([*run]) for _, run in groupby(buffers, key=id)]
    assert runs == ([8, 8, 3, 1, 5] if keep == 0 else [6, 6, 6, 1, 1, 5])


@pytest.mark.parametrize("kind", ["ring", "batch of rings", "plain", "bits"])
def test_a_token_is_written_into_the_arrays_of_a_cache(kind):
    """Of which MLX makes no copy, as it does if anybody else has them."""
    _, model = pair("phi3")
    rows, batch = 1 << 14, 1 + (kind == "batch of rings")
    caches = {
        "ring": lambda: RotatingKVCache(rows),
        "batch of rings": lambda: BatchRotatingKVCache(rows, [0, 1]),
        "plain": KVCache,
        "bits": lambda: QuantizedKVCache(32, 8),
    }
    cache = [caches[kind]() for _ in make_prompt_cache(model)]
    tokens = mx.ones((batch, 1), mx.int32)
    model(mx.broadcast_to(tokens, (batch, 3)), cache=cache)
    for c in cache:
        length = rows - 100
        for name in ("keys", "values"):
            parts = tree_map(lambda a: mx.tile(a[:, :, :1], (1, 1, rows, 1)), getattr(c, name))
            setattr(c, name, parts)
        if "ring" in kind:
            length = rows + 500
            c._idx = 500
        c.offset = mx.array([length, length - 1]) if batch > 1 else length
        if batch > 1:
            c._offset, c.rotated = length, True
    mx.eval(model(tokens, cache=cache), [c.state[:2] for c in cache])
    for _ in range(2):
        logits, before = model(tokens, cache=cache), mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(logits, [c.state[:2] for c in cache])
        assert mx.get_peak_memory() - before < 0.6 * cache[0].nbytes / 2


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe", "gemma3_text"])
def test_tokens_are_the_same_alone_in_a_batch_behind_a_trimmed_cache_and_by_speculation(
    name, graphs
):
    """Greedy tokens in float32, of the stock model and of the converted one."""
    stock, model = pair(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]

    def tokens(model: nn.Module, prompt: list[int]) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=12)]

    greedy = [tokens(stock, prompt) for prompt in prompts]
    graphs.clear()
    assert [tokens(model, prompt) for prompt in prompts] == greedy
    assert len(graphs) >= 3 * 10

    # Once more with a cache of which tokens are taken back: wrong ones, then the text's own.
    cache, text = make_prompt_cache(model), [*prompts[0], *greedy[0]]
    model(mx.array([text[:4]]), cache=cache)
    for wrong in (90, 91, 92):
        model(mx.array([[wrong]]), cache=cache)
    graphs.clear()
    for kept in (4, 9):
        if all(c.is_trimmable() for c in cache):
            assert {c.trim(c.offset - kept) > 0 for c in cache} == {True}
            steps = generate_step(
                mx.array(text[kept : kept + 1]), model, max_tokens=12, prompt_cache=cache
            )
            assert [int(token) for token, _ in steps][: len(text) - kept - 1] == text[kept + 1 :]
    assert len(graphs) >= 10

    generator = BatchGenerator(model, max_tokens=12)
    found: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
    graphs.clear()
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert len(graphs) >= 10 and [*found.values()] == greedy

    _, draft = pair(name)
    draft.model.norm.weight = -draft.model.norm.weight  # so that it is wrong
    steps = speculative_generate_step(
        mx.array(prompts[0]), model, draft, num_draft_tokens=3, max_tokens=12
    )
    # mlx-lm itself cannot take tokens back from rotating caches that are full.
    if {type(c) for c in make_prompt_cache(model)} == {KVCache}:
        assert [int(token) for token, *_ in steps] == greedy[0]
