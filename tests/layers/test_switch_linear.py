"""QSwitchLinear is mlx-lm's layer, but for how it computes; and a model of them is converted."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from mlx_qlayers import convert_model, explain, use_backend
from mlx_qlayers.conversion.plan import counterpart_of, stock_of
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.runtime import trace
from tests.machine import zeros
from tests.numerics import assert_same_sums, random

FORMATS = [{}, {"group_size": 32, "bits": 3}, {"group_size": 32, "mode": "mxfp4"}]
FORMATS += [{"group_size": 16, "mode": "nvfp4", "global_scale": given} for given in (False, True)]


def same_arrays(a: nn.Module, b: nn.Module) -> bool:
    left, right = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    return left.keys() == right.keys() and all(mx.array_equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_is_the_stock_layer(fmt, bias):
    mx.random.seed(0)
    stock = QuantizedSwitchLinear(128, 40, 5, bias, **fmt)
    if bias:
        stock.bias = mx.random.normal((5, 40))
    ours = QSwitchLinear.from_quantized(stock)
    assert same_arrays(ours, stock) and isinstance(ours, QuantizedSwitchLinear)
    assert repr(ours) == repr(stock).replace("Quantized", "Q")
    assert ours.trainable_parameters() == {}
    assert (ours.input_dims, ours.output_dims, ours.num_experts) == (128, 40, 5)
    rng = np.random.default_rng(0)
    x, chosen = random(rng, (6, 1, 1, 128)), mx.array(rng.integers(0, 5, (6, 2)))
    if fmt.get("global_scale"):  # the stock operator has it on GPUs only
        dense = mx.stack(
            [
                mx.dequantize(w, s, mode="nvfp4", global_scale=f, dtype=mx.float32)
                for w, s, f in zip(stock.weight, stock.scales, stock.global_scale, strict=True)
            ]
        )
        expected = mx.gather_mm(x, dense.swapaxes(1, 2), rhs_indices=chosen)
        expected = expected + stock.bias[chosen][..., None, :] if bias else expected
    else:
        expected = stock(x, chosen)
    for path in ("host", "reference"):
        with use_backend(path):
            assert_same_sums(ours(x, chosen), expected)
            by_expert = mx.sort(chosen.flatten())
            rows = mx.repeat(x, 2, 0)[:, 0]
            both = [ours(rows, by_expert, sorted_indices=in_order) for in_order in (True, False)]
            assert mx.array_equal(*both)


def test_counterparts():
    assert counterpart_of(QuantizedSwitchLinear) is QSwitchLinear
    assert counterpart_of(SwitchLinear) is None and counterpart_of(nn.Linear) is None
    assert stock_of(QSwitchLinear(64, 8, 2)) is QuantizedSwitchLinear
    assert stock_of(QuantizedSwitchLinear(64, 8, 2)) is None
    with pytest.raises(ValueError, match="must be a QuantizedSwitchLinear"):
        QSwitchLinear.from_quantized(nn.Linear(4, 4))


def test_tokens_on_a_gpu_go_to_the_stock_layer_undispatched(machine, monkeypatch):
    """Where ``auto`` would take the stock operator, a token does not wait for the dispatcher."""
    layer, chosen = QSwitchLinear(64, 8, 2, False), mx.array([0, 0, 1, 1])
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: zeros)
    cases = ("metal", 4, False), ("cuda", 1, False), ("cuda", 2, True), ("host", 1, True)
    for device, tokens, ours in cases:
        machine(device)
        explain(reset=True)
        mx.eval(layer(mx.ones((tokens, 1, 1, 64)), mx.broadcast_to(chosen, (tokens, 4))))
        assert ("gather_qmm" in {decision.op for decision in explain()}) == ours, device


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_few_and_many_tokens(tokens):
    """Forward and gradient, unsorted and, from 64 choices on, sorted by mlx-lm."""
    mx.random.seed(1)
    experts = SwitchGLU(64, 96, 5)
    nn.quantize(experts, 32, 4)
    rng = np.random.default_rng(1)
    x, chosen = random(rng, (1, tokens, 64)), mx.array(rng.integers(0, 5, (1, tokens, 2)))
    d = random(rng, (1, tokens, 2, 64))
    mx.disable_compile()  # mlx-lm's activation, which takes the compiler seconds
    expected = mx.vjp(lambda x: experts(x, chosen), [x], [d])
    convert_model(experts)
    assert {type(m) for m in experts.leaf_modules().values()} >= {QSwitchLinear}
    with use_backend("host"), trace() as launches:
        found = mx.vjp(lambda x: experts(x, chosen), [x], [d])
    mx.enable_compile()
    for (a,), (b,) in zip(found, expected, strict=True):
        assert_same_sums(a, b)
    kernels = [launch.kernel for launch in launches]
    assert kernels == ["gather_qmm_rows"] * 3 + ["gather_qmm_columns"] * 3


def test_a_damaged_expert_is_named():
    model = build("qwen3_moe", ARCHITECTURES["qwen3_moe"])
    experts = model.layers[0].mlp.switch_mlp.up_proj
    experts.scales = experts.scales[:, :3]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.switch_mlp\.up_proj: scales of shape"):
        convert_model(model)
