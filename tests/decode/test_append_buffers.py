"""Append buffers beside caches: no copies, and caches that hold at any time what stock's hold."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from interrupts import interrupted
from mlx.utils import tree_map
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from small_qwen import qwen
from step_models import appending, as_graphs
from stepping import KINDS, Stepped, assert_same, state, steps_as_the_model

from mlx_qlayers.decode import append_buffers, append_form, caches, engine


@pytest.fixture(autouse=True)
def like_a_gpu():
    """Steps by append buffers of four tokens, of which MLX compiles nothing."""
    with as_graphs(), appending(4):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_by_append_buffers_while_caches_grow_and_go_round(kind):
    model = qwen()
    ours, theirs = Stepped(model, kind, True), Stepped(model, kind, False)
    for count in (1, 6, 1, 20, 13):
        assert_same(ours(count), theirs(count), kind, ours.at)
        assert engine.stopped(model) is None
        held = [vars(c)["keys"] for c in ours.cache]
        assert all(isinstance(each[0], append_buffers.AppendBuffer) for each in held), (
            "a cache has no append buffer"
        )
        assert_same(state(copy.deepcopy(ours.cache)), state(theirs.cache), kind, ours.at)
    assert_same(state(ours.cache), state(theirs.cache), kind, "behind all")


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_states_that_a_prompt_changes_between_tokens(name):
    """A model's code writes them into the list that a cache has."""
    model = build(name, ARCHITECTURES[name])
    parts = [5, 1, 1, 1, 4, 1, 1, 3, 1]
    assert steps_as_the_model(model, partial(make_prompt_cache, model), parts) == 6


# Windows that are smaller than a ring; then rings behind prompts that are longer, as long, and that
# have fewer tokens than are kept.
RINGS = [("llama", 5, 12, 0), ("llama", 5, 12, 3), ("phi3", 11, 8, 0), ("phi3", 8, 8, 2)]
RINGS += [("phi3", 1, 16, 4), ("phi3", 2, 7, 4)]


@pytest.mark.parametrize(("name", "prompt", "size", "keep"), RINGS)
def test_rings(name, prompt, size, keep):
    """More than twice around, with several tokens at once in between.

    A step is the model's own where mlx-lm's mask of a ring that begins anew takes its row as 0.
    """
    model = build(name, ARCHITECTURES[name])

    def make() -> list[Any]:
        return [RotatingKVCache(size, keep) for _ in make_prompt_cache(model)]

    steps = steps_as_the_model(model, make, [prompt, *[1] * 35, 3, 1, 1, 1])
    assert steps >= 37, engine.stopped(model)


def _write(array: mx.array) -> None:
    """Change an array in place."""
    array[...] = array * (1.5 if mx.issubdtype(array.dtype, mx.floating) else 1)


LOOKS: dict[str, Callable[[list[Any]], Any]] = {
    "state": lambda cache: [c.state for c in cache],
    "keys": lambda cache: mx.eval([c.keys for c in cache]),
    "copy": copy.deepcopy,
    "one layer": lambda cache: mx.eval(cache[1].values),
    "pickle": pickle.dumps,
    "bytes": lambda cache: [c.nbytes for c in cache],
    "written": lambda cache: [tree_map(_write, c.keys) for c in cache],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", ["plain", "kept", "bits", "batch of rings"])
def test_whoever_looks_sees_what_stock_shows(look, kind):
    model = qwen()
    runs = Stepped(model, kind, True), Stepped(model, kind, False)
    for count in (1, 2, 5, 9, 2):
        assert_same(*(run(count) for run in runs), kind, runs[0].at)
        for run in runs:
            LOOKS[look](run.cache)
        assert [c.nbytes for c in runs[0].cache] == [c.nbytes for c in runs[1].cache]
    assert_same(*(state(run.cache) for run in runs), kind, look)


@pytest.mark.parametrize("kind", ["plain", "bits", "ring", "batch", "batch of rings"])
def test_trimmed_in_the_midst_of_an_append_buffer(kind):
    model = qwen()
    runs = Stepped(model, kind, True), Stepped(model, kind, False)
    for count, cut in ((1, 1), (3, 2), (5, 4), (3, 1), (9, 0)):
        assert_same(*(run(count) for run in runs), kind, (count, cut))
        assert cut == 0 or {c.trim(cut) for run in runs for c in run.cache} == {cut}
    assert_same(*(state(run.cache) for run in runs), kind, "trimmed")


@pytest.mark.parametrize("kind", ["plain", "bits"])
def test_steps_of_several_tokens_share_an_append_buffer(kind):
    """Also with those of one token, and behind tokens that were taken back."""
    model, begun = qwen(), [None]
    runs = Stepped(model, kind, True), Stepped(model, kind, False)
    rounds = (5, 3), (5, 0), (1, 0), (1, 1), (3, 3), (5, 4), (2, 0), (1, 0), (5, 1), (5, 2)
    with appending(16):
        for length, cut in 2 * rounds:
            assert_same(*(run(length, length) for run in runs), kind, (length, cut))
            for run in runs:
                run.drop(cut) if cut else None
            held = [vars(c)["keys"] for c in runs[0].cache]
            assert all(isinstance(each[0], append_buffers.AppendBuffer) for each in held)
            begun += [held[0][0].buffers] * (held[0][0].buffers is not begun[-1])
    # Each length begins once, and goes on behind the others until 16 rows are full.
    assert len(begun[1:]) == 6
    assert_same(*(state(run.cache) for run in runs), kind, "behind all")


@pytest.mark.parametrize("kind", ["plain", "batch of rings"])
def test_interrupted_anywhere_all_layers_hold_the_token_or_none(kind):
    """An exception at every line that runs, as Ctrl-C raises it."""
    model = qwen()
    files = {each.__file__ for each in (engine, append_form, append_buffers, caches)}
    want = Stepped(model, kind, False)(12)
    lines, goes_on = 0, True
    first = Stepped(model, kind, True)
    first(3)
    while goes_on:
        lines += 1
        run = copy.copy(first)
        run.cache = copy.deepcopy(first.cache)
        if lines % 2:  # one that goes on where the last one left off
            run(1)
        goes_on = interrupted(partial(run, 1), lines, files)
        assert len({length(c) for c in run.cache}) == 1, lines
        run.at = length(run.cache[0])
        assert_same(run(2), want[:, run.at - 7 : run.at - 5], kind, lines)
    assert lines > 40


def length(c: Any) -> int:
    """How many tokens a cache was given."""
    return int(c._offset if hasattr(c, "_offset") else c.offset)
