"""Rounds that are launched before the last one is read, as on a GPU."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from machine import on_a_gpu
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from step_models import appending
from texts import plain

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.speculation.loop import Speculation, speculative_generate_step
from mlx_qlayers.speculation.sources import DraftModel

PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], mx.uint32)


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with on_a_gpu(), use_backend("reference"):
        yield


class Counted(DraftModel):
    """It counts the rounds that it guessed for before the last one was read."""

    ahead = 0

    def propose_behind(self, *args: Any) -> mx.array | None:
        guesses = super().propose_behind(*args)
        self.ahead += guesses is not None
        return guesses


def models(name: str = "qwen2") -> tuple[Any, Any]:
    """A model, and a draft that guesses most of its tokens."""
    model, draft = (build(name, ARCHITECTURES[name]) for _ in range(2))
    draft.model.norm.weight += 0.4 * mx.random.normal((128,), key=mx.random.key(2))
    for each in (model, draft):
        convert_model(each, verify=False)
    return model, draft


def written(
    model: Any, draft: Any, count: int, temp: float, caches: Any, looks: bool = False, **options
) -> Any:
    """Tokens, the report, and how many rounds were launched before the last one was read."""
    mx.random.seed(5)
    source, found = Counted(draft, (caches or [])[2:] or None), []
    speculation = Speculation(others=[source], measured=False)
    steps = speculative_generate_step(
        PROMPT, model, speculation, prompt_cache=caches, num_draft_tokens=4,
        sampler=make_sampler(temp=temp), **options,
    )  # fmt: skip
    for _, (token, *_) in zip(range(count), steps, strict=False):
        found.append(token)
        if looks and len(found) % 7 == 0:
            mx.eval([c.state for c in caches])
    return found, speculation.report, source.ahead


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_the_text_and_the_caches_behind_it(temp):
    """Longer than append buffers, ended anywhere: in a round, behind it, and by the caller."""
    model, draft = models()
    right = plain(model, PROMPT, 120, sampler=make_sampler(temp=temp))
    for count, most in ((120, 120), (37, 37), (38, 38), (41, 90), (42, 90), (43, 90), (1, 9)):
        caches = make_prompt_cache(model) + make_prompt_cache(draft)
        with appending(32):
            found, report, ahead = written(model, draft, count, temp, caches, max_tokens=most)
        assert found == right[:count]
        assert 0 < report.accepted < report.guesses + (temp == 0) or count == 1
        assert ahead > report.rounds / 3 or count == 1
        assert {c.offset for c in caches} == {len(PROMPT) + count}
        one = mx.array([[7]])
        for each, own in ((model, caches[:2]), (draft, caches[2:])):
            behind = each(one, cache=own)
            new = make_prompt_cache(each)
            each(mx.concatenate([PROMPT, mx.array(found, mx.uint32)])[None], cache=new)
            assert mx.allclose(behind, each(one, cache=new), atol=1e-4)


def test_caches_that_are_looked_at_in_between():
    model, draft = models()
    right, caches = plain(model, PROMPT, 60), make_prompt_cache(model)
    found, _, ahead = written(model, draft, 60, 0.0, caches, looks=True, max_tokens=60)
    *_, undisturbed = written(model, draft, 60, 0.0, None, max_tokens=60)
    assert found == right and 0 < ahead < undisturbed


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_steps_that_fail_are_the_models(temp, monkeypatch):
    """One of nine, of the model or of its draft, among them rounds behind others."""
    model, draft = models()
    calls, compiled = [0], mx.compile
    right = plain(model, PROMPT, 60, sampler=make_sampler(temp=temp))

    def failing(run: Any, *args: Any) -> Any:
        calls[0] += isinstance(args[-1], list)  # as steps take arrays, and operations do not
        if isinstance(args[-1], list) and calls[0] % 9 == 0:
            raise MemoryError
        return run(*args)

    monkeypatch.setattr(mx, "compile", lambda function: partial(failing, compiled(function)))
    caches = make_prompt_cache(model)
    found, *_ = written(model, draft, 60, temp, caches, max_tokens=60)
    assert found == right and calls[0] > 50 and {c.offset for c in caches} == {70}


def test_quantized_caches():
    model, draft = models()
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 30}
    right = plain(model, PROMPT, 80, **options)
    found, _, ahead = written(model, draft, 80, 0.0, None, max_tokens=80, **options)
    assert found == right and ahead > 5
