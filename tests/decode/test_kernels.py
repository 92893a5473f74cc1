"""Launches of a token by the rules: no more than were recorded, with the stock model's logits."""

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from gpus import standing_in
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import compute_g, gated_delta_kernel
from step_launches import NAMES, recorded

from mlx_qlayers import use_backend
from mlx_qlayers.decode import engine
from mlx_qlayers.runtime.tracing import Record, trace

PROMPT = mx.array([[5, 17, 3]])


def logits(
    model: nn.Module, batch: int, graph: bool, tokens: int = 3
) -> tuple[mx.array, list[Record]]:
    """Those of some tokens behind a prompt, and the launches of the last one."""
    cache, rows = make_prompt_cache(model), []
    mx.eval(model(mx.repeat(PROMPT, batch, axis=0), cache=cache))
    for i in range(tokens):
        token = (mx.arange(batch)[:, None] * 7 + 11 + i) % 100
        with trace() as records:
            made = engine.step(model, token, cache) if graph else model(token, cache=cache)
            assert made is not None, engine.stopped(model)
            mx.eval(made)
        rows.append(made)
    return mx.concatenate(rows, axis=1), records


def beside(model: nn.Module, batch: int, tokens: int = 3) -> list[str]:
    """The kernels of a token by its graph, which gives what the model's code gives."""
    want, _ = logits(model, batch, graph=False, tokens=tokens)
    with use_backend("host"):
        found, launches = logits(model, batch, graph=True, tokens=tokens)
    assert mx.abs(found - want).max() <= 1e-5 * mx.abs(want).max()
    return [each.kernel for each in launches]


def families(kernels: list[str]) -> Counter[str]:
    """How many of each: the names without what tells variants apart, attention as one.

    A rotary embedding of its own, which a GPU's attention does and a CPU's does not, is left out,
    and so are the rows of an embedding, which are MLX's operators on Apple GPUs.
    """
    names = (
        name.rpartition("_")[0].removesuffix("_serial")
        if "experts" in name or "qmv" in name
        else name
        for name in kernels
        if name != "rotary_at" and not name.startswith("dequantize_rows")
    )
    return Counter("attention" if "attention" in name else name for name in names)


def test_experts_of_the_same_rows_are_one_launch():
    """Of Kimi K3 a gate and its factor meet behind an activation that no rule joins with them."""
    model = build("kimi_k3", ARCHITECTURES["kimi_k3"])
    assert families(beside(model, 1))["experts_products"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_a_token(name):
    model = build(name, ARCHITECTURES[name])
    now, before = families(beside(model, 1)), families(recorded()[name])
    assert now <= before, (now, before)


# Rotary embeddings of pairs in a part of a head; layer norms; experts that are changed once chosen,
# or chosen one after the other; gates in halves of a matrix; infinite periods.
@pytest.mark.parametrize(
    "name", ["glm_moe_dsa", "cohere", "longcat_flash", "phimoe", "glm4", "gemma4_text"]
)
def test_logits(name):
    beside(build(name, ARCHITECTURES[name]), 2)


_GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 4}
_GEMMA = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
# Groups by their two best experts, by the best one; a factor of each expert.
ROUTERS = {
    "deepseek_v3": _GROUPS,
    "deepseek_v2": {**_GROUPS, "topk_method": "group_limited_greedy"},
    "gemma4_text": {**_GEMMA, "enable_moe_block": True},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_one_launch(name):
    same = ARCHITECTURES[name]
    changed = same._replace(config={**same.config, "first_k_dense_replace": 0, **ROUTERS[name]})
    model = build(name, changed)
    found = sum("experts_chosen" in kernel for kernel in beside(model, 2))
    assert found == len(model.layers)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_norms_between_products_take_no_launch(name):
    """By rules for NVIDIA GPUs products give the squares of 8 tiles, which others take."""
    model = build(name, ARCHITECTURES[name], mx.bfloat16)
    with use_backend("host"):
        want, _ = logits(model, 1, graph=True)
    with standing_in("as cuda"):
        found, launches = logits(model, 1, graph=True)
    assert mx.abs(found - want).max() <= 2**-6 * mx.abs(want).max()
    giving = [each for each in launches if (1, 8) in each.output_shapes]
    taking = [each for each in launches if (1, 8) in each.input_shapes]
    # One norm a layer is behind a product with a residual, or two.
    assert len(giving) in (2, 4) and len(taking) >= len(giving)


def test_the_gated_delta_rule_is_captured_without_a_kernel_of_metal(monkeypatch):
    def update(q, k, v, a, b, *rest: Any, use_kernel: bool) -> Any:  # as mlx-lm's is on a Mac
        g = compute_g(rest[0], a, rest[1])
        return gated_delta_kernel(q, k, v, g, mx.sigmoid(b), *rest[2:])

    model = build("qwen3_next", ARCHITECTURES["qwen3_next"])
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    monkeypatch.setattr(qwen3_next, "gated_delta_update", update)
    assert engine.step(model, PROMPT[:, :1], cache) is not None, engine.stopped(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_one_capture_of_experts_serves_all_batches(name):
    model = build(name, ARCHITECTURES[name])
    for batch in (1, 3, 20, 33, 40):  # of two experts each, mlx-lm sorts 64
        assert "experts_chosen" in families(beside(model, batch, tokens=2))
    (steps,) = engine._steps[id(model)].steps.values()
    assert [step.batches for step in steps] == [(1, 128)]


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_several_tokens_of_a_recurrent_layer_take_one_launch(name):
    model = build(name, ARCHITECTURES[name])
    results = []
    for graph in (False, True):
        with use_backend("host" if graph else "reference"):
            cache = make_prompt_cache(model)
            mx.eval(model(PROMPT, cache=cache))
            tokens = mx.array([[4, 9, 71]])
            with trace() as records:
                made = engine.step(model, tokens, cache) if graph else model(tokens, cache=cache)
                assert made is not None, engine.stopped(model)
                mx.eval(made)
            results.append((made, *cache[0].cache))
    assert [each.kernel for each in records].count("gated_delta") == 1
    for want, found in zip(*results, strict=True):
        assert mx.abs(found - want).max() <= 1e-5 * mx.abs(want).max()
