"""Fused modules compute what the stock ones do, in few launches, whatever is done to a model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from converted import OPERATIONS, PLAIN, TOKENS, add_adapters, calls, decoded, fusions, pair
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model, assert_same_states

from mlx_qlayers import convert_model, explain, revert_model, use_backend
from mlx_qlayers.conversion import fused_blocks
from mlx_qlayers.conversion.fused_blocks import is_fused
from mlx_qlayers.conversion.report import FUSED, LEFT
from mlx_qlayers.dispatch import Choice
from mlx_qlayers.ops import fused_products as ops
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.backend import advance_epoch
from tests.threads import in_threads

NAMES = ["qwen2", "qwen3", "gemma", "qwen3_moe", "granite", "phimoe", "deepseek_v2"]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_parts_compute_the_same(name, gpu_path):
    stock, model = pair(name)
    assert any(map(is_fused, model.modules()))
    assert_same_model(decoded(model), decoded(stock), bits=None, what=name)


def test_launches_of_a_token():
    _, model = pair()
    cache = make_prompt_cache(model)
    model(TOKENS, cache=cache)
    explain(reset=True)
    model(TOKENS[:, :1], cache=cache)
    assert calls() == OPERATIONS


@pytest.mark.parametrize("name", ["qwen2", "gemma", "qwen3_moe"])
def test_many_rows_on_a_gpu_are_fused_too(name, monkeypatch):
    monkeypatch.setattr(fused_blocks, "is_dense", lambda x: True)
    stock, model = pair(name)
    tokens = mx.arange(34).reshape(2, 17) % VOCABULARY
    assert_same_model(model(tokens), stock(tokens), bits=None, what="17 rows")
    with use_backend("host"), trace() as launches:
        y = model(tokens)
        assert_same_model(y, stock(tokens), bits=None, what="17 rows by kernel")
    assert any(launch.kernel == "dequantize_3_affine" for launch in launches)
    model.train()
    with use_backend("host"), trace() as launches:
        mx.eval(model(tokens))
    assert not any(launch.kernel == "dequantize_3_affine" for launch in launches)


def test_many_rows_run_the_code_as_it_was():
    stock, model = pair()
    tokens = mx.random.randint(0, VOCABULARY, (1, 17))
    explain(reset=True)
    assert_same_model(model(tokens), stock(tokens), bits=None, what="17 rows")
    assert "fused_products" not in {d.op for d in explain()}


@pytest.mark.parametrize(
    ("name", "group"),
    [("gpt_oss", "q_proj, k_proj, v_proj"), ("qwen3_next", "in_proj_qkvz, in_proj_ba")],
)
def test_products_of_one_input_are_gathered_where_no_more_is_recognised(name, group, gpu_path):
    wanted = ARCHITECTURES[name]._replace(format=(64, 4, "affine"))
    stock, model = build(name, wanted), build(name, wanted)
    found = fusions(convert_model(model))
    assert (FUSED, f"{group} in one launch") in found.values()
    assert_same_model(decoded(model), decoded(stock), bits=None, what=name)
    pickle.loads(pickle.dumps(model))
    revert_model(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_adapters_run_the_code_as_it_was():
    stock, model = pair()
    for m in (stock, model):
        add_adapters(m, 1)
    explain(reset=True)
    assert_same_model(decoded(model), decoded(stock), bits=None, what="with adapters")
    fused = sum(d.calls for d in explain() if d.op == "fused_products")
    assert fused == 5 * 4  # of the layer without adapters
    report = convert_model(model)
    left = fusions(report)["model.layers.1.mlp"]
    assert left[0] == "already converted"
    other = revert_model(model) and convert_model(model)
    assert fusions(other)["model.layers.1.mlp"] == (LEFT, "gate_proj is a LoRALinear")


def test_gradient_of_the_embeddings():
    stock, model = pair()
    x = mx.random.normal((1, 3, 128), key=mx.random.key(0))

    def loss(m):
        return lambda x: (m(TOKENS[:, :3], input_embeddings=x) ** 2).mean()

    expected = mx.grad(loss(stock))(x)
    for function in (loss(model), mx.checkpoint(loss(model)), mx.compile(loss(model))):
        found = mx.grad(function)(x)
        assert_same_states(found, expected, bits=None, what="gradient")


def test_gradient_of_compiled_parts(gpu_path):
    """The second time the parts have been traced, without what carries gradients."""
    test_gradient_of_the_embeddings()
    decoded(pair()[1])
    test_gradient_of_the_embeddings()


@pytest.mark.parametrize("gpu_path", ["compiled"], indirect=True)
def test_gradient_where_launches_without_one_were_traced(gpu_path, monkeypatch):
    """What stands in for a kernel has no gradient of its own, as kernels have none."""
    launched = []

    def qmv(specs, fmt, config, *, epsilon=None, gate=None, norm_first=False):
        composed = ops._composed(ops._one_by_one(fmt), epsilon, gate)

        def launch(*arrays):
            launched.append(fmt)
            return [mx.stop_gradient(y) for y in composed(*arrays)]

        return launch

    choice = Choice("fused_products", "metal", "asked for")
    monkeypatch.setattr(ops, "choose", lambda *args, **options: choice)
    monkeypatch.setattr(ops, "qmv", qmv)
    advance_epoch()
    stock, model = pair(num_hidden_layers=3, vocab_size=VOCABULARY, rms_norm_eps=3e-5)
    assert_same_model(decoded(model), decoded(stock), bits=None, what="stand-in")
    traces = len(launched)
    assert_same_model(decoded(model), decoded(stock), bits=None, what="stand-in")
    assert 0 < traces == len(launched)
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0))
    expected, found = (
        mx.grad(lambda x, m=m: (m(TOKENS[:, :1], input_embeddings=x) ** 2).mean())(x)
        for m in (stock, model)
    )
    assert_same_states(found, expected, bits=None, what="gradient")
    assert len(launched) > traces
    advance_epoch()
    explain(reset=True)


def test_parameters_that_change_are_seen(gpu_path):
    stock, model = pair()
    decoded(model)
    for m in (stock, model):
        m.layers[0].input_layernorm.weight = m.layers[0].input_layernorm.weight * 2
        m.layers[1].mlp.down_proj.scales = m.layers[1].mlp.down_proj.scales * 0.5
    assert_same_model(decoded(model), decoded(stock), bits=None, what="other parameters")


def test_compile_of_the_whole_model():
    stock, model = pair()
    found = mx.compile(model)(TOKENS)
    assert_same_model(found, stock(TOKENS), bits=None, what="compiled")


def test_threads(gpu_path):
    """Several threads decode with one model: each sees its own numbers."""
    _, model = pair()
    expected = decoded(model)
    mx.eval(expected)

    def run(_: int) -> mx.array:
        logits = decoded(model)
        mx.eval(logits)
        return logits

    for logits in in_threads(run, 4, same_context=True):
        assert_same_model(logits, expected, bits=None, what="in a thread")


def test_copies_and_pickles():
    _, model = pair()
    expected = decoded(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert mx.array_equal(decoded(twin), expected)
        twin.layers[0].input_layernorm.weight = twin.layers[0].input_layernorm.weight * 2
        assert not mx.array_equal(decoded(twin), expected)
    assert mx.array_equal(decoded(model), expected)


def test_without_patched_attention():
    stock, model = build("qwen2", PLAIN), build("qwen2", PLAIN)
    report = convert_model(model, attention=False)
    assert fusions(report)["model.layers.0.self_attn"][0] == FUSED
    explain(reset=True)
    assert_same_model(decoded(model), decoded(stock), bits=None, what="stock attention")
    assert "attention" not in {d.op for d in explain()}
    assert revert_model(model).counts == {"reverted": 16}
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_plans_are_let_go_with_their_modules():
    gc.collect()
    before = set(fused_blocks._plans)
    _, model = pair()
    decoded(model, steps=1)
    blocks = [weakref.ref(layer) for layer in model.layers]
    assert {id(block()) for block in blocks} <= set(fused_blocks._plans) - before
    del model
    gc.collect()
    assert not any(block() for block in blocks) and set(fused_blocks._plans) <= before


def test_rows_of_changing_number(gpu_path):
    """As in speculative decoding: what was bound for one number of rows is not used for another."""
    stock, model = pair()
    results = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        chunks = [TOKENS[:, :3], TOKENS[:, :1], TOKENS[:, 2:5], TOKENS[:, :1], TOKENS[:, :1]]
        results.append(mx.concatenate([m(chunk, cache=cache) for chunk in chunks], axis=1))
    assert_same_model(*reversed(results), bits=None, what="rows of changing number")
