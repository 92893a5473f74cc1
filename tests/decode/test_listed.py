"""Steps on a CPU as lists of launches: the numbers, the caches, and what others hold of these."""

import copy
import gc

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from numerics import assert_same_sums

from mlx_qlayers import use_backend
from mlx_qlayers.decode import engine, rewinding
from mlx_qlayers.runtime.host.launch_list import LaunchList, rms_norm

PROMPT = mx.array([[5, 17, 3, 9]])


def lists(model):
    """How many lists of launches the steps of a model have."""
    programs = [
        form.program
        for steps in engine._steps[id(model)].steps.values()
        for step in steps
        for form in step.programs.values()
    ]
    bound = [each for program in programs for each in program._bound.values()]
    return sum(isinstance(s, LaunchList) for b in bound for each in b.listed for s in each)


def stepped(model, cache, tokens, graph):
    made = []
    for token in tokens:
        y = engine.step(model, token, cache) if graph else model(token, cache=cache)
        mx.eval(y)
        made.append(y)
    return mx.concatenate(made, axis=1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("batch", [1, 2])
def test_lists_give_what_the_model_gives(name, batch):
    model = build(name, ARCHITECTURES[name])
    prompt = mx.repeat(PROMPT, batch, axis=0)
    tokens = [mx.arange(batch)[:, None] + 11 + i for i in range(6)]
    caches = [make_prompt_cache(model), make_prompt_cache(model)]
    want = [model(prompt, cache=caches[0]), stepped(model, caches[0], tokens, False)]
    with use_backend("host"):
        found = [model(prompt, cache=caches[1]), stepped(model, caches[1], tokens, True)]
    assert lists(model)
    assert mx.abs(found[1] - want[1]).max() <= 1e-5 * mx.abs(want[1]).max()
    for a, b in zip(*caches, strict=True):
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            assert mx.abs(x - y).max() <= 1e-5 * mx.abs(x).max()


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_of_several_tokens_are_one_list_and_go_back(batch):
    """A step of another length goes on by its list, and so does one behind dropped tokens."""
    model, bits = build("qwen2", ARCHITECTURES["qwen2"]), []
    tokens = mx.arange(batch)[:, None] + mx.arange(40)[None] + 11
    for _ in range(2):  # without lists, and with them
        cache, made, at = make_prompt_cache(model), [], 0
        with use_backend("host"):
            mx.eval(model(mx.repeat(PROMPT, batch, axis=0), cache=cache))
            for length, back in ((1, 0), (1, 0), (1, 0), (3, 0), (3, 2), (3, 1), (1, 0), (3, 0)):
                y = engine.step(model, tokens[:, at : at + length], cache)
                mx.eval(y)
                made.append(y)
                at += length - back
                assert not back or rewinding.rewound(model, cache, back)
        assert lists(model) == 2  # all layers are in one
        bits.append(mx.concatenate(made, axis=1))
        assert all(c.offset == PROMPT.size + at for c in cache)
    assert mx.array_equal(*bits)
    # The same tokens by the model's own code, from the start.
    cache = make_prompt_cache(model)
    want = model(mx.concatenate([mx.repeat(PROMPT, batch, axis=0), tokens[:, :at]], axis=1), cache)
    last = want[:, -3:]
    assert mx.abs(bits[0][:, -3:] - last).max() <= 1e-5 * mx.abs(last).max()


def test_what_others_hold_of_a_cache_stays_as_it_was():
    model = build("qwen2", ARCHITECTURES["qwen2"])
    cache = make_prompt_cache(model)
    token = mx.array([[7]])
    with use_backend("host"):
        mx.eval(model(PROMPT, cache=cache))
        stepped(model, cache, [token] * 5, True)
        held = [x[..., : c.offset, :] for c in cache for x in (c.keys, c.values)]
        other = copy.deepcopy(cache)  # as a server keeps them
        held += [x for c in other for x in (c.keys, c.values)]
        before = [x + 0 for x in held]
        mx.eval(held, before)
        trim_prompt_cache(cache, 4)
        stepped(model, cache, [token + i for i in range(5)], True)
    assert lists(model)
    assert all(mx.array_equal(x, y) for x, y in zip(held, before, strict=True))


def test_lists_hold_no_arrays_of_the_step_that_made_them():
    """A server has lists for many batch sizes, each made with caches of many texts."""
    model = build("qwen2", ARCHITECTURES["qwen2"])
    cache = make_prompt_cache(model)
    with use_backend("host"):
        before = mx.get_active_memory()
        mx.eval(model(mx.zeros((8, 500), mx.int32), cache=cache))
        stepped(model, cache, [mx.array([[7]] * 8)] * 3, True)
    size = sum(c.nbytes for c in cache)
    engine._steps[id(model)].progress.clear()
    del cache
    gc.collect()
    assert lists(model)
    assert mx.get_active_memory() - before < size / 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_norms_of_whole_vectors_and_what_is_left_of_a_row(dtype):
    x, w = (mx.random.normal(n, key=mx.random.key(0)).astype(dtype) for n in ([7, 41], [41]))
    assert_same_sums(rms_norm(x, w, 1e-6), mx.fast.rms_norm(x, w, 1e-6))
    x[0, 3], x[1, 40] = mx.nan, mx.inf
    assert (mx.isnan(rms_norm(x, w, 1e-6)) == mx.isnan(mx.fast.rms_norm(x, w, 1e-6))).all()
