"""A token by append buffers takes the kernels that it took before there were graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm.models.cache import make_prompt_cache
from step_launches import recorded

from mlx_qlayers import use_backend
from mlx_qlayers.decode import engine
from mlx_qlayers.decode.caches import facts
from mlx_qlayers.decode.captured import captured
from mlx_qlayers.decode.rules import fused
from mlx_qlayers.decode.rules.attention_step import TracedCaches
from mlx_qlayers.runtime.tracing import trace

PROMPT = mx.array([[5, 17, 3, 60, 2, 9, 44, 1, 2]])
TOKEN = mx.array([[13]])
# What a graph computes for nobody, and a launch by launch run does.
UNUSED = {"rotary_at"}


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps by append buffers, of which MLX compiles nothing: their launches run one by one."""
    monkeypatch.setattr(engine, "where", lambda: "a GPU")
    mx.disable_compile()
    yield
    mx.enable_compile()
    engine._steps.clear()


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_kernels_of_a_token(name: str) -> None:
    model = build(name, ARCHITECTURES[name])
    caches = [make_prompt_cache(model) for _ in "ab"]
    for cache in caches:
        model(PROMPT, cache=cache)
    want = model(TOKEN, cache=caches[0])
    with use_backend("host"), trace() as launches:
        made = engine.step(model, TOKEN, caches[1])
        assert made is not None and mx.abs(made - want).max() < 1e-4 * mx.abs(want).max()
    found = [each.kernel for each in launches]
    before = [each for each in recorded()[name] if each not in UNUSED]
    # Where there are experts, rules find more to do at once.
    assert found == before or ("experts" in str(before) and len(found) < len(before))
    attention = [Counter(n for n in names if "attention" in n) for names in (found, before)]
    assert attention[0] == attention[1]


def test_rings_that_count_alike_share_a_mask() -> None:
    model = build("gemma3_text", ARCHITECTURES["gemma3_text"])
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    some = [facts(c, 1) for c in cache]
    step, *_ = captured(model, cache, some, 1, 1)
    ops = [n.op for n in fused(step.graph, TracedCaches([f.key for f in some], step.names)).nodes()]
    assert ops.count("AttentionStep") == 4 and ops.count("Shown") == 1
