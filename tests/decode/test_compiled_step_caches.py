"""Steps of decoding as one graph with rotating, quantized and batched caches."""

from itertools import groupby

import mlx.core as mx
import pytest
from architectures import VOCABULARY
from mlx.utils import tree_map
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from numerics import assert_same_states
from step_models import left, pair
from texts import alone_and_in_a_batch, plain

from mlx_qlayers import explain
from mlx_qlayers.decode import engine


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
def test_tokens_are_the_same_alone_in_a_batch_and_by_speculation(name, graphs):
    """Greedy tokens in float32, of the stock model and of the converted one."""
    stock, model = pair(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]
    greedy = [plain(stock, prompt, 12) for prompt in prompts]
    explain(reset=True)
    found = alone_and_in_a_batch(model, prompts, 12, lambda: make_prompt_cache(model))
    assert found == [greedy, greedy] and left(model) <= 3

    _, draft = pair(name)
    draft.model.norm.weight = -draft.model.norm.weight  # so that it is wrong
    # mlx-lm itself cannot take tokens back from rotating caches that are full.
    if {type(c) for c in make_prompt_cache(model)} == {KVCache}:
        prompt = mx.array(prompts[0])
        steps = speculative_generate_step(prompt, model, draft, num_draft_tokens=3, max_tokens=12)
        assert [int(token) for token, *_ in steps] == greedy[0]
