"""A method is known by its code alone, up to the names of attributes and local variables."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import models
from mlx_lm.models.activations import swiglu

from mlx_qlayers.conversion.matcher import recognise


class Known(nn.Module):
    def __call__(self, x):
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class Steps(nn.Module):
    def __call__(self, x) -> mx.array:
        """The same, one step after the other."""
        gate = self.w1(x)
        up: int
        up = self.w3(x)
        hidden = swiglu(gate, up)
        return self.w2(hidden)


class Statements(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        gate = self.w1(x)
        x = self.w3(x)
        y = swiglu(gate, x)
        y = self.w2(y)
        return y


def test_names_and_statements_do_not_matter():
    for cls in (Known, Statements):
        known = recognise(cls)
        assert known.form == "mlp_swiglu"
        assert known.names == {"down": "w2", "gate": "w1", "up": "w3"}


class Swapped(nn.Module):
    def __call__(self, x):
        return self.w2(swiglu(self.w1(x), self.w1(x)))


class OtherArgument(nn.Module):
    def __call__(self, y):  # a caller may say y=
        return self.w2(swiglu(self.w1(y), self.w3(y)))


class Default(nn.Module):
    def __call__(self, x=None):
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class Used(nn.Module):
    def __call__(self, x):
        gate = self.w1(x)
        return self.w2(swiglu(gate, self.w3(gate)))


class Reordered(nn.Module):
    def __call__(self, x):
        gate = self.w1(x)
        x = x + 1
        return self.w2(swiglu(gate, self.w3(x)))


class Closure(nn.Module):
    def __call__(self, x):
        return super().__call__(x)


class Inner(nn.Module):
    def __call__(self, x):
        return self.w2(swiglu(self.w1(x), (lambda x: x)(x)))


class More(nn.Module):
    def __call__(self, x, *rest):
        return self.w2(swiglu(self.w1(x), self.w3(x)))


def other_swiglu() -> type[nn.Module]:
    """The same code, where the name of the activation means something else."""
    scope = {"nn": nn, "swiglu": lambda gate, x: gate + x, "__name__": __name__}
    exec(compile(inspect.getsource(Known), __file__, "exec"), scope)
    return scope["Known"]


@pytest.mark.parametrize(
    "cls",
    [Steps, Swapped, OtherArgument, Default, Used, Reordered, Closure, Inner, More, nn.Module],
)
def test_what_differs_is_not_known(cls):
    assert recognise(cls) is None


def test_global_names_must_mean_the_same():
    from mlx_qlayers.conversion import matcher as recognition

    twin = type("Twin", (nn.Module,), {"__call__": Known.__call__})
    assert recognise(twin).form == "mlp_swiglu"
    function = type(Known.__call__)(Known.__call__.__code__, {"swiglu": other_swiglu})
    assert recognition.normal_form(function) == recognition.normal_form(Known.__call__)
    assert recognise(type("Other", (nn.Module,), {"__call__": function})) is None


def test_no_source_no_guess():
    scope = {"nn": nn, "swiglu": swiglu}
    exec(inspect.getsource(Known), scope)
    assert recognise(scope["Known"]) is None


def test_source_that_changed_since_is_no_source(tmp_path, monkeypatch):
    text = inspect.getsource(Known)
    path = tmp_path / "changing.py"
    path.write_text(f"import mlx.nn as nn\nfrom {swiglu.__module__} import swiglu\n\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("changing").Known
    path.write_text(path.read_text().replace("self.w3(x)", "self.w4(x)"))
    assert recognise(cls) is None


def test_mlx_lm(record_property):
    """Of the classes of mlx-lm so many are known, and these."""
    found = Counter()
    for info in pkgutil.iter_modules(models.__path__):
        if info.name == "olmo":  # exits where its package is missing
            continue
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and issubclass(cls, nn.Module) and (known := recognise(cls)):
                found[known.form] += 1
    least = {"mlp_swiglu": 50, "block": 40, "attention": 18, "attention_with_norms": 6}
    assert all(found[form] >= count for form, count in least.items()), found
    assert found["mlp_gelu"] and found["mlp_gelu_approx"] and found["mlp_silu"]
    for form, count in found.items():
        record_property("table: classes of mlx-lm whose code is known", [form, count])
