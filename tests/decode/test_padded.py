"""Steps whose positions are an array: what they compute, and what caches hold behind them."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import BITS, logits
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from numerics import assert_same_model
from python_calls import on
from small_qwen import qwen
from stepping import (
    KINDS,
    TOKENS,
    ByGraph,
    Stepped,
    assert_same,
    begun,
    sequences,
    state,
    steps_as_the_model,
)

from mlx_qlayers.decode import engine
from mlx_qlayers.decode.forms import PaddedForm


@pytest.fixture(autouse=True)
def on_a_mac():
    """As where no kernel was measured: stock operations are what is fast. Nothing is compiled."""
    mx.disable_compile()
    with on("gpu"):
        yield
    mx.enable_compile()


def forms(model: Any) -> set[type]:
    """Of what the steps of a model were."""
    found = engine._steps[id(model)].steps.values()
    made = {type(form) for steps in found for step in steps for form in step.programs.values()}
    return made - {type(None)}


# Masks of windows and paddings, shared keys, latent ones, the best keys, states, chunks, sinks.
CASES = [
    ("gemma3_text", "own", 1),
    ("gemma3_text", "padded right", 3),
    ("gpt_oss", "rotating", 3),
    ("gemma2", "own", 3),
    ("gemma3n", "padded left", 3),
    ("llama4", "own", 1),
    ("deepseek_v3", "own", 3),
    ("deepseek_v32", "padded left", 3),
    ("iquestloopcoder", "padded left", 3),
    ("recurrent_gemma", "padded right", 3),
    ("falcon_h1", "quantized", 1),
]


@pytest.mark.parametrize(("name", "kind", "batch"), CASES)
def test_logits(name, kind, batch):
    stock, model = (build(name, ARCHITECTURES[name]) for _ in range(2))
    stepped = ByGraph(model)
    found = logits([stock, stepped], kind, batch, VOCABULARY)
    for number, (want, each) in enumerate(zip(*found, strict=True)):
        bits = BITS if kind == "quantized" else None
        assert_same_model(each, want, bits=bits, what=f"{name}, {kind}, step {number}")
    assert stepped.steps == 3 and forms(model) == {PaddedForm}, engine.stopped(model)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_that_go_round_and_are_looked_at(kind):
    model = qwen()
    ours, theirs = Stepped(model, kind, True), Stepped(model, kind, False)
    for count in (1, 8, 14):
        assert_same(ours(count), theirs(count), kind, ours.at)
        assert_same(state(ours.cache), state(theirs.cache), kind, ours.at)
    assert engine.stopped(model) is None and forms(model) == {PaddedForm}


def test_rings_that_begin_anew_at_other_times():
    """Each writes to the row of its own."""
    model = qwen()
    rings = partial(RotatingKVCache, 9), partial(RotatingKVCache, 14, keep=3)
    steps = steps_as_the_model(model, lambda: [ring() for ring in rings], [20, *[1] * 40])
    assert steps == 40 and forms(model) == {PaddedForm}


@pytest.mark.parametrize("kind", ["plain", "bits", "batch", "kept", "batch of rings"])
def test_several_tokens(kind):
    """A token sees those ahead of it, and no row behind it that held another one.

    So also while a ring is full, and before. Other caches are trimmed once.
    """
    model, made, taken = qwen(), [], 0
    is_ring = kind in ("kept", "batch of rings")
    for by_graph in (False, True):
        cache, at, rows = begun(model, kind), 5, []
        for length in (3, 6, 6, 6, 1, 1, 6) if is_ring else (3, 1, 7, 3, 1):
            tokens = TOKENS[: sequences(kind), at : at + length]
            logits = engine.step(model, tokens, cache) if by_graph else None
            taken += logits is not None
            rows.append(model(tokens, cache) if logits is None else logits)
            if length == 7:
                assert [c.trim(4) for c in cache] == [4, 4]
            at += length
        made.append([mx.concatenate(rows, axis=1), state(cache)])
    assert_same(made[1], made[0], kind, "behind all")
    # A mask of mlx-lm's for a batch depends on where the rows of a ring lie.
    assert len(rows) - taken == (kind == "batch of rings"), engine.stopped(model)
    assert is_ring or forms(model) == {PaddedForm}


def test_compiled_steps_across_the_end_of_a_buffer():
    """And each token is written where the buffer lies, but where that grows."""
    mx.enable_compile()
    model, made, moved = qwen(), [], []
    for run in (model, ByGraph(model)):
        cache, place = make_prompt_cache(model), 0
        run(TOKENS.reshape(1, -1)[:, :250], cache=cache)
        rows = []
        for i in range(12):
            rows.append(run(TOKENS[:1, i : i + 1], cache=cache))
            mx.eval(rows[-1], cache[0].keys)
            lies = np.array(cache[0].keys, copy=False).__array_interface__["data"][0]
            moved += [i] * (lies != place and run is not model)
            place = lies
        made.append([mx.concatenate(rows, axis=1), state(cache)])
    assert_same(made[1], made[0], "plain", "behind all")
    assert moved == [0, 5] and forms(model) == {PaddedForm}
