"""Append buffers of converted models: their caches hold at any time what stock's hold."""

import copy
import io
import re

import mlx.core as mx
import mlx.nn as nn
import pytest
import stepping
from architectures import VOCABULARY
from converted import pair
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from numerics import assert_same_model, assert_same_states
from step_models import appending
from stepping import sequences, state

from mlx_qlayers import use_backend
from mlx_qlayers.decode import append_buffers, engine
from mlx_qlayers.ops.attention_step import Rotation, attention_step
from mlx_qlayers.runtime.host import checks

TOKENS = mx.random.randint(0, VOCABULARY, (3, 40), key=mx.random.key(1))


@pytest.fixture
def four_rows(gpu_path):
    """Attention is by kernel on a CPU too, with append buffers of four tokens."""
    with appending(4):
        yield


def begun(model: nn.Module, prompt: int = 5) -> list:
    cache = make_prompt_cache(model)
    model(TOKENS[:1, :prompt], cache=cache)
    return cache


def agree(run, what: str) -> None:
    """Run on both models a function of a model, which gives logits and a cache."""
    (truth, wanted), (logits, cache) = map(run, pair())
    assert_same_model(logits, truth, bits=None, what=what)
    for ours, theirs in zip(cache, wanted, strict=True):
        assert isinstance(ours, type(theirs)) and vars(ours).keys() == vars(theirs).keys()
    for ours, theirs in zip(state(cache), state(wanted), strict=True):
        assert_same_states(ours, theirs, bits=None, what=what)


def stepped(model: nn.Module, cache: list, steps: range, batch: int = 1) -> list[mx.array]:
    return [model(TOKENS[:batch, i : i + 1], cache=cache) for i in steps]


def test_append_buffers_are_short_where_sequences_are_many():
    """Bytes that a token writes, of a layer of a 7B model, as the checked build counts them."""
    written = {}
    for batch in (1, 8):
        for rows in (256, append_buffers.append_rows((batch, 4), 1024)):
            q, k = (mx.zeros((batch, 1, heads * 128), mx.bfloat16) for heads in (28, 4))
            cache, rows_behind = (mx.zeros((batch, 4, n, 128), mx.bfloat16) for n in (16, rows))
            at = mx.array([16, rows // 2, *[16 + rows // 2] * 8])
            with use_backend("host"), checks() as report:
                arrays = q, k, k, cache, cache, rows_behind, rows_behind, at
                mx.eval(attention_step(*arrays, scale=0.1, rotation=Rotation(128)))
            written[batch, rows] = report.total("bytes_written") // batch
    row, out = 2 * 4 * 128 * 2, 28 * 128 * 2
    assert written == {
        (1, 256): 256 * row + out,
        (8, 256): 256 * row + out,
        (8, 64): 64 * row + out,
    }


@pytest.mark.parametrize("kind", ["plain", "batch", "bits"])
def test_a_cache_is_what_it_was(kind, four_rows):
    """Its kind, and what does not have to be computed."""
    _, model = pair()
    cache = stepping.begun(model, kind)
    nbytes, stock = cache[0].nbytes, type(cache[0])
    stepped(model, cache, range(5, 7), sequences(kind))
    for c in cache:
        assert isinstance(c, stock) and type(c).__name__ == stock.__name__
        assert not c.empty() and c.nbytes == nbytes and c.is_trimmable()
        assert type(c) is not stock and type(copy.copy(c)) is type(copy.deepcopy(c)) is stock
        assert c.keys is vars(c)["keys"] and type(c) is stock


def test_saved_and_loaded(four_rows, tmp_path):
    def run(model):
        cache = begun(model)
        logits = stepped(model, cache, range(5, 12))
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        logits += stepped(model, loaded, range(12, 20))
        logits += stepped(model, cache, range(12, 20))
        return mx.concatenate(logits, axis=1), loaded

    agree(run, "loaded")


def test_batches_that_are_merged_filtered_and_extracted(four_rows):
    def run(model):
        ones = [begun(model, prompt=n) for n in (3, 5)]
        logits = [x for c in ones for x in stepped(model, c, range(5, 11))]
        merged = [a.merge([a, b]) for a, b in zip(*ones, strict=True)]
        logits += stepped(model, merged, range(11, 18), 2)
        third = [c.merge([c]) for c in begun(model)]
        logits += stepped(model, third, range(5, 8))
        for a, b in zip(merged, third, strict=True):
            a.extend(b)
        logits += stepped(model, merged, range(18, 24), 3)
        for c in merged:
            c.filter(mx.array([0, 2]))
        logits += stepped(model, merged, range(24, 27), 2)
        one = [c.extract(1) for c in merged]
        logits += stepped(model, one, range(27, 33))
        return mx.concatenate([x.reshape(-1, x.shape[-1]) for x in logits])[None], merged

    agree(run, "batches")


def test_generation_in_batches_takes_and_gives_caches(four_rows):
    stock, model = pair()
    found = []
    for m in (stock, model):
        generator, tokens = BatchGenerator(m, completion_batch_size=2), {}
        generator.insert([[1, 2, 3, 4], [5, 6]], [5, 11], caches=[begun(m), begun(m)])
        while responses := generator.next_generated():
            for response in responses:
                tokens.setdefault(response.uid, []).append(response.token)
                if response.prompt_cache is not None:
                    tokens[f"{response.uid} cache"] = [c.offset for c in response.prompt_cache]
        generator.close()
        found.append(tokens)
    assert found[0] == found[1]


def test_nobody_computes_what_a_cache_shows(four_rows):
    """As long as nobody looks: the buffers stay those that the prompt left."""
    _, model = pair()
    cache = begun(model)
    stepped(model, cache, range(5, 7))
    now = engine._steps[id(model)].progress[cache[0]].state
    (before,) = now.append_buffers
    mx.eval(stepped(model, cache, range(7, 8)))
    (other,) = engine._steps[id(model)].progress[cache[0]].state.append_buffers
    assert all(a is b for a, b in zip(other.buffers, before.buffers, strict=True))
    graph = io.StringIO()
    mx.export_to_dot(graph, *(c.keys for c in cache), *(c.values for c in cache))
    assert len(re.findall("DynamicSliceUpdate", graph.getvalue())) == 2 * len(cache)
    mx.eval([c.state for c in cache])
    graph = io.StringIO()
    mx.export_to_dot(graph, *(c.keys for c in cache))
    assert "SliceUpdate" not in graph.getvalue()


def test_a_long_cache_grows_by_a_quarter(graphs):
    _, model = pair()
    cache = begun(model)
    for c in cache:
        c.keys, c.values = (mx.ones((1, 2, 4096, 32)) for _ in range(2))
        c.offset = 4096
    stepped(model, cache, range(5, 6))
    assert cache[0].keys.shape[2] == 4096 + 1024
