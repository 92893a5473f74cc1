"""Steps of decoding as one graph compute what the model does, and leave the same caches."""

from itertools import chain

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import BITS, KINDS, logits
from mlx_lm.models import phi3
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model
from step_models import left, models_of, pair

from mlx_qlayers import convert_model, explain, revert_model
from mlx_qlayers.conversion.report import FUSED, LEFT
from mlx_qlayers.conversion.stepping import step_class
from mlx_qlayers.decode import engine
from mlx_qlayers.decode.append_form import AppendForm

# Code that no graph can hold, and the beginning of the reason.
LEFT_TO_THE_MODEL = {
    "dbrx": "dbrx.py:163: for xt, st, it in zip(x, scores, inds.tolist()):",
    "deepseek_v41": "a cache is a LayerCache",
}
# Models whose caches of keys all have append buffers, with each kind of cache and mask of mlx-lm's.
APPENDING = ["gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_next", "mamba2", "gemma4", "gpt2"]
APPENDING += ["ministral3"]
# One of each kind of block: norms on both sides, experts, states, latent keys, sinks, rings.
NAMES = [
    *APPENDING, "gemma2", "phi3", "deepseek_v3", "cohere2", "baichuan_m1", "gemma4_text",
    "nemotron_h", "nemotron-nas", "mistral3", "deepseek_v32", "gemma3n", "gpt_bigcode", "llama4",
    "afm7", "spark2_5",
]  # fmt: skip
DECODED = [kind for kind in KINDS if kind != "none"]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, graphs):
    models, number = [*pair(name)], NAMES.index(name)
    others = [kind for kind in DECODED if kind not in ("own", *ARCHITECTURES[name].without)]
    for i, kind in enumerate(["own", *others[number % len(others or "-") :][:1]], number):
        steps = zip(*logits(models, kind, (1, 3)[i % 2], VOCABULARY), strict=True)
        for number, (stock, found) in enumerate(steps):
            what = f"{name}, cache {kind}, step {number}"
            bits = BITS if kind == "quantized" else None
            assert_same_model(found, stock, bits=bits, what=what)
        assert engine.stopped(models[1]) is None
        steps = engine._steps[id(models[1])].steps.items()
        ones = chain(*(found for (length, *_), found in steps if length == 1))
        forms = {type(form) for step in ones for form in step.programs.values()}
        assert name not in APPENDING or forms == {AppendForm}


def test_caches_that_hold_different_numbers_of_tokens(graphs):
    """The mask that a model makes of its first cache hides nothing of the others."""
    results, tokens = [], mx.array([[1, 2, 3, 4]])
    for model in pair("phi3"):
        cache = make_prompt_cache(model)
        model(tokens, cache=cache)
        cache[1].trim(1)
        results.append(model(tokens[:, :1], cache=cache))
    assert engine.stopped(model) is None
    assert_same_model(*reversed(results), bits=None, what="trimmed")


def test_a_model_that_was_converted_in_two_goes_is_reverted():
    stock, model = (build("phi3", ARCHITECTURES["phi3"]) for _ in range(2))
    convert_model(model, predicate=lambda path, module: path != "", verify=False)
    convert_model(model, verify=False)
    revert_model(model)
    assert [*map(type, model.modules())] == [*map(type, stock.modules())]


def test_the_report_names_the_line_that_stops_a_graph():
    for name, reason in LEFT_TO_THE_MODEL.items():
        report = convert_model(build(name, ARCHITECTURES[name]), dry_run=True)
        (row,) = [row for row in report.fusions if row.kind == "step"]
        assert row.action == LEFT and row.reason.startswith(reason), (name, row.reason)


def test_a_capture_changes_nothing_in_a_model():
    model = build("plamo3", ARCHITECTURES["plamo3"])
    norms = [module for module in model.modules() if "_scale" in vars(module)]
    before = [dict(vars(module)) for module in norms]
    (row,) = convert_model(model, dry_run=True).fusions
    assert norms and row.action == FUSED
    assert [vars(module) for module in norms] == before


def test_a_model_that_looks_at_the_size_of_a_cache(graphs):
    class Sized(phi3.Model):
        def __call__(self, inputs, cache=None):
            return phi3.Model.__call__(self, inputs, cache) * cache[0].keys.shape[2]

    models = [build("phi3", ARCHITECTURES["phi3"]) for _ in range(2)]
    for model in models:
        model.__class__ = Sized
    models[1].__class__ = step_class(Sized)
    for found, expected in zip(*logits(models, "own", 1, VOCABULARY), strict=True):
        assert_same_model(found, expected, bits=None, what="phi3")
    assert engine.stopped(models[1]) is None


def test_arrays_that_a_call_replaces_by_equal_ones(graphs):
    """They stay as they are; others are seen."""
    results = []
    explain(reset=True)
    for model in pair("gemma3n"):
        cache, parts = make_prompt_cache(model), list[mx.array]()
        for tokens in ([1, 2, 3], [4], [5, 6], [7], [8]):
            if tokens == [8]:
                coefs = model.layers[0].altup.prediction_coefs
                coefs.weight = coefs.weight * 2
            parts.append(model(mx.array([tokens]), cache=cache))
        results.append(mx.concatenate(parts, axis=1)[0])
    assert left(model) == 0
    assert_same_model(*reversed(results), bits=None, what="gemma3n")


def test_sparse_attention_begins_in_a_larger_cache(graphs):
    table = ARCHITECTURES["deepseek_v32"]
    changed = table._replace(config={**table.config, "index_topk": 260})
    tokens, results = mx.random.randint(0, VOCABULARY, (1, 264), key=mx.random.key(1)), []
    for model in models_of("deepseek_v32", changed):
        cache = make_prompt_cache(model)
        parts = [model(tokens[:, :250], cache=cache)]
        parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(250, 264)]
        results.append(mx.concatenate(parts, axis=1)[0])
    assert engine.stopped(model) is None
    assert_same_model(*reversed(results), bits=None, what="sparse")
