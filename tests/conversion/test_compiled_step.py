"""Steps of decoding as one graph compute what the model does, and leave the same caches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, Architecture, build
from decoding import BITS, KINDS, logits
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import phi3
from mlx_lm.models.cache import (
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from numerics import assert_same_model, assert_same_states

from mlx_qlayers import convert_model, revert_model, use_backend
from mlx_qlayers.conversion import (
    cache_slots,
    compiled,
    compiled_blocks,
    compiled_step,
    step_products,
    step_slots,
    step_watch,
)
from mlx_qlayers.conversion.compiled_step import why_not
from mlx_qlayers.conversion.report import LEFT
from mlx_qlayers.conversion.snapshot import Snapshot
from mlx_qlayers.ops import attention_step

# What no graph can hold, and the beginning of the reason.
LEFT_TO_THE_MODEL = {
    "dbrx": "dbrx.py:163: for xt, st, it in zip(x, scores, inds.tolist()):",
    "deepseek_v41": "a cache is a LayerCache",
}
# One of each kind of block: norms on both sides, experts, states, latent keys, sinks, rings.
NAMES = [
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v3",
    "cohere2",
    "mamba2",
    "baichuan_m1",
    "gemma4_text",
    "nemotron_h",
    "nemotron-nas",
    "mistral3",
    "deepseek_v32",
    "gemma3n",
    "gpt_bigcode",
    "llama4",
    "minimax_m3_vl",
    "afm7",
]
DECODED = [kind for kind in KINDS if kind != "none"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every call of a graph; as on a GPU, but that MLX compiles nothing, which takes minutes."""
    calls: list[object] = []
    run = compiled_step._Graph.computed

    def counted(self, *args):
        calls.append(self)
        return run(self, *args)

    monkeypatch.setattr(compiled_step._Graph, "computed", counted)
    # As where attention has a kernel.
    covered = attention_step._covers
    monkeypatch.setattr(cache_slots, "why_not", lambda *args: None if covered(*args) else "none")
    context = "ops", threading.get_ident()
    with use_backend("ops"):
        mx.disable_compile()
        monkeypatch.setattr(
            compiled, "context", lambda: None if step_slots.current_step.get() else context
        )
        yield calls
        mx.enable_compile()


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The stock model, and the same one whose steps are graphs."""
    return models_of(name, ARCHITECTURES[name])


def models_of(name: str, architecture: Architecture) -> tuple[nn.Module, nn.Module]:
    """The same two of a changed architecture."""
    stock, model = (build(name, architecture) for _ in range(2))
    convert_model(model, verify=False)
    if not isinstance(model, compiled_step.step_class(type(stock))):  # its layers run together
        model.__class__ = compiled_step.step_class(type(model))
    return stock, model


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, graphs: list[object]) -> None:
    models = [*pair(name)]
    for i, kind in enumerate(kind for kind in DECODED if kind not in ARCHITECTURES[name].without):
        graphs.clear()
        steps = zip(*logits(models, kind, (1, 3)[i % 2], VOCABULARY), strict=True)
        for number, (stock, found) in enumerate(steps):
            what = f"{name}, cache {kind}, step {number}"
            bits = BITS if kind == "quantized" else None
            assert_same_model(found, stock, bits=bits, what=what)
        assert len(graphs) >= 3, compiled_step.stopped(models[1])


@pytest.mark.parametrize("name", [*NAMES[:3], "minimax_m3_vl", "llama4", "afm7"])
def test_a_cache_that_grows_and_one_that_is_trimmed(name: str, graphs: list[object]) -> None:
    """Past the rows that a cache begins with, and over the rows of tokens that were taken back."""
    results = []
    tokens = mx.random.randint(0, VOCABULARY, (1, 270), key=mx.random.key(1))
    for model in pair(name):
        cache = make_prompt_cache(model)
        parts = [model(tokens[:, :250], cache=cache)]
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(250, 260)]
        if all(c.is_trimmable() for c in cache):
            assert [c.trim(6) for c in cache] == [6] * len(cache)
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(260, 270)]
        results.append(mx.concatenate(parts, axis=1)[0])
    assert len(graphs) >= 23, compiled_step.stopped(model)
    assert_same_model(*reversed(results), bits=None, what=name)


def test_caches_that_are_looked_at_and_cut_between_tokens(graphs: list[object]) -> None:
    """And of one layer alone; else a token goes on where the one before it ended."""
    results = []
    for model in pair("phi3"):
        cache = make_prompt_cache(model)
        parts = [model(mx.array([[1, 2, 3]]), cache=cache)]
        for i in range(24):
            parts.append(model(mx.array([[4 + i]]), cache=cache))
            if i % 5 == 2:
                mx.eval(cache[1].state)
            if i % 7 == 3:
                assert [c.trim(2) for c in cache] == [2] * len(cache)
            if i % 7 == 6:
                cache[-1].keys = cache[-1].keys * 2
        results.append(mx.concatenate(parts, axis=1)[0])
    assert_same_model(*reversed(results), bits=None, what="after it")


def test_caches_that_hold_different_numbers_of_tokens(graphs: list[object]) -> None:
    """The mask that a model makes of its first cache hides nothing of the others."""
    results, tokens = [], mx.array([[1, 2, 3, 4]])
    for model in pair("phi3"):
        cache = make_prompt_cache(model)
        model(tokens, cache=cache)
        cache[1].trim(1)
        results.append(model(tokens[:, :1], cache=cache))
    assert graphs
    assert_same_model(*reversed(results), bits=None, what="trimmed")


def test_a_replaced_weight_is_seen(graphs: list[object]) -> None:
    stock, model = pair("phi3")
    results = []
    for each in (stock, model):
        cache = make_prompt_cache(each)
        each(mx.array([[1, 2, 3]]), cache=cache)
        each(mx.array([[4]]), cache=cache)
        each.model.norm.weight = each.model.norm.weight * 2
        results.append(each(mx.array([[5]]), cache=cache)[0])
    assert_same_model(*reversed(results), bits=None, what="after it")
    revert_model(model)
    assert type(model) is type(stock)


def test_a_model_that_was_converted_in_two_goes_is_reverted() -> None:
    stock, model = (build("phi3", ARCHITECTURES["phi3"]) for _ in range(2))
    convert_model(model, predicate=lambda path, module: path != "", verify=False)
    convert_model(model, verify=False)
    revert_model(model)
    assert [*map(type, model.modules())] == [*map(type, stock.modules())]


def test_what_was_not_replaced_stays_where_it_is_when_a_trial_ends() -> None:
    """Other threads may compute with the model meanwhile."""
    norm, calls = nn.RMSNorm(4), list[str]()
    before = Snapshot([norm])
    norm.weight, norm.eps, norm.new = mx.zeros(4), 2.0, 3
    sys.setprofile(lambda frame, event, arg: calls.append(getattr(arg, "__name__", "")))
    try:
        before.restore()
    finally:
        sys.setprofile(None)
    assert before.holds() and "update" in calls and "clear" not in calls


def test_the_report_names_the_line_that_stops_a_graph() -> None:
    for name, reason in LEFT_TO_THE_MODEL.items():
        report = convert_model(build(name, ARCHITECTURES[name]), dry_run=True)
        (row,) = [row for row in report.fusions if row.kind == "step"]
        assert row.action == LEFT and row.reason.startswith(reason), (name, row.reason)


def test_what_a_trial_changes_in_a_model_is_put_back() -> None:
    model = build("plamo3", ARCHITECTURES["plamo3"])
    norms = [module for module in model.modules() if "_scale" in vars(module)]
    before = [dict(vars(module)) for module in norms]
    assert norms and not why_not(model)
    assert [vars(module) for module in norms] == before


def test_a_model_that_looks_at_the_size_of_a_cache_is_left(graphs: list[object]) -> None:
    class Sized(phi3.Model):
        def __call__(self, inputs, cache=None):
            return phi3.Model.__call__(self, inputs, cache) * cache[0].keys.shape[2]

    models = [build("phi3", ARCHITECTURES["phi3"]) for _ in range(2)]
    for model in models:
        model.__class__ = Sized
    models[1].__class__ = compiled_step.step_class(Sized)
    for found, expected in zip(*logits(models, "own", 1, VOCABULARY), strict=True):
        assert_same_model(found, expected, bits=None, what="phi3")
    assert "rows a cache has" in (compiled_step.stopped(models[1]) or "")


def test_arrays_that_a_call_replaces_by_equal_ones(graphs: list[object]) -> None:
    """They stay as they are; others are seen."""
    results, added = [], []
    for model in pair("gemma3n"):
        cache, parts = make_prompt_cache(model), list[mx.array]()
        for tokens in ([1, 2, 3], [4], [5, 6], [7], [8]):
            graphs_before = len(graphs)
            if tokens == [8]:
                coefs = model.layers[0].altup.prediction_coefs
                coefs.weight = coefs.weight * 2
            parts.append(model(mx.array([tokens]), cache=cache))
            added.append(len(graphs) - graphs_before)
        results.append(mx.concatenate(parts, axis=1)[0])
    assert added == [0] * 5 + [0, 4, 0, 1, 4]  # three that are tried out
    assert_same_model(*reversed(results), bits=None, what="gemma3n")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("deepseek_v32", {"index_topk": 260}),
        ("minimax_m3_vl", {"index_block_size": 64, "index_topk_blocks": 4}),
    ],
)
def test_sparse_attention_begins_in_a_larger_cache(
    name: str, config: dict[str, int], graphs: list[object]
) -> None:
    """Fewer rows than it takes are tried out first."""
    table = ARCHITECTURES[name]
    changed = table._replace(config={**table.config, **config})
    tokens, results = mx.random.randint(0, VOCABULARY, (1, 264), key=mx.random.key(1)), []
    for model in models_of(name, changed):
        cache = make_prompt_cache(model)
        parts = [model(tokens[:, :250], cache=cache)]
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(250, 264)]
        results.append(mx.concatenate(parts, axis=1)[0])
    assert len(graphs) > 14 + 3, compiled_step.stopped(model)
    assert_same_model(*reversed(results), bits=None, what=name)


@pytest.mark.parametrize(
    ("name", "sums", "deferred", "gated"),
    [("phi3", 4, 4, 2), ("minimax", 2, 2, 0), ("cohere2", 12, 0, 4)],
)
def test_sums_and_norms_are_in_the_launch_of_a_product(
    name: str,
    sums: int,
    deferred: int,
    gated: int,
    graphs: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of blocks whose code is in no pattern; as on an NVIDIA GPU. Of two sums one is made anew."""
    monkeypatch.setattr(step_products, "defers_norm", lambda x: True)
    found, gates = list[tuple[bool, bool]](), list[object]()
    plain = compiled_blocks.dispatch

    def counted(operation, arrays, static):
        if operation is compiled_blocks.FUSED_PRODUCTS:
            found.append((arrays[3] is not None, arrays[4] is not None))
            gates.append(static[-1])
        return plain(operation, arrays, static)

    monkeypatch.setattr(compiled_blocks, "dispatch", counted)
    models = models_of(name, ARCHITECTURES[name]._replace(format=(64, 4, "affine")))
    steps = zip(*logits([*models], "own", 1, VOCABULARY), strict=True)
    for number, (stock, ours) in enumerate(steps):
        assert_same_model(ours, stock, bits=None, what=f"{name}, step {number}")
    tokens = len(graphs)
    assert tokens >= 3 + 3
    assert found.count((True, False)) == sums * tokens
    assert found.count((True, True)) == deferred * tokens
    assert gates.count("silu") >= gated * tokens  # in prompts of few tokens as well


@pytest.mark.parametrize(
    ("name", "calls", "bits"),
    [("phi3", 2, 0), ("qwen3_moe", 2, 0), ("cohere2", 2, 0), ("phi3", 2, 4)],
)
def test_attention_turns_and_writes_a_tail(
    name: str, calls: int, bits: int, graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers whose caches keep all tokens, and of rings, which have none (cohere2)."""
    turned: list[int] = []
    masks: list[object] = []
    step = cache_slots.attention_step

    def counted(*args, rotation, **options):
        turned.append(rotation.dims)
        masks.append(options["mask"])
        return step(*args, rotation=rotation, **options)

    monkeypatch.setattr(cache_slots, "attention_step", counted)
    _, model = pair(name)
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    cache = [c.to_quantized(32, bits) for c in cache] if bits else cache
    buffers = []
    for _ in range(3):
        model(mx.array([[4]]), cache=cache)
        (now,) = compiled_step._plans[id(model)].progress.values()
        buffers.append(list(map(id, now.tail.buffers)))
    assert turned == [0] * 12 if name == "cohere2" else turned == [32] * calls * 3
    assert set(map(type, masks)) == {type(None)}
    assert buffers[0] == buffers[1] == buffers[2] and len(buffers[0]) == 2 * calls


def test_matrices_of_heads_are_multiplied_as_experts(
    graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of latent attention: one ahead of it and one behind, in each of two layers."""
    models, products = [*pair("glm4_moe_lite")], list[tuple[int, ...]]()
    plain = step_watch.experts_products

    def counted(x, experts, *args):
        products.append(experts.shape)
        return plain(x, experts, *args)

    monkeypatch.setattr(step_watch, "experts_products", counted)
    for stock, ours in zip(*logits(models, "own", 1, VOCABULARY), strict=True):
        assert_same_model(ours, stock, bits=None, what="glm4_moe_lite")
    assert products == [(1, 4)] * 4 * len(graphs)


# Prompt, largest size of the cache, tokens that it keeps.
RINGS = [(5, 8, 4), (11, 8, 0), (8, 8, 2), (3, 300, 0)]


@pytest.mark.parametrize(
    ("name", "ring"), [*(("phi3", ring) for ring in RINGS), ("gemma3_text", RINGS[1])], ids=str
)
def test_rings(name: str, ring: tuple[int, int, int], graphs: list[object]) -> None:
    """More than twice around, behind prompts that are longer, and trimmed while they can be."""
    prompt, size, keep = ring
    results, tokens = [], mx.random.randint(0, VOCABULARY, (1, 60), key=mx.random.key(1))
    for model in pair(name):
        cache = [RotatingKVCache(size, keep) for _ in make_prompt_cache(model)]
        parts = [model(tokens[:, :prompt], cache=cache)]
        for i in range(prompt, prompt + 20):
            parts.append(model(tokens[:, i : i + 1], cache=cache))
            if i == prompt + 1 and all(c.is_trimmable() for c in cache):
                assert [c.trim(2) for c in cache] == [2] * len(cache)
        parts.append(model(tokens[:, 40:43], cache=cache))
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(43, 46)]
        results.append((mx.concatenate(parts, axis=1)[0], cache))
    assert len(graphs) == 23 + 3  # and three that are tried out
    (stock, wanted), (found, held) = results
    assert_same_model(found, stock, bits=None, what=f"{name} {ring}")
    for ours, theirs in zip(held, wanted, strict=True):
        assert ours.state[2:] == theirs.state[2:]
        for a, b in zip(ours.state[:2], theirs.state[:2], strict=True):
            assert_same_states(a, b, bits=None, what="keys and values")


@pytest.mark.parametrize(("name", "keep"), [("gemma3_text", 0), ("phi3", 2)])
def test_a_full_ring_is_read_beside_a_tail(name: str, keep: int, graphs: list[object]) -> None:
    """Until the tail is full, or somebody takes the ring's keys."""
    results, buffers = [], list[int]()
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
            for plan in compiled_step._plans.values():
                rings = [r for now in plan.progress.values() for r in now.rings.values()]
                buffers += [id(rings[0].buffers[0])] if rings and plan.model() is model else []
        results.append(mx.concatenate(parts, axis=1))
    assert_same_states(*reversed(results), bits=None, what=name)
    runs = [len([*run]) for _, run in groupby(buffers)]
    assert runs == ([8, 8, 4, 5] if keep == 0 else [6, 6, 6, 2, 5])


@pytest.mark.parametrize("kind", ["ring", "batch of rings", "plain", "bits"])
def test_a_token_is_written_into_the_arrays_of_a_cache(
    kind: str, graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which MLX makes no copy, as it does if anybody else has them."""
    monkeypatch.setattr(cache_slots, "why_not", lambda *args: "attention has no kernel")
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


@pytest.mark.parametrize("bits", [4, 8])
def test_many_sequences_of_one_length_with_quantized_caches(
    bits: int, graphs: list[object]
) -> None:
    """As many as a launch has no room for in the fewest positions; mlx-lm has no ragged ones."""
    results, tokens = [], mx.random.randint(0, VOCABULARY, (11, 9), key=mx.random.key(1))
    for model in pair("phi3"):
        cache = make_prompt_cache(model)
        model(tokens[:, :5], cache=cache)
        cache = [c.to_quantized(32, bits) for c in cache]
        parts = [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 9)]
        results.append(mx.concatenate(parts, axis=1))
    assert len(graphs) == 3 + 4, compiled_step.stopped(model)
    assert_same_states(*reversed(results), bits=bits, what="11 sequences")


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe", "gemma3_text"])
def test_tokens_are_the_same_alone_in_a_batch_and_by_speculation(
    name: str, graphs: list[object]
) -> None:
    """Greedy tokens in float32, of the stock model and of the converted one."""
    stock, model = pair(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]

    def tokens(model: nn.Module, prompt: list[int]) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=12)]

    greedy = [tokens(stock, prompt) for prompt in prompts]
    graphs.clear()
    assert [tokens(model, prompt) for prompt in prompts] == greedy
    assert len(graphs) >= 3 * 10

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
