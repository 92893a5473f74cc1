"""Steps of decoding as one graph compute what the model does, and leave the same caches."""

from __future__ import annotations

import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import BITS, KINDS, logits
from mlx_lm.models import phi3
from mlx_lm.models.cache import (
    make_prompt_cache,
)
from numerics import assert_same_model
from step_models import models_of, pair

from mlx_qlayers import convert_model, revert_model, use_backend
from mlx_qlayers.conversion import (
    cache_slots,
    compiled_blocks,
    compiled_step,
    step_products,
    step_slots,
    step_watch,
)
from mlx_qlayers.conversion.compiled_step import why_not
from mlx_qlayers.conversion.report import LEFT
from mlx_qlayers.decode.snapshot import Snapshot

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
    "spark2_5",
]
DECODED = [kind for kind in KINDS if kind != "none"]


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
    assert turned == ([32, 0] * 6 if name == "cohere2" else [32] * calls * 3)
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
    for stock, ours in zip(*logits(models, "own", 3, VOCABULARY), strict=True):
        assert_same_model(ours, stock, bits=None, what="glm4_moe_lite")
    assert products == [(3, 4)] * 4 * len(graphs)


@pytest.mark.parametrize(("kind", "batch"), [("own", 2), ("padded left", 3)])
def test_latent_attention_is_one_operation(
    kind: str, batch: int, graphs: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer with experts and of one without, whose other half is a fused block's."""
    models, masked = [*pair("deepseek_v3")], list[bool]()
    plain = step_slots.latent_attention

    def counted(*arrays, mask, **options):
        masked.append(mask is not None)
        return plain(*arrays, mask=mask, **options)

    monkeypatch.setattr(step_slots, "latent_attention", counted)
    with use_backend("host"):
        for stock, ours in zip(*logits(models, kind, batch, VOCABULARY), strict=True):
            assert_same_model(ours, stock, bits=None, what=kind)
    assert masked == [kind != "own"] * 2 * len(graphs)
