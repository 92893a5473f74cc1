"""What mlx-lm's classes are recognised as."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from types import FunctionType

import mlx.nn as nn
import pytest
from mlx_lm import models

from mlx_qlayers.conversion import patterns
from mlx_qlayers.conversion.matcher import parse, recognise

METHODS = {
    name: function
    for name, function in vars(patterns).items()
    if isinstance(function, FunctionType)
    and function.__module__ == patterns.__name__
    and "self" in parse(function).parameters
}


@pytest.mark.parametrize("name", METHODS)
def test_a_pattern_matches_itself_and_no_other(name):
    match = recognise(type("Own", (nn.Module,), {"__call__": METHODS[name]}))
    assert match.pattern == name
    assert match.names == {attribute: attribute for attribute in match.names}


def test_mlx_lm(record_property):
    """Of the classes of mlx-lm so many are recognised."""
    found = Counter()
    for info in pkgutil.iter_modules(models.__path__):
        if info.name == "olmo":  # exits where its package is missing
            continue
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and issubclass(cls, nn.Module) and (match := recognise(cls)):
                found[match.pattern + " with norms" * ("q_norm" in match.names)] += 1
    least = {"mlp_swiglu": 50, "block": 40, "attention": 18, "attention with norms": 6}
    assert all(found[name] >= count for name, count in least.items()), found
    assert found["mlp_gelu"] and found["mlp_gelu_approx"] and found["mlp_silu"]
    for name, count in found.items():
        record_property("table: classes of mlx-lm whose code is recognised", [name, count])
