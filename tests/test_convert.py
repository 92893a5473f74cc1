"""convert_model and revert_model on a small Qwen2 and on hand-made modules."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from small_qwen import BASE, Q0, TOKENS, qwen, snapshot

from mlx_qlayers import QLinear, convert_model, register_counterpart, revert_model


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
    assert convert_model(model, config={"quantization": BASE}).counts == {"already converted": 19}
    assert snapshot(model) == before
    assert revert_model(model).counts == {"reverted": 19}
    assert revert_model(model).counts == {}


def test_dry_run_changes_nothing():
    model = qwen()
    before = snapshot(model)
    report = convert_model(model, dry_run=True)
    assert report.dry_run and report.counts == {"swapped": 19} and "dry run" in str(report)
    assert snapshot(model) == before


def test_a_single_layer_is_a_model():
    layer = nn.QuantizedLinear(64, 64)
    convert_model(layer)
    assert type(layer) is QLinear


def test_keeps_no_dequantized_weights():
    model = qwen()
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    convert_model(model)
    for rows in (TOKENS[:, :1], mx.repeat(TOKENS, 10, axis=1)):
        mx.eval(model(rows))
    smallest = min(m.weight.nbytes for _, m in model.named_modules() if isinstance(m, QLinear))
    assert mx.get_active_memory() - before < smallest


def test_an_interrupt_in_the_middle_leaves_the_model_as_it_was():
    class Interrupting(nn.QuantizedLinear):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64), Interrupting(64, 64))
    before = snapshot(model)
    register_counterpart(Interrupting, type("Other", (Interrupting,), {}))
    with pytest.raises(KeyboardInterrupt):
        convert_model(model, config={"quantization": BASE | {"layers.0": True}}, verify=False)
    assert snapshot(model) == before
