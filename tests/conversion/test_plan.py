"""The decisions about each module: its format, its class, and whether it stays as it is."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from numerics import assert_same_model
from small_qwen import BASE, Q0, TOKENS, qwen, snapshot

from mlx_qlayers import convert_model, revert_model


def test_an_unquantized_model():
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
    assert report.counts == {"left": 2, "quantized": 13, "swapped": 4}
    rows = {row.path: row for row in report.rows}
    assert (rows[Q0].action, rows[Q0].reason) == ("left", "config says false")
    assert rows[eight].bits == 8
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert_same_model(model(TOKENS), logits, bits=None, what="quantized by config")
    assert revert_model(model).counts == {"reverted": 17}
    assert type(model.model.layers[1].mlp.up_proj) is nn.QuantizedLinear


def test_the_global_format_does_not_touch_what_a_checkpoint_left_alone():
    """Nor does a conversion without a format."""
    for config in (None, {"quantization": BASE}):
        model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64))
        assert convert_model(model, config=config).counts == {"left": 1, "swapped": 1}
    named = {"quantization": BASE | {"layers.0": {"bits": 8}}}
    assert convert_model(model, config=named).rows[0].bits == 8


def test_widths_that_no_group_divides():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 64))
    report = convert_model(model, config={"quantization": BASE})
    assert report.counts == {"left": 1, "quantized": 1}
    model = nn.Sequential(nn.Linear(100, 64))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layers\.0: config: quantization\.layers\.0 asks"):
        convert_model(model, config={"quantization": BASE | {"layers.0": True}})
    assert snapshot(model) == before


def test_the_models_own_predicate():
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


def test_frozen_and_eval_state():
    model = nn.Sequential(nn.Linear(64, 64))
    model.eval()
    convert_model(model, config={"quantization": BASE})
    assert not model.layers[0].training
    assert [k for k, _ in tree_flatten(model.trainable_parameters())] == ["layers.0.bias"]
    frozen = nn.Sequential(nn.Linear(64, 64)).freeze()
    convert_model(frozen, config={"quantization": BASE})
    assert not tree_flatten(frozen.trainable_parameters())


def test_arrays_that_contradict_the_module():
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


def test_subclasses_are_left_and_reported():
    class Special(nn.QuantizedLinear):
        pass

    report = convert_model(nn.Sequential(Special(64, 64), nn.QuantizedLinear(64, 64)))
    left, swapped = report.rows
    assert (left.action, left.reason) == ("left", "no counterpart of Special")
    assert swapped.action == "swapped"


def test_switches_and_predicate():
    for kw, counts in (
        ({"linear": False}, {"left": 17, "swapped": 2}),
        ({"attention": False}, {"swapped": 17, "left": 2}),
        ({"predicate": lambda path, m: "mlp" not in path}, {"swapped": 11, "left": 8}),
    ):
        report = convert_model(qwen(), **kw)
        assert report.counts == counts
        assert all(row.reason for row in report.rows if row.action == "left")
