"""Steps of decoding: gradients, threads, generation of several sequences, and what they leave."""

import copy
import gc
import itertools
import threading
import weakref
from functools import partial

import mlx.core as mx
import pytest
from converted import decoded, pair
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from numerics import assert_same_model, assert_same_states
from step_models import capturing, left

from mlx_qlayers import convert_model
from mlx_qlayers.decode import engine
from mlx_qlayers.decode import weights as step_weights
from mlx_qlayers.layers.qlinear import QLinear
from tests.devices import has_device
from tests.threads import in_threads, switching

pytestmark = pytest.mark.usefixtures("gpu_path")


def test_gradient_through_steps():
    """By keys and values of a prompt, and by an embedding: these are the model's own steps."""
    stock, model = pair()
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0))
    gradients = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        m(mx.array([[1, 2, 3]]), cache=cache)

        def loss(x, keys, m=m, cache=cache):
            own = copy.deepcopy(cache)
            own[0].keys = keys
            logits = [m(mx.array([[i]]), cache=own) for i in (4, 5)]
            return ((m(mx.array([[1]]), input_embeddings=x, cache=own) + sum(logits)) ** 2).mean()

        loss(x, cache[0].keys)
        gradients.append(mx.grad(loss, argnums=(0, 1))(x, cache[0].keys))
    for found, expected in zip(*reversed(gradients), strict=True):
        assert_same_states(found, expected, bits=None, what="gradient")
    assert "gradient of a cache" in engine.stopped(model)
    assert left(model) == 2


def test_a_gradient_by_parameters_takes_no_graph():
    gradients = []
    for m in (models := pair()):
        cache = make_prompt_cache(m)
        m(mx.array([[1, 2, 3]]), cache=cache)

        def loss(weight, m=m, cache=cache):
            m.model.norm.weight = weight
            return (m(mx.array([[4]]), cache=copy.deepcopy(cache)) ** 2).mean()

        gradients.append(mx.grad(loss)(m.model.norm.weight))
    assert_same_states(*reversed(gradients), bits=None, what="gradient")
    assert "gradient" in engine.stopped(models[1])


def test_positions_that_differ_between_layers():
    """No cache does that by itself, but nothing forbids it."""
    stock, model = pair()
    found = []
    for m in (stock, model):
        cache = [BatchKVCache([0, 3]) for _ in m.layers]
        m(mx.array([[1, 2, 3], [4, 5, 6]]), cache=cache)
        cache[1].offset = cache[1].offset + 2
        found.append(
            mx.concatenate([m(mx.array([[7], [8]]), cache=cache) for _ in range(3)], axis=1)
        )
        assert cache[1].offset.tolist() == [8, 5]
    assert_same_model(found[1], found[0], bits=None, what="positions")
    assert engine.stopped(model) is None


@pytest.mark.parametrize(
    ("gpu_path", "count"), [("compiled", 3), ("kernels", 19)], indirect=["gpu_path"]
)
def test_generation_of_several_sequences(count):
    """mlx-lm pads their prompts, lets go of those that have ended, and takes others meanwhile."""
    prompts = [[1 + (3 * i + j) % 20 for j in range(1 + i % 5)] for i in range(count)]
    wanted, later, found = [4 + i % 6 for i in range(count)], [7, 3], []
    for m in pair():
        generator, tokens = BatchGenerator(m, completion_batch_size=count + 2), {}
        generator.insert(prompts, wanted)
        for step in itertools.count():
            for response in (responses := generator.next_generated()):
                tokens.setdefault(response.uid, []).append(response.token)
            if not responses:
                break
            if step == 2:
                generator.insert([[5, 6, 7], [8]], later)
        generator.close()
        found.append([tokens[uid] for uid in sorted(tokens)])
    assert found[1] == found[0]
    assert [len(t) for t in found[0]] == wanted + later
    assert left(m) <= 4


def test_threads():
    _, model = pair()
    expected = decoded(model)
    mx.eval(expected)

    def run(_: int) -> mx.array:
        logits = decoded(model)
        mx.eval(logits)
        return logits

    found = in_threads(run, 3, same_context=True)
    assert engine.stopped(model) is None
    for logits in found:
        assert_same_model(logits, expected, bits=None, what="in a thread")


def test_two_models_in_two_threads():
    """Both are captured at once: neither goes on from a run of its code before the other has."""
    names, together = ("qwen2", "qwen3_moe"), threading.Barrier(2)
    alone = [decoded(pair(name)[1]) for name in names]
    mx.eval(alone)

    models = [pair(name)[1] for name in names]

    def run(i: int) -> mx.array:
        logits = decoded(models[i])
        mx.eval(logits)
        return logits

    with capturing(partial(together.wait, 60)), switching(1e-5):
        found = in_threads(run, 2, same_context=True)
    assert not any(map(engine.stopped, models))
    for logits, expected in zip(found, alone, strict=True):
        assert_same_model(logits, expected, bits=None, what="beside another model")


def test_what_a_step_leaves_is_let_go_with_the_cache_and_the_model():
    _, model = pair()
    cache = make_prompt_cache(model)
    decoded(model, cache=cache)
    assert len(engine._steps[id(model)].progress) == 1
    del cache
    assert len(engine._steps[id(model)].progress) == 0
    key, seen = id(model), weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None and key not in engine._steps


@pytest.mark.parametrize("gpu_path", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "phi3"])
def test_launches_that_share_arrays(name, monkeypatch):
    """Weights and append buffers side by side, and results for other launches: the same numbers."""

    _, model = pair(name)
    theirs = make_prompt_cache(model)
    plain = decoded(model, cache=theirs)
    has_device(monkeypatch, "host", launches_views=True)
    _, again = pair(name)
    ours = make_prompt_cache(again)
    weights = [each.weight for each in again.modules() if isinstance(each, QLinear)]
    shared = decoded(again, cache=ours)
    assert mx.array_equal(shared, plain)
    for one, other in zip(ours, theirs, strict=True):
        behind = [vars(each)["keys"][0] for each in (one, other)]
        assert [len(each.buffers) // len(each.arrays) for each in behind] == [2, 1]
        assert mx.array_equal(one.keys, other.keys) and mx.array_equal(one.values, other.values)
    (plan,) = (p for p in engine._steps.values() if p.model() is again)
    assert plan.weights is not None
    assert {id(each) for each in weights} <= {id(each.y) for each in plan.weights}
    wholes = {id(each.whole) for each in plan.weights}
    convert_model(again)
    assert {id(each.whole) for each in step_weights.views_of(again)} == wholes
    assert not engine.stopped(again)
