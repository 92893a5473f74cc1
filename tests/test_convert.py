"""convert_model and revert_model on a small Qwen2 and on hand-made modules."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_qlayers import FusedAttention, QLinear, convert_model, explain, revert_model
from mlx_qlayers.conversion import verify
from mlx_qlayers.layers import qlinear
from mlx_qlayers.layers.qlinear import QEmbedding
from tests.numerics import assert_same_model

ARGS = qwen2.ModelArgs("qwen2", 128, 2, 192, 4, 1e-6, 96, 2, tie_word_embeddings=True)
TOKENS = mx.array([[5, 17, 3, 60, 2, 9, 44]])
BASE = {"group_size": 64, "bits": 4}
Q0 = "model.layers.0.self_attn.q_proj"


def qwen(quantized: bool = True, seed: int = 0, **fmt) -> nn.Module:
    mx.random.seed(seed)
    model = qwen2.Model(ARGS)
    if quantized:
        nn.quantize(model, **(fmt or BASE))
    model.eval()
    return model


def snapshot(model: nn.Module):
    """Types, attributes and arrays by path; equal snapshots mean an untouched model."""
    return {
        path: (type(m), dict(vars(m)), {k: id(v) for k, v in m.items()})
        for path, m in model.named_modules()
    }


def test_converts_in_place_and_reverts_exactly():
    model = qwen()
    before, logits = snapshot(model), model(TOKENS)
    report = convert_model(model, config={"quantization": BASE})
    assert report.counts == {"swapped": 17}
    kinds = [row.kind for row in report.rows]
    assert {k: kinds.count(k) for k in set(kinds)} == {"linear": 14, "embedding": 1, "attention": 2}
    assert type(model.model.layers[0].mlp.up_proj) is QLinear
    assert type(model.model.embed_tokens) is QEmbedding
    attention = model.model.layers[1].self_attn
    assert isinstance(attention, FusedAttention) and isinstance(attention, qwen2.Attention)
    assert_same_model(model(TOKENS), logits, bits=None, what="converted")
    assert revert_model(model).counts == {"reverted": 17}
    assert snapshot(model) == before
    assert mx.array_equal(model(TOKENS), logits)


def test_the_converted_model_takes_our_path():
    model = qwen()
    convert_model(model)
    explain(reset=True)
    mx.eval(model(TOKENS))
    calls = {d.op: d.calls for d in explain() if not d.op.startswith("kernel ")}
    assert calls == {
        "fused_products": 8,
        "rotary_embedding": 2,
        "quantized_matmul": 1,
        "attention": 2,
    }


def test_paths_and_parameters_keep_their_names():
    model = qwen()
    names = [k for k, _ in tree_flatten(model.parameters())]
    paths = [p for p, _ in model.named_modules()]
    convert_model(model)
    assert [k for k, _ in tree_flatten(model.parameters())] == names
    assert [p for p, _ in model.named_modules()] == paths


def test_other_models_in_the_process_are_untouched():
    model, other = qwen(), qwen()
    before, names = snapshot(other), dict(vars(qwen2))
    convert_model(model)
    assert snapshot(other) == before and vars(qwen2) == names
    assert qwen2.scaled_dot_product_attention is scaled_dot_product_attention


def test_frozen_state_is_kept():
    model = qwen()
    model.freeze()
    model.model.layers[0].self_attn.q_proj.unfreeze(keys=["bias"])
    convert_model(model)
    assert [k for k, _ in tree_flatten(model.trainable_parameters())] == [Q0 + ".bias"]


def test_converting_twice_is_harmless():
    model = qwen()
    convert_model(model)
    before = snapshot(model)
    assert convert_model(model, config={"quantization": BASE}).counts == {"already converted": 17}
    assert snapshot(model) == before
    assert revert_model(model).counts == {"reverted": 17}
    assert revert_model(model).counts == {}


def test_switches_and_predicate():
    for kw, counts in (
        ({"linear": False}, {"left": 15, "swapped": 2}),
        ({"attention": False}, {"swapped": 15, "left": 2}),
        ({"predicate": lambda path, m: "mlp" not in path}, {"swapped": 11, "left": 6}),
    ):
        report = convert_model(qwen(), **kw)
        assert report.counts == counts
        assert all(row.reason for row in report.rows if row.action == "left")


def test_dry_run_changes_nothing():
    model = qwen()
    before = snapshot(model)
    report = convert_model(model, dry_run=True)
    assert report.dry_run and report.counts == {"swapped": 17} and "dry run" in str(report)
    assert snapshot(model) == before


def test_shared_layers_are_swapped_once():
    shared = nn.QuantizedLinear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert convert_model(model).counts == {"swapped": 1}
    assert model.layers[0] is model.layers[2] and type(model.layers[2]) is QLinear


def test_a_single_layer_is_a_model():
    layer = nn.QuantizedLinear(64, 64)
    convert_model(layer)
    assert type(layer) is QLinear


def test_subclasses_are_left_and_reported():
    class Special(nn.QuantizedLinear):
        pass

    report = convert_model(nn.Sequential(Special(64, 64), nn.QuantizedLinear(64, 64)))
    left, swapped = report.rows
    assert (left.action, left.reason) == ("left", "no counterpart of Special")
    assert swapped.action == "swapped"


def test_survives_deepcopy_compile_and_weights(tmp_path):
    model = qwen()
    convert_model(model)
    logits = model(TOKENS)
    twin = copy.deepcopy(model)
    assert mx.array_equal(twin(TOKENS), logits)
    twin.model.layers[0].mlp.up_proj.scales = twin.model.layers[0].mlp.up_proj.scales * 2
    assert mx.array_equal(model(TOKENS), logits)
    assert mx.allclose(mx.compile(model)(TOKENS), logits, atol=1e-5)
    path = str(tmp_path / "w.safetensors")
    model.save_weights(path)
    other = qwen(seed=1)
    convert_model(other)
    other.load_weights(path)
    assert mx.array_equal(other(TOKENS), logits)
    revert_model(other)
    stock = qwen(seed=2)
    stock.load_weights(path)
    assert mx.array_equal(other(TOKENS), stock(TOKENS))


def test_keeps_no_dequantized_weights():
    model = qwen()
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    convert_model(model)
    for rows in (TOKENS[:, :1], mx.repeat(TOKENS, 10, axis=1)):
        mx.eval(model(rows))
    smallest = min(m.weight.nbytes for _, m in model.named_modules() if isinstance(m, QLinear))
    assert mx.get_active_memory() - before < smallest


class TestQuantizing:
    """nn.Linear layers that config asks to quantize."""

    def test_an_unquantized_model(self):
        model, stock = qwen(quantized=False), qwen(quantized=False)
        eight = "model.layers.1.mlp.up_proj"

        def formats(path, module):
            if not isinstance(module, nn.Linear) or path == Q0:
                return False
            return BASE | {"bits": 8 if path == eight else 4}

        nn.quantize(stock, class_predicate=formats)
        logits = stock(TOKENS)
        layers = {Q0: False, eight: {"bits": 8}}
        report = convert_model(model, config={"quantization": BASE | layers})
        assert report.counts == {"left": 2, "quantized": 13, "swapped": 2}
        rows = {row.path: row for row in report.rows}
        assert (rows[Q0].action, rows[Q0].reason) == ("left", "config says false")
        assert rows[eight].bits == 8
        assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
        assert_same_model(model(TOKENS), logits, bits=None, what="quantized by config")
        assert revert_model(model).counts == {"reverted": 15}
        assert type(model.model.layers[1].mlp.up_proj) is nn.QuantizedLinear

    def test_without_config_they_stay(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64))
        assert convert_model(model).counts == {"left": 1, "swapped": 1}

    def test_the_global_format_does_not_touch_what_a_checkpoint_left_alone(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64))
        assert convert_model(model, config={"quantization": BASE}).counts == {
            "left": 1,
            "swapped": 1,
        }
        named = {"quantization": BASE | {"layers.0": {"bits": 8}}}
        assert convert_model(model, config=named).rows[0].bits == 8

    def test_widths_that_no_group_divides(self):
        model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 64))
        report = convert_model(model, config={"quantization": BASE})
        assert report.counts == {"left": 1, "quantized": 1}
        model = nn.Sequential(nn.Linear(100, 64))
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"layers\.0: config: quantization\.layers\.0 asks"):
            convert_model(model, config={"quantization": BASE | {"layers.0": True}})
        assert snapshot(model) == before

    def test_the_models_own_predicate(self):
        class Model(nn.Sequential):
            @property
            def quant_predicate(self):
                return lambda path, m: {"bits": 8} if path == "layers.0" else path != "layers.1"

        for base in (BASE, {"group_size": 32, "bits": 4, "mode": "mxfp4"}):
            model = Model(*(nn.Linear(64, 64) for _ in range(3)))
            rows = convert_model(model, config={"quantization": base}).rows
            assert [(r.action, r.bits, r.mode) for r in rows] == [
                ("quantized", 8, "affine"),
                ("left", None, None),
                ("quantized", 4, base.get("mode", "affine")),
            ]

    def test_frozen_and_eval_state(self):
        model = nn.Sequential(nn.Linear(64, 64))
        model.eval()
        convert_model(model, config={"quantization": BASE})
        assert not model.layers[0].training
        assert [k for k, _ in tree_flatten(model.trainable_parameters())] == ["layers.0.bias"]
        frozen = nn.Sequential(nn.Linear(64, 64)).freeze()
        convert_model(frozen, config={"quantization": BASE})
        assert not tree_flatten(frozen.trainable_parameters())


class TestRefusals:
    """Every refusal leaves the model as it was."""

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quantization": {"group_size": 64, "bits": 8}}, r"bits=8.*arrays hold .*bits=4"),
            (
                {"quantization": {"group_size": 32, "bits": 4}},
                r"group_size=32.*hold .*size=64",
            ),
            ({"quantization": BASE | {Q0: {"bits": 2}}}, rf"{Q0}: config: quantization\.{Q0} says"),
            ({"quantization": BASE | {Q0: False}}, rf"{Q0}.*says it is not quantized"),
            ({"quantization": BASE | {"mode": "mxfp4", "group_size": 32}}, r"mode='mxfp4'"),
            ({"quantization": {"group_size": 64}}, r"bits is missing"),
            (17, "config must be"),
        ],
    )
    def test_contradictions(self, config, message):
        model = qwen()
        before = snapshot(model)
        with pytest.raises(ValueError, match=message):
            convert_model(model, config=config)
        assert snapshot(model) == before

    def test_arrays_that_contradict_the_module(self):
        model = qwen()
        model.model.layers[1].mlp.up_proj.bits = 8
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: w of shape"):
            convert_model(model)
        assert snapshot(model) == before
        model = qwen()
        model.model.layers[1].self_attn.q_proj.bias = mx.zeros(3)
        with pytest.raises(ValueError, match=r"1\.self_attn\.q_proj: bias of shape \(3,\) must be"):
            convert_model(model)

    def test_a_layer_that_overflows_is_no_contradiction(self):
        model = nn.Sequential(nn.QuantizedLinear(64, 32))
        model.set_dtype(mx.float16)
        model.layers[0].scales = mx.full((32, 1), 6e4, mx.float16)
        assert convert_model(model).counts == {"swapped": 1}

    @pytest.mark.parametrize("model", [None, "model", {}, [nn.Linear(4, 4)]])
    def test_no_module(self, model):
        for function in (convert_model, revert_model):
            with pytest.raises(ValueError, match=r"model must be an mlx\.nn\.Module, not"):
                function(model)

    def test_nothing_quantized(self):
        model = qwen(quantized=False)
        before = snapshot(model)
        with pytest.raises(ValueError, match="the model has no quantized layer"):
            convert_model(model)
        assert snapshot(model) == before
        assert convert_model(model, linear=False).counts == {"left": 15, "swapped": 2}

    @pytest.mark.parametrize("what", ["dispatch", "patched_attention"])
    def test_a_layer_that_disagrees(self, monkeypatch, what):
        module = qlinear if what == "dispatch" else verify
        right = getattr(module, what)
        monkeypatch.setattr(module, what, lambda *a, **kw: right(*a, **kw) * 1.01)
        model = qwen()
        before = snapshot(model)
        with pytest.raises(ValueError, match="disagrees with the stock layer by"):
            convert_model(model)
        assert snapshot(model) == before
        assert convert_model(model, verify=False).counts == {"swapped": 17}

    def test_an_interrupt_in_the_middle(self, monkeypatch):
        class Interrupting(nn.QuantizedLinear):
            def __setattr__(self, name, value):
                if name == "__class__":
                    raise KeyboardInterrupt
                super().__setattr__(name, value)

        model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64), Interrupting(64, 64))
        before = snapshot(model)
        monkeypatch.setitem(qlinear.COUNTERPARTS, Interrupting, QLinear)
        with pytest.raises(KeyboardInterrupt):
            convert_model(model, config={"quantization": BASE | {"layers.0": True}}, verify=False)
        assert snapshot(model) == before

    def test_verification_does_not_use_the_random_state(self):
        mx.random.seed(3)
        expected = mx.random.normal((4,))
        model = qwen()
        mx.random.seed(3)
        convert_model(model)
        assert mx.array_equal(mx.random.normal((4,)), expected)


def test_unmatched_keys_are_reported():
    layers = {"model.layers.9.mlp.up_proj": {"bits": 8}, "vision.0": False}
    report = convert_model(qwen(), config={"quantization": BASE | layers})
    assert report.unmatched == tuple(layers) and "vision.0" in str(report)
    assert report.counts == {"swapped": 17}
