"""How experts are chosen is recognised in mlx-lm's own code, and one operation gives the same."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from machine import has_gpu
from mlx_lm.models import (
    bailing_moe,
    bailing_moe_v3,
    deepseek_v2,
    deepseek_v3,
    dots1,
    gemma4_text,
    gpt_oss,
    kimi_linear,
    mistral4,
    phimoe,
)
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.deepseek_v41 import DeepseekV41SwiGLU
from mlx_lm.models.switch_layers import SwiGLU

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.conversion import experts
from mlx_qlayers.conversion.activations import recognise_activation
from mlx_qlayers.conversion.recorder import Recorder, called, recording
from mlx_qlayers.conversion.routers import recognise_router
from mlx_qlayers.ops.experts import experts_chosen, gated
from mlx_qlayers.options import Clipped
from mlx_qlayers.runtime.backend import Mode, mode

E, BIAS = 16, mx.array(np.linspace(0.3, -0.3, 16).astype(np.float32))


class Groups:
    """What a DeepSeek-V2 gate is made of."""

    num_experts_per_tok, n_routed_experts, hidden_size = 3, E, E
    routed_scaling_factor, topk_method, n_group, topk_group = 16.0, "group_limited_greedy", 4, 2


def gate_of_v2(logits: mx.array) -> tuple[mx.array, mx.array]:
    gate = deepseek_v2.MoEGate(Groups)
    gate.weight = mx.eye(E)
    return gate(logits)


def top_and_softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    values, indices = gpt_oss.mlx_topk(logits, k=4, axis=-1)
    return indices, mx.softmax(values, axis=-1, precise=True)


def near_the_largest(logits: mx.array, top_k: int, jitter: float) -> tuple[mx.array, mx.array]:
    # Numbers that are none are left out: stock gives the same for all experts then.
    logits = mx.where(mx.isnan(logits), 0.25, logits)
    return phimoe.sparsemixer(logits, top_k=top_k, jitter_eps=jitter)


# By name: what chooses, with what beside logits.
CASES = {
    "deepseek_v3": (deepseek_v3.group_expert_select, (BIAS, 3, 4, 2, 2.5, True)),
    "bailing_moe_v3": (bailing_moe_v3._group_expert_select, (BIAS, 2, 8, 4, 1.0)),
    "bailing_moe": (bailing_moe.group_expert_select, (None, 3, 4, 1, 1.0, False, "softmax")),
    "kimi_linear": (kimi_linear._group_expert_select, (BIAS, 3, 2, 1, 1.5, True, "softmax")),
    "dots1": (dots1.group_expert_select, (BIAS, 3, 4, 4, 2.0, False)),
    "mistral4": (mistral4.mistral4_expert_select, (3, 4, 2, 1.0, True)),
    "deepseek_v2": (gate_of_v2, ()),
    "gpt_oss": (top_and_softmax, ()),
    "phimoe": (near_the_largest, (3, 0.2)),
}
RECOGNISED = {
    "deepseek_v3": "3 of 16 experts by sigmoid and bias, in 2 of 4 groups, shares of their sum, "
    "times 2.5",
    "bailing_moe_v3": "2 of 16 experts by sigmoid and bias, in 4 of 8 groups, shares of their sum",
    "bailing_moe": "3 of 16 experts by softmax, in 1 of 4 groups",
    "kimi_linear": "3 of 16 experts by softmax and bias, in 1 of 2 groups, shares of their sum, "
    "times 1.5",
    "dots1": "3 of 16 experts by sigmoid and bias, times 2",
    "mistral4": "3 of 16 experts by softmax, in 2 of 4 groups, shares of their sum",
    "deepseek_v2": "3 of 16 experts by softmax, in 2 of 4 groups, times 16",
    "gpt_oss": "4 of 16 experts by logits, shares of their sum",
    "phimoe": "3 of 16 experts by sparsemixer",
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_recognised_as_what_it_gives(name: str, dtype: mx.Dtype) -> None:
    choose, more = CASES[name]
    # The last row is one that is no number.
    logits = mx.random.normal((5, 1, E), key=mx.random.key(3)).astype(dtype)
    logits[4, 0, 7] = mx.nan
    with recording(Recorder({})) as recorder, use_backend("reference"):
        indices, shares = called(choose, logits, *more)
        router = recognise_router(recorder, indices, shares, "")
        assert str(router) == RECOGNISED[name]
        chosen, found = experts_chosen(*router)
    assert found.dtype == shares.dtype
    places, others = (np.argsort(np.array(a), -1) for a in (indices, chosen))
    pairs = ((indices, places), (chosen, others), (shares, places), (found, others))
    at, other, wanted, given = (
        np.take_along_axis(np.array(a.astype(mx.float32)), order, -1) for a, order in pairs
    )
    unit = 1e-6 if dtype == mx.float32 else 1 / 64
    np.testing.assert_allclose(given, wanted, rtol=unit, atol=unit / 64)
    # Which experts have shares that are no number does not matter.
    assert ((at == other) | np.isnan(wanted)).all()


def smallest(logits):
    indices = mx.argpartition(logits, kth=1, axis=-1)[..., :2]
    return indices, mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)


def of_other_experts(logits):
    indices = mx.argpartition(-logits, kth=1, axis=-1)[..., :2]
    shares = mx.softmax(mx.take_along_axis(logits, indices + 1, axis=-1), axis=-1)
    return indices, shares


def squared(logits):
    indices = mx.argpartition(-logits, kth=1, axis=-1)[..., :2]
    return indices, mx.square(mx.take_along_axis(logits, indices, axis=-1))


def partly_summed(logits):
    scores = mx.sigmoid(logits)
    indices = mx.argpartition(-scores, kth=1, axis=-1)[..., :2]
    shares = mx.take_along_axis(scores, indices, axis=-1)
    return indices, shares / scores.sum(axis=-1, keepdims=True)


def another_place(logits):
    indices = mx.argpartition(-logits, kth=2, axis=-1)[..., :2]
    return indices, mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (smallest, "the smallest"),
        (of_other_experts, "numbers of other experts"),
        (squared, "square where a router has"),
        (partly_summed, "another sum"),
        (another_place, "other places than the largest"),
    ],
)
def test_what_is_no_router_is_named_with_its_line(choose: FunctionType, reason: str) -> None:
    with recording(Recorder({})) as recorder:
        indices, shares = called(choose, mx.random.normal((1, 1, E)))
        mismatch = recognise_router(recorder, indices, shares, "")
    line = choose.__code__.co_firstlineno
    assert not mismatch and reason in mismatch.reason
    assert (
        mismatch.line.startswith("test_routers.py:") and line < int(mismatch.line[16:]) < line + 7
    )


@pytest.mark.parametrize(
    ("name", "rows", "launched"),
    [
        ("minimax", 1, 4),
        ("gpt_oss", 1, 4),
        ("deepseek_v3", 1, 5),
        ("dots1", 8, 5),
        ("longcat_flash", 1, 4),
        ("phimoe", 1, 4),
    ],
)
def test_a_block_is_what_it_was_in_few_launches(
    name: str, rows: int, launched: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Experts chosen, gate and up, down and sum; before them the router's product if it is packed.

    The down products of several rows are added up by MLX. A shared expert has two launches.
    LongCat changes experts and shares once they are chosen: some compute nothing.
    """
    stock, model = (build(name, ARCHITECTURES[name]) for _ in range(2))
    convert_model(model, verify=False)
    path = next(path for path, part in stock.named_modules() if experts.holds_experts(part))
    block, of_stock = (dict(each.named_modules())[path] for each in (model, stock))

    def run(x: mx.array) -> mx.array:
        recorder = Recorder(experts.RULES, on_pair=experts.chosen_at_once)
        with recording(recorder):
            y = block(x)
        assert all(recorder.reports) and recorder.reports
        return y

    x = mx.random.normal((rows, 1, 128), key=mx.random.key(rows))
    with use_backend("host"):
        found, expected = run(x), of_stock(x)
    assert mx.abs(found - expected).max().item() <= 1e-4 * mx.abs(expected).max().item()

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    has_gpu(monkeypatch, "applegpu_g16s")
    with use_backend("metal"), mode(Mode.INFERENCE):
        mx.export_function(str(tmp_path / "block.mlxfn"), run, x)
    data = (tmp_path / "block.mlxfn").read_bytes()
    kernels = re.findall(rb"CustomKernel.{8}custom_kernel_([a-z]*_[a-z]*)", data, re.DOTALL)
    assert len(kernels) == launched and kernels.count(b"experts_chosen") == 1, kernels
    others = b"ArgPartition", b"ArgSort", b"Softmax", b"GatherAxis", b"ScatterAxis", b"Sigmoid"
    for other in others:
        assert other not in data, other


class Doubled(SwiGLU):
    def __call__(self, x, gate):
        return 2 * super().__call__(x, gate)


class OfItself(nn.Module):
    def __call__(self, x, gate):
        return nn.silu(x) * x


@pytest.mark.parametrize(
    ("module", "gate"),
    [
        (SwiGLU(), "silu"),
        (gemma4_text.GeGLU(), "gelu_approx"),
        (SwigluOAI(limit=5.0), Clipped(5.0, 1.702, 1.0)),
        (DeepseekV41SwiGLU(7.0), Clipped(7.0)),
        (DeepseekV41SwiGLU(0), "silu"),
        (Doubled(), None),
        (OfItself(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_activations(module: nn.Module, gate: object) -> None:
    assert recognise_activation(module) == gate
    if gate is None:
        return
    up, y = (mx.random.normal((64,), scale=6, key=mx.random.key(i)) for i in (0, 1))
    np.testing.assert_allclose(gated(gate, y, up), module(up, y), rtol=1e-5, atol=1e-6)


def test_a_router_beside_its_experts() -> None:
    """Gemma 4's: its decoder layer calls both, and each expert has a factor."""
    config = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
    table = ARCHITECTURES["gemma4_text"]
    stock, model = (
        build("gemma4_text", table._replace(config=table.config | config)) for _ in range(2)
    )
    for each in (stock, model):
        each.layers[0].router.per_expert_scale = mx.arange(8) / 8 + 0.5
    report = convert_model(model, verify=False)
    assert {"model.layers.0.experts", "model.layers.0"} <= {row.path for row in report.fusions}
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0))
    with use_backend("reference"), recording(Recorder(experts.RULES)) as recorder:
        found, *_ = model.layers[0](x, None, None)
    expected, *_ = stock.layers[0](x, None, None)
    assert "2 of 8 experts by logits" in str(recorder.reports[0]) and recorder.reports[0]
    assert mx.abs(found - expected).max().item() <= 1e-5 * mx.abs(expected).max().item()
