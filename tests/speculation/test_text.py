"""Texts with guesses are what mlx-lm writes without: every architecture, cache and sampler."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from texts import guessed, plain, rounds_of

from mlx_qlayers import convert_model
from mlx_qlayers.speculation.loop import Speculation, batch
from mlx_qlayers.speculation.rounds import Rounds
from mlx_qlayers.speculation.sources import Draw

LENGTH = 40
PROMPT = mx.random.randint(0, VOCABULARY, (13,), key=mx.random.key(5)).astype(mx.uint32)
PROMPTS = [PROMPT.tolist(), PROMPT.tolist()[:6], PROMPT.tolist()[2:]]
SAMPLED = {
    "sampler": make_sampler(temp=0.8, top_p=0.9),
    "logits_processors": make_logits_processors(repetition_penalty=1.3),
}
# Caches by rows, rings, chunks, latent rows, states of all kinds, and lists of both.
SOME = [
    "qwen2", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3", "longcat_flash_ngram", "mamba2",
    "qwen3_next", "lfm2", "jamba", "recurrent_gemma", "rwkv7", "falcon_h1", "plamo3",
]  # fmt: skip


class Known:
    """Guesses from 0 to 7 tokens of a text that is known, one in five of them wrong."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.random = text, random.Random(3)

    def ready(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        text = self.text[len(tokens) :][: self.random.randint(0, depth)]
        wrong = [self.random.random() < 0.2 for _ in text]
        return mx.array([(t + w) % VOCABULARY for t, w in zip(text, wrong, strict=True)], mx.uint32)

    def finish(self, tokens: Sequence[int]) -> None:
        pass


def texts(model: Any, **options: Any) -> tuple[list[int], list[int], Speculation]:
    """The text without guesses, that with guesses, and what these were worth."""
    right = plain(model, PROMPT, LENGTH, **options)
    speculation = Speculation(others=[Known([*PROMPT.tolist(), *right])], measured=False)
    return right, guessed(model, PROMPT, LENGTH, speculation, depth=7, **options), speculation


@pytest.mark.parametrize(
    "name",
    [*SOME, *(pytest.param(n, marks=pytest.mark.caches) for n in ARCHITECTURES if n not in SOME)],
)
def test_the_text_is_that_without_guesses(name):
    """Greedy and sampled, with states and rings that go round behind the eighth token."""
    model = build(name, ARCHITECTURES[name])
    for options in ({}, SAMPLED):
        right, found, speculation = texts(model, **options)
        assert found == right
        report = speculation.report
        assert report.tokens == LENGTH and sum(report.lengths) == report.rounds
        if name != "plamo3":  # whose rings take one token at a time
            assert 0 < report.accepted < report.guesses and report.steps < 30, report


CONVERTED = [
    *((name, mx.float32, False) for name in ("qwen2", "gemma3_text", "qwen3_next")),
    *((name, mx.bfloat16, True) for name in ("qwen2", "qwen3_moe")),
    pytest.param("gemma3_text", mx.bfloat16, True, marks=pytest.mark.caches),
]


@pytest.mark.parametrize(("name", "dtype", "batch_invariant"), CONVERTED, ids=str)
def test_converted_models(name, dtype, batch_invariant):
    """By graphs; in rounded numbers, of which steps of several tokens have the same bits."""
    model = build(name, ARCHITECTURES[name], dtype)
    convert_model(model, verify=False, calibrate=False, batch_invariant=batch_invariant)
    for options in ({}, SAMPLED):
        right, found, speculation = texts(model, **options)
        assert found == right and speculation.report.accepted
    if name == "qwen3_moe":  # and in a batch
        alone = [plain(model, prompt, 9) for prompt in PROMPTS]
        assert batch(rounds(model, alone), set(), 9) == alone


def rounds(model: Any, texts: list[list[int]]) -> Rounds:
    """Those of a batch whose guesses are its texts."""
    sources = [[Known([*prompt, *text])] for prompt, text in zip(PROMPTS, texts, strict=True)]
    return rounds_of(model, PROMPTS, sources, 7)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_next", "lfm2", "mamba2"])
def test_texts_of_a_batch_accept_other_numbers(name):
    """Prompts of other lengths, texts that end at other tokens, rings and states."""
    model = build(name, ARCHITECTURES[name])
    right = [plain(model, prompt, LENGTH) for prompt in PROMPTS]
    end = right[1][17]
    right = [text[: text.index(end) + 1] if end in text else text for text in right]
    run = rounds(model, right)
    assert batch(run, {end}, LENGTH) == right
    assert 0 < run.report.accepted < run.report.guesses and run.report.steps < 30
