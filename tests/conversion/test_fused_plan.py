"""Which modules share launches, and why others do not."""

from __future__ import annotations

import copy

import mlx.nn as nn
from architectures import build
from converted import PLAIN, decoded, fusions
from numerics import assert_same_model

from mlx_qlayers import QLinear, convert_model
from mlx_qlayers.conversion.fused_blocks import is_fused
from mlx_qlayers.conversion.report import FUSED, LEFT


def test_switch_and_predicate():
    model = build("qwen2", PLAIN)
    report = convert_model(model, fuse=False)
    assert report.fusions == () and not any(map(is_fused, model.modules()))
    report = convert_model(model)
    assert set(report.counts) == {"already converted"}
    assert {action for action, _ in fusions(report).values()} == {FUSED}
    model = build("qwen2", PLAIN)
    found = fusions(convert_model(model, predicate=lambda path, m: not path.endswith("mlp")))
    assert found["model.layers.0.mlp"] == (LEFT, "the predicate says so")
    assert found["model.layers.0"][0] == FUSED and not is_fused(model.layers[0].mlp)


def test_report():
    found = fusions(convert_model(build("qwen2", PLAIN), dry_run=True))
    assert found["model.layers.1"] == (
        FUSED,
        "input_layernorm and self_attn, post_attention_layernorm and mlp, each with its residual",
    )
    assert found["model.layers.1.mlp"][1] == "gate_proj, up_proj and silu in one launch"
    assert found["model.layers.1.self_attn"][1] == "q_proj, k_proj, v_proj in one launch"
    mixed = build("qwen2", PLAIN)
    for layer, name in (("self_attn", "v_proj"), ("mlp", "up_proj")):
        old = mixed.layers[0][layer][name]
        mixed.layers[0][layer][name] = QLinear.from_quantized(old).to_quantized(32, 8)
    stock = copy.deepcopy(mixed)
    found = fusions(report := convert_model(mixed))
    assert found["model.layers.0.self_attn"][1] == "q_proj, k_proj, v_proj in 2 launches"
    assert found["model.layers.0.mlp"] == (LEFT, "gate_proj and up_proj have different formats")
    assert found["model.layers.0"] == (
        FUSED,
        "input_layernorm and self_attn, each with its residual",
    )
    assert "different formats" in str(report) and "different formats" in report.summary()
    assert report.to_dict()["fusions"][0]["path"] == "model.layers.0.self_attn"
    assert_same_model(decoded(mixed), decoded(stock), bits=None, what="mixed formats")


class TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.QuantizedLinear(64, 64), nn.QuantizedLinear(64, 64)


def test_what_is_not_recognised_is_left_and_said():
    class Chain(TwoProducts):
        def __call__(self, x):
            return self.b(self.a(x))

    found = fusions(convert_model(nn.Sequential(Chain())))
    assert found == {"layers.0": (LEFT, "no two of a, b are seen to have the same input")}


def test_the_code_that_is_not_recognised_is_named():
    class Pair(TwoProducts):
        def __call__(self, x):
            y = self.a(x)
            return y * self.b(x + 1)

    (row,) = convert_model(nn.Sequential(Pair())).fusions
    assert (row.kind, row.action) == ("group", LEFT)
    assert row.code.startswith("test_fused_plan.py:") and "mlp_" in row.code
    (row,) = convert_model(build("qwen2", PLAIN), predicate=lambda p, m: "mlp" in p).fusions[:1]
    assert row.code == ""
