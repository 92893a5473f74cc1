"""A method is recognised by its code alone, up to the names of attributes and local variables."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import swiglu

from mlx_qlayers.conversion.matcher import Match, names_used, recognise


class Plain(nn.Module):
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
    for cls in (Plain, Statements):
        names = {"down": "w2", "gate": "w1", "up": "w3"}
        assert recognise(cls) == Match("mlp_swiglu", names)


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
    exec(compile(inspect.getsource(Plain), __file__, "exec"), scope)
    return scope["Plain"]


# What differs, and the line that it is in.
REASONS = {
    Steps: ("gate = self.w1(x) where mlp_swiglu has return", "gate = self.w1(x)"),
    Swapped: ("self.w1 where mlp_swiglu has self.up", "return self.w2(swiglu(self.w1(x), self.w1"),
    OtherArgument: ("y where mlp_swiglu has x", "def __call__(self, y):"),
    Default: ("None where mlp_swiglu has nothing", "def __call__(self, x=None):"),
    Used: ("gate = self.w1(x) where mlp_swiglu has return", "gate = self.w1(x)"),
    Reordered: ("x + 1 where mlp_swiglu has x", "x = x + 1"),
    Closure: ("uses variables of a function around it", ""),
    Inner: ("a function inside it", ""),
    More: ("other than plain parameters", ""),
    nn.Module: ("no method written in Python", ""),
}


@pytest.mark.parametrize("cls", REASONS)
def test_what_differs_is_not_recognised_and_said(cls):
    reason, line = REASONS[cls]
    mismatch = recognise(cls)
    assert not mismatch and reason in mismatch.reason
    assert mismatch.line.partition(" ")[2].startswith(line) and bool(mismatch.line) == bool(line)
    if line:
        file, number, _ = mismatch.line.split(":", 2)
        text = Path(__file__).read_text().splitlines()[int(number) - 1]
        assert file == "test_matcher.py" and text.strip().startswith(line)
        assert str(mismatch) == f"{mismatch.line}: {mismatch.reason}"
    else:
        assert str(mismatch) == mismatch.reason


def test_the_closest_pattern_is_named():
    class Almost(nn.Module):
        def __call__(self, x):
            return self.down(nn.gelu(self.gate(x)) * self.up(x + 1))

    reason = "x + 1 where mlp_gelu has x"
    assert recognise(Almost).reason == reason


def test_global_names_must_mean_the_same():
    twin = type("Twin", (nn.Module,), {"__call__": Plain.__call__})
    assert recognise(twin).pattern == "mlp_swiglu"
    function = type(Plain.__call__)(Plain.__call__.__code__, {"swiglu": other_swiglu})
    mismatch = recognise(type("Other", (nn.Module,), {"__call__": function}))
    assert mismatch.reason == "swiglu where mlp_swiglu has swiglu"


def loops(self, h, mask, cache, low, high):
    for layer in self.layers:
        h = layer(h)
    for layer, cache in zip(self.model.layers, cache):  # noqa: B020, B905
        own = low if layer.self_attn.is_low else high
        h = layer(h, own, cache=cache)
    return h


def test_names_that_a_function_uses():
    names = set(names_used(loops)) | set(names_used(lambda: (lambda: undefined.name)()))  # noqa: F821
    assert names >= {"zip", "layers", "undefined", "name"}


def test_no_source_no_guess():
    scope = {"nn": nn, "swiglu": swiglu}
    exec(inspect.getsource(Plain), scope)
    assert recognise(scope["Plain"]).reason == "the source of the method is not at hand"


def test_source_that_changed_since_is_no_source(tmp_path, monkeypatch):
    text = inspect.getsource(Plain)
    path = tmp_path / "changing.py"
    path.write_text(f"import mlx.nn as nn\nfrom {swiglu.__module__} import swiglu\n\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("changing").Plain
    path.write_text(path.read_text().replace("self.w3(x)", "self.w4(x)"))
    assert recognise(cls).reason == "its file has changed since it was imported"
