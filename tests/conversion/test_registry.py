"""Modules of classes that somebody registered: swapped, compared, reported and reverted."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_qlayers import convert_model, register_counterpart, revert_model


class Scale(nn.Module):
    def __init__(self, dims=4):
        super().__init__()
        self.weight = mx.random.normal((dims,))
        self.power = 2

    def __call__(self, x):
        return {"y": x * self.weight**self.power}


class Fast(Scale):
    def __call__(self, x):
        return {"y": x * self.weight * self.weight}


class Wrong(Scale):
    def __call__(self, x):
        return {"y": x * self.weight}


class Special(Scale):
    """A subclass, which was not registered."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = Scale(), Scale(), Special()
        self.parts = [self.first, Scale(8)]


def example(module):
    return (mx.random.normal((3, *module.weight.shape)),)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_swapped_reported_and_reverted(dtype):
    register_counterpart(Scale, Fast, example=example)
    model = Model()
    model.set_dtype(dtype)
    model.second.freeze()
    arrays, x = [model.first.weight, model.parts[1].weight], mx.ones(4, dtype)
    before = model.first(x)["y"]
    report = convert_model(model, calibrate=False)
    assert report.counts == {"swapped": 3}
    assert {(row.path, row.kind, row.reason) for row in report.rows} == {
        (path, "module", "Fast for Scale") for path in ("first", "second", "parts.1")
    }
    assert type(model.first) is Fast and model.parts[0] is model.first
    assert type(model.other) is Special
    assert model.first.weight is arrays[0] and model.parts[1].weight is arrays[1]
    assert not model.second.trainable_parameters() and model.first.power == 2
    assert mx.allclose(model.first(x)["y"], before, rtol=2e-2)
    assert convert_model(model, calibrate=False).counts == {"already converted": 3}
    assert revert_model(model).counts == {"reverted": 3}
    assert type(model.first) is type(model.second) is type(model.parts[1]) is Scale


def test_a_counterpart_that_disagrees_leaves_the_model():
    register_counterpart(Scale, Wrong, example=example)
    model = Model()
    with pytest.raises(ValueError, match="first: Wrong: disagrees with the stock layer"):
        convert_model(model, calibrate=False)
    assert type(model.first) is Scale
    # Registered again, without an example: not compared, and the report says so.
    register_counterpart(Scale, Fast)
    report = convert_model(model, calibrate=False, predicate=lambda path, _: path == "first")
    reasons = {row.path: row.reason for row in report.rows}
    assert reasons["first"] == "Fast for Scale, not compared: registered without an example"
    assert reasons["second"] == "the predicate says so"
    assert convert_model(Model(), dry_run=True).counts == {"swapped": 3}


@pytest.mark.parametrize(
    ("stock", "counterpart", "message"),
    [
        (Scale, nn.Linear, "counterpart Linear must be a subclass of Scale"),
        (Scale, Scale, "counterpart Scale must be a subclass of Scale"),
        (Scale, Fast(), "counterpart must be a class of modules, not Fast"),
        (int, bool, "stock must be a class of modules, not <class 'int'>"),
    ],
)
def test_bad_input(stock, counterpart, message):
    with pytest.raises(ValueError, match=message):
        register_counterpart(stock, counterpart)
