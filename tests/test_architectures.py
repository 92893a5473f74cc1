"""Conversion of small models of most architectures that mlx-lm ships."""

import ast
import copy
import importlib
import inspect
import pkgutil
import re
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architecture_rows import PAGE, agrees, alike
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import BITS, KINDS, logits
from mlx.utils import tree_flatten
from mlx_lm import models
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU
from numerics import FACTOR, assert_same_model, to64

from mlx_qlayers import (
    ConversionReport,
    FusedAttention,
    QLinear,
    convert_model,
    explain,
    revert_model,
)
from mlx_qlayers.conversion import attention_patch
from mlx_qlayers.conversion.plan import PATCHED
from mlx_qlayers.layers.multi_linear import QMultiLinear
from mlx_qlayers.layers.qlinear import QEmbedding
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.runtime.transformed import uncompiled

NAMES = list(ARCHITECTURES)
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
attention, gated_delta = attention_patch.attention, attention_patch.gated_delta
# Grouped by name, so that a worker makes an architecture's models once.
every_architecture = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(scope="module", autouse=True)
def without_compilation():
    """mlx-lm's small compiled functions take MLX seconds each on a CPU; they compute the same."""
    with uncompiled():
        yield


class Converted(NamedTuple):
    """A converted model, the stock one, and what was seen of the former before its conversion."""

    stock: nn.Module
    model: nn.Module
    report: ConversionReport
    types: list[tuple[str, type]]
    logits: mx.array


@lru_cache(maxsize=1)
def converted(name: str) -> Converted:
    """The small models of an architecture."""
    stock = build(name, ARCHITECTURES[name])
    model = copy.deepcopy(stock)
    before = types(model), model(TOKENS)
    held = arrays(model)
    report = convert_model(model)
    assert arrays(model) == held
    return Converted(stock, model, report, *before)


def types(model: nn.Module) -> list[tuple[str, type]]:
    return [(path, type(module)) for path, module in model.named_modules()]


def arrays(model: nn.Module) -> list[tuple[str, int]]:
    return [(key, id(array)) for key, array in tree_flatten(model.parameters())]


def described(model: nn.Module) -> str:
    """The printed model, by the names of the stock layers."""
    kinds = ("Linear", "Embedding", "SwitchLinear", "MultiLinear")
    ours = {"Fused": ""} | {f"Q{kind}": f"Quantized{kind}" for kind in kinds}
    return re.sub("|".join(rf"\b{name}" for name in ours), lambda m: ours[m[0]], repr(model))


@pytest.mark.caches
@every_architecture
@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_every_cache(name, kind):
    check_logits(name, kind)


def check_logits(name: str, kind: str) -> None:
    batch = (1, 3)[(NAMES.index(name) + KINDS.index(kind)) % 2]
    models = [*converted(name)[:2]]
    if kind in ARCHITECTURES[name].without:  # mlx-lm fails too, or has no such cache
        with pytest.raises(Exception):  # noqa: B017
            logits(models[:1], kind, 3, VOCABULARY)
        return
    bits = BITS if kind == "quantized" else None
    steps = zip(*logits(models, kind, batch, VOCABULARY), strict=True)
    for number, (stock, found) in enumerate(steps):
        what = f"{name}, cache {kind}, batch {batch}, step {number}"
        assert_same_model(found, stock, bits=bits, what=what)


@every_architecture
def test_conversion(name):
    """Its report, its logits, its reverse; and whether the page says that it is batch-invariant.

    All in one test, which makes an architecture's models once.
    """
    # With an architecture's own caches, and every fourth one with another kind.
    check_logits(name, "own")
    number, kinds = NAMES.index(name) // 4, [kind for kind in KINDS if kind != "own"]
    if NAMES.index(name) % 4 == 3:
        check_logits(name, kinds[number % len(kinds)])

    expected = ARCHITECTURES[name]
    other, model, report, before, stock = converted(name)
    converted.cache_clear()  # reverted below

    assert [path for path, _ in types(model)] == [path for path, _ in before]
    assert agrees(name, report, PAGE.read_text()), f"{name}: make architectures"
    rows = [row for row in report.rows if row.kind == "attention"]
    patched = [row.path for row in rows if row.action == "swapped"]
    left = {row.path: row.reason for row in rows if row.action == "left"}
    assert (len(patched), len(left)) == (expected.patched, expected.left)
    assert set(left.values()) <= {"does not use mlx-lm's shared attention function"}
    assert all(row.reason for row in report.rows if row.action == "left")
    modules = dict(model.named_modules())
    assert {p for p, m in modules.items() if isinstance(m, FusedAttention)} == set(patched)
    products = {
        path
        for path, m in modules.items()
        if isinstance(m, nn.Linear | nn.Embedding) or {"weight", "scales"} <= m.keys()
    }
    assert {row.path for row in report.rows if row.kind not in PATCHED} == products
    assert described(model) == described(other)
    # The activation that experts of all models share.
    assert type(inspect.signature(SwitchGLU).parameters["activation"].default) is SwiGLU
    for path, cls in before:
        assert (cls is nn.QuantizedLinear) == (type(modules[path]) is QLinear)
        assert (cls is nn.QuantizedEmbedding) == (type(modules[path]) is QEmbedding)
        assert (cls is QuantizedSwitchLinear) == (type(modules[path]) is QSwitchLinear)
        assert (cls is QuantizedMultiLinear) == (type(modules[path]) is QMultiLinear)

    explain(reset=True)
    assert_same_model(model(TOKENS), stock, bits=None, what=name)
    calls = sum(d.calls for d in explain(reset=True) if d.op in ("attention", "gated_delta"))
    assert calls >= expected.patched and bool(calls) == bool(expected.patched)

    assert types(other) == before
    assert mx.array_equal(other(TOKENS), stock) and not explain()

    held = arrays(model)
    reverted = revert_model(model)
    assert set(reverted.counts) == {"reverted"}
    assert types(model) == before and arrays(model) == held
    assert mx.array_equal(model(TOKENS), stock) and not explain()

    # The page says which are refused, and by what.
    (cell,) = re.findall(rf"^\| {re.escape(name)} \|.* \| (.*) \|$", PAGE.read_text(), re.M)
    assert alike(other) == cell


def test_coverage():
    """Enough architectures; what is not patched has no attention, or computes it on its own."""
    assert len(NAMES) >= 100
    unpatched = {name for name in NAMES if not ARCHITECTURES[name].patched}
    assert unpatched == {"mamba", "mamba2", "rwkv7", "gemma2", "plamo2", "deepseek_v41"}


def test_every_class_that_calls_the_shared_function_is_patched():
    """Of all files that mlx-lm ships, also those that the table leaves out."""
    call = re.compile(r"(?<![\w.])(scaled_dot_product_attention|gated_delta_update|swiglu)\(")
    callers = set()
    for info in pkgutil.iter_modules(models.__path__):
        if info.name == "olmo":  # exits where its package is missing
            continue
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        text = inspect.getsource(module)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and call.search(ast.unparse(node)):
                callers.add(getattr(module, node.name))
    assert len(callers) >= 100
    assert [cls for cls in callers if not attention_patch.patched_class(cls)] == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2", mx.bfloat16), ("deepseek_v2", mx.float16), ("gpt_oss", mx.bfloat16)],
    ids=str,
)
def test_half_precision_is_no_less_accurate_than_stock(name, dtype):
    """The truth is the stock model in float32 with the very weights of the other two."""
    truth, stock, model = (build(name, ARCHITECTURES[name], dtype) for _ in range(3))
    truth.set_dtype(mx.float32)
    convert_model(model)
    for kind, batch in (("none", 3), ("own", 1)):
        steps = zip(*logits([truth, stock, model], kind, batch, VOCABULARY), strict=True)
        exact, plain, found = (to64(mx.concatenate([*each])) for each in zip(*steps, strict=True))
        assert found.shape == exact.shape
        assert np.abs(found - exact).mean() <= FACTOR * np.abs(plain - exact).mean()
