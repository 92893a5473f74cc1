"""Decoder layers in one graph compute what the loop over them does, and leave the same caches."""

from __future__ import annotations

import copy
import itertools
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY, Architecture, build
from converted import add_adapters
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache, make_prompt_cache
from numerics import assert_same_model, assert_same_states

from mlx_qlayers import convert_model, revert_model
from mlx_qlayers.conversion import compiled_blocks, decoder_loop
from mlx_qlayers.conversion.decoder_loop import with_layers_ahead
from mlx_qlayers.conversion.report import FUSED, LEFT
from tests.threads import in_threads

PLAIN = Architecture(2, {}, format=(64, 4, "affine"))
# Loops over layers with one mask, and with one for each kind of layer.
NAMES = ["qwen2", "qwen3", "llama"]


@pytest.fixture(autouse=True)
def by_kernels(gpu_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers run together on a CPU too."""
    monkeypatch.setattr(decoder_loop, "why_not", lambda *args: None)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call ran together."""
    found: list[int] = []
    run = decoder_loop._Plan.run

    def counted(self, *args):
        found.append(self.count)
        return run(self, *args)

    monkeypatch.setattr(decoder_loop._Plan, "run", counted)
    return found


def pair(name: str = "qwen2", **config) -> tuple[nn.Module, nn.Module]:
    stock, model = (build(name, PLAIN._replace(config=config)) for _ in range(2))
    convert_model(model)
    return stock, model


def caches_of(model: nn.Module, kind: str, batch: int) -> list:
    own = make_prompt_cache(model)
    if kind == "batch":
        return [BatchKVCache([(3 * i) % 5 for i in range(batch)]) for _ in own]
    return [RotatingKVCache(64) for _ in own] if kind == "rotating" else own


def decoded(model: nn.Module, kind: str = "own", batch: int = 1, prompt: int = 9, steps: int = 4):
    """Logits of tokens that follow a prompt, and the caches."""
    tokens = mx.random.randint(0, VOCABULARY, (batch, prompt + steps), key=mx.random.key(1))
    cache = caches_of(model, kind, batch)
    model(tokens[:, :prompt], cache=cache)
    parts = [model(tokens[:, prompt + i :][:, :1], cache=cache) for i in range(steps)]
    return mx.concatenate(parts, axis=1), cache


def same(model: nn.Module, stock: nn.Module, what: str, *args) -> None:
    (found, ours), (truth, theirs) = decoded(model, *args), decoded(stock, *args)
    assert_same_model(found, truth, bits=None, what=what)
    for a, b in zip(ours, theirs, strict=True):
        assert isinstance(a, type(b)) and mx.array_equal(mx.array(a.offset), mx.array(b.offset))
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            assert x.dtype == y.dtype
            assert_same_states(x, y, bits=None, what=f"{what}: caches")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "batch"), [("own", 1), ("own", 3), ("batch", 3)])
def test_layers_in_one_trace_compute_the_same(name, kind, batch, runs):
    stock, model = pair(name)
    same(model, stock, f"{name} {kind}", kind, batch)
    assert runs == [2] * 4


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_norms_deferred_from_product_to_product(name, together, runs, gpu_path, monkeypatch):
    """As on CUDA in bfloat16, from graph to graph too: only the first norm is an operation."""
    deferred, products = [], compiled_blocks.dispatch

    def counted(operation, arrays, static):
        x, _, tile_squares, *_ = arrays
        *_, epsilon, _ = static
        if epsilon is not None and x.shape[1] == 1:
            deferred.append(tile_squares is not None)
        return products(operation, arrays, static)

    stock, model = pair(name)
    monkeypatch.setattr(decoder_loop, "_TOGETHER", together)
    monkeypatch.setattr(compiled_blocks, "defers_norm", lambda x: x.shape[1] == 1)
    monkeypatch.setattr(compiled_blocks, "dispatch", counted)
    same(model, stock, f"{name}, deferred", "own", 3)
    assert runs == [2] * 4 and deferred.count(True) == 3 * deferred.count(False) > 0
    assert deferred == [False, True, True, True] or gpu_path == "kernels"


def test_buffers_that_grow(runs):
    stock, model = pair()
    same(model, stock, "growing", "own", 1, 254, 5)
    assert runs == [2] * 5


@pytest.mark.parametrize("kind", ["rotating"])
def test_other_caches_are_left_to_the_loop(kind, runs):
    stock, model = pair()
    same(model, stock, kind, kind)
    assert runs == []


def test_caches_that_differ_are_left_to_the_loop(runs):
    stock, model = pair()
    tokens = mx.array([[1, 2, 3, 4]])
    found = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        m(tokens, cache=cache)
        cache[1].trim(1)
        found.append(m(tokens[:, :1], cache=cache))
    assert_same_model(found[1], found[0], bits=None, what="trimmed")
    assert runs == []


def test_layers_with_adapters_and_those_behind_them_are_left_to_the_loop(runs):
    stock, model = pair(num_hidden_layers=4)
    for m in (stock, model):
        add_adapters(m, 2)
    same(model, stock, "adapters")
    assert runs == [2] * 4


def test_changes_between_tokens_are_seen(runs):
    stock, model = pair()
    tokens, found = mx.array([[1, 2, 3, 4, 5, 6, 7, 8]]), []
    for m in (stock, model):
        cache, logits = make_prompt_cache(m), []
        m(tokens, cache=cache)
        layer = m.layers[1]
        for change in (
            lambda layer=layer: None,
            lambda layer=layer: layer.mlp.down_proj.update(
                {"scales": layer.mlp.down_proj.scales * 0.5}
            ),
            lambda layer=layer: setattr(layer.input_layernorm, "eps", 0.3),
            lambda layer=layer: setattr(layer.self_attn, "scale", 0.1),
            lambda layer=layer: setattr(layer.self_attn.rope, "base", 77.0),
            lambda layer=layer, m=m: layer.mlp.update(
                {"gate_proj": copy.deepcopy(m.layers[0].mlp.gate_proj)}
            ),
            lambda m=m: m.layers.reverse(),
        ):
            change()
            logits.append(m(tokens[:, :1], cache=cache))
        found.append(mx.concatenate(logits, axis=1))
    assert_same_model(found[1], found[0], bits=None, what="changes")
    assert runs == [2] * 7
    assert len({float(found[0][0, i].sum()) for i in range(7)}) == 7


def test_gradient_through_a_step(runs):
    stock, model = pair()
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0))
    gradients = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        m(mx.array([[1, 2, 3]]), cache=cache)

        def loss(x, m=m, cache=cache):
            return (m(mx.array([[1]]), input_embeddings=x, cache=copy.deepcopy(cache)) ** 2).mean()

        loss(x)
        gradients.append(mx.grad(loss)(x))
    assert_same_states(gradients[1], gradients[0], bits=None, what="gradient")
    assert runs


@pytest.mark.parametrize("kind", ["own", "batch"])
def test_caches_that_are_cut_between_tokens(kind, runs):
    stock, model = pair()
    tokens = mx.random.randint(0, VOCABULARY, (3, 12), key=mx.random.key(3))
    found = []
    for m in (stock, model):
        cache, logits = caches_of(m, kind, 3), []
        m(tokens[:, :6], cache=cache)
        rows = tokens
        for i in range(6, 12):
            if i == 8:
                for c in cache:
                    c.trim(2)
            if i == 10 and kind == "batch":
                rows = tokens[1:]
                for c in cache:
                    c.filter(mx.array([1, 2]))
            logits.append(m(rows[:, i : i + 1], cache=cache))
        found.append(mx.concatenate(logits, axis=0))
    assert_same_model(found[1], found[0], bits=None, what=f"cut {kind}")
    assert runs == [2] * 6


def test_positions_that_differ_between_layers(runs):
    """No cache does that by itself, but nothing forbids it."""
    stock, model = pair()
    found = []
    for m in (stock, model):
        cache = caches_of(m, "batch", 2)
        m(mx.array([[1, 2, 3], [4, 5, 6]]), cache=cache)
        cache[1].offset = cache[1].offset + 2
        found.append(
            mx.concatenate([m(mx.array([[7], [8]]), cache=cache) for _ in range(3)], axis=1)
        )
        assert cache[1].offset.tolist() == [8, 5]
    assert_same_model(found[1], found[0], bits=None, what="positions")
    assert runs == [2] * 3


def test_two_sequences_that_share_a_prompt(runs):
    """Nothing is written into buffers that somebody else has."""
    tokens = mx.array([[1, 2, 3, 4]])

    def both(model):
        first = make_prompt_cache(model)
        model(tokens, cache=first)
        second = copy.deepcopy(first)
        one = [model(tokens[:, i : i + 1], cache=first) for i in (0, 1)]
        two = [model(tokens[:, i : i + 1], cache=second) for i in (2, 3)]
        return mx.concatenate(one + two, axis=1)

    expected, found = map(both, pair())
    assert_same_model(found, expected, bits=None, what="shared prompt")


@pytest.mark.parametrize(
    ("gpu_path", "count"), [("compiled", 3), ("kernels", 19)], indirect=["gpu_path"]
)
def test_generation_of_several_sequences(count, runs, monkeypatch):
    """mlx-lm pads their prompts, lets go of those that have ended, and takes others meanwhile."""
    monkeypatch.setattr(decoder_loop, "in_one_launch", lambda x: x.size <= 128 * x.shape[-1])
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
    assert len(runs) >= 9 and set(runs) == {2}


def test_threads(runs):
    _, model = pair()
    expected, _ = decoded(model)
    mx.eval(expected)

    def run(_: int) -> mx.array:
        logits, _ = decoded(model)
        mx.eval(logits)
        return logits

    found = in_threads(run, 3, same_context=True)
    assert len(runs) == 16
    for logits in found:
        assert_same_model(logits, expected, bits=None, what="in a thread")


def test_arrays_are_let_go_with_the_cache():
    _, model = pair()
    before = len(decoder_loop._plans)
    _, cache = decoded(model)
    assert len(decoder_loop._plans) == before + 1
    del cache
    assert len(decoder_loop._plans) == before


def test_report_switches_copies_and_back():
    model = build("qwen2", PLAIN)
    report = convert_model(model, predicate=lambda path, module: path != "model")
    rows = {row.path: (row.kind, row.action, row.reason) for row in report.fusions}
    assert rows["model"] == ("stack", LEFT, "the predicate says so")
    rows = {row.path: row for row in convert_model(model).fusions}
    assert rows["model"].action == FUSED and rows["model"].reason.startswith(
        "2 layers in one trace"
    )
    assert {row.kind for row in convert_model(model).fusions if row.path == "model"} == {"stack"}
    expected, _ = decoded(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert mx.array_equal(decoded(twin)[0], expected)
    revert_model(model)
    stock = build("qwen2", PLAIN)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_loops():
    class Plain(nn.Module):
        def __call__(self, h, mask, cache):
            for layer, c in zip(self.layers, cache):  # noqa: B905
                h = layer(h, mask, c)
            return h

    class Used(nn.Module):
        def __call__(self, h, mask, cache):
            for layer, c in zip(self.layers, cache):  # noqa: B905
                h = layer(h, mask, c)
            return h, c

    class Other(nn.Module):
        def __call__(self, h, mask, cache):
            for layer, c in zip(self.layers, cache):  # noqa: B905
                mask = layer.mask(h)
                h = layer(h, mask, c)
            return h

    for cls, line, reason in (
        (Used, "return h, c", "c is used after the loop"),
        (Other, "mask = layer.mask(h)", "layer.mask where layer_loop has layer"),
        (nn.Linear, "", "no statement is like layer_loop"),
    ):
        mismatch = with_layers_ahead(cls.__call__)
        assert not mismatch and line in mismatch.line and reason in mismatch.reason
    twin, x = Plain(), mx.array([1.0])
    twin.layers = [lambda h, mask, c: h + mask + c, lambda h, mask, c: h * c]
    assert (
        with_layers_ahead(Plain.__call__)(twin, x, 2, [3, 4]).item()
        == twin(x, 2, [3, 4]).item()
        == 24
    )
