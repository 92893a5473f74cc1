"""Sampled tokens have the model's distribution; guesses are looked up; depths pay."""

import random
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx_lm import load
from mlx_lm.sample_utils import make_sampler
from texts import guessed, plain

from mlx_qlayers import speculate
from mlx_qlayers.speculation.depth import Depths
from mlx_qlayers.speculation.drawing import Drawer, accepted
from mlx_qlayers.speculation.loop import Speculation, batch
from mlx_qlayers.speculation.rounds import Rounds
from mlx_qlayers.speculation.sequence import Text
from mlx_qlayers.speculation.sources import Draw, PromptLookup

STATES = 6


class Chain(nn.Module):
    """A language whose next token depends on the last one alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.logits = 1.5 * mx.random.normal((STATES, STATES), key=mx.random.key(seed))

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.logits[tokens]

    def make_cache(self) -> list[Any]:
        return []


def chi_square(before: mx.array, after: mx.array, chain: Chain) -> float:
    """How far pairs of tokens are from a language, in standard deviations of the statistic."""
    pairs = (before.reshape(-1, 1) * STATES + after.reshape(-1, 1)) == mx.arange(STATES**2)
    counts = pairs.astype(mx.float32).sum(axis=0).reshape(STATES, STATES)
    expected = counts.sum(axis=1, keepdims=True) * mx.softmax(chain.logits, axis=-1)
    freedom = STATES * (STATES - 1)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def test_100_000_accepted_tokens_have_the_distribution_of_the_model():
    """Guesses are of another language, half of them its likeliest tokens."""
    chain, draft, texts, depth = Chain(1), Chain(2), 4000, 4
    keys = iter(mx.random.split(mx.random.key(3), 1000))
    last = mx.zeros(texts, mx.int32)
    pairs: list[mx.array] = []
    kept, naive = 0, []
    while kept < 100_000:
        guesses, at = list[mx.array](), last
        for _ in range(depth):
            drawn = mx.random.categorical(draft.logits[at], key=next(keys)).astype(mx.int32)
            likeliest = draft.logits[at].argmax(-1).astype(mx.int32)
            at = mx.where(mx.arange(texts) % 2 == 0, drawn, likeliest)
            guesses.append(at)
        fed = mx.stack([last, *guesses], axis=1)
        tokens = mx.random.categorical(chain.logits[fed], key=next(keys)).astype(mx.int32)
        counts = accepted(tokens, fed[:, 1:])
        counted = mx.arange(depth + 1) <= counts[:, None]
        number = int(counted.sum().item())
        order = mx.argsort(~counted.flatten())[:number]
        pairs.append(mx.stack([fed.flatten()[order], tokens.flatten()[order]]))
        naive.append(mx.stack([last, guesses[0]]))
        last = mx.take_along_axis(tokens, counts[:, None], axis=1)[:, 0]
        kept += number
    before, after = mx.concatenate(pairs, axis=1)
    assert abs(chi_square(before, after, chain)) < 4
    assert chi_square(*mx.concatenate(naive, axis=1), chain) > 100  # what the guesses have


@pytest.mark.parametrize("temp", [1.0, 0.6])
def test_sampled_text_has_the_distribution_of_the_model(temp):
    chain, draft = Chain(1), Chain(1)
    draft.logits += 0.7 * mx.random.normal((STATES, STATES), key=mx.random.key(4))
    speculation = Speculation(draft, prompt_lookup=True, measured=False)
    sampler, prompt = make_sampler(temp=temp), mx.array([0, 1])
    tokens = mx.array(guessed(chain, prompt, 2500, speculation, seed=11, sampler=sampler))
    chain.logits = chain.logits / temp
    assert abs(chi_square(tokens[:-1], tokens[1:], chain)) < 4
    report = speculation.report
    assert 0.1 < report.accepted / report.guesses < 0.9


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_draft_model_with_the_same_random_numbers(name, temp):
    """Its caches go back as well: rows, states, and rings that are full."""
    model, draft = (build(name, ARCHITECTURES[name]) for _ in range(2))
    draft.model.norm.weight += 0.4 * mx.random.normal((128,), key=mx.random.key(2))
    prompt, sampler = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], mx.uint32), make_sampler(temp=temp)
    speculation = Speculation(draft, measured=False)
    found = guessed(model, prompt, 40, speculation, sampler=sampler)
    assert found == plain(model, prompt, 40, sampler=sampler)
    report = speculation.report
    assert 0 < report.accepted < report.guesses + (temp == 0), report


def test_what_is_looked_up():
    source = PromptLookup(history=[7, 8, 9, 5])
    text = [1, 2, 3, 4, 1, 2]
    assert source.propose(text, 5, None).tolist() == [3, 4, 1, 2, 3]
    text += [3, 8, 9]
    assert source.propose(text, 2, None).tolist() == [5, 1]
    assert source.ready([*text, 6]) is False
    assert PromptLookup().propose([4, 4, 4], 3, None).tolist() == [4, 4, 4]


def written(depths: Depths, right: float, slope: float, tokens: int = 3000) -> float:
    """The time of a text, where each more token of a step costs a slope, beside that without."""
    chances, time, count = random.Random(1), 0.0, 0
    while count < tokens:
        depth = depths.depth([0], 1, 15)
        accepted = 0
        while accepted < depth and chances.random() < right:
            accepted += 1
        seconds = (1 + slope * depth) * (1 + 0.05 * chances.random())
        depths.record([0], 1 + depth, [depth], [accepted], seconds)
        time, count = time + seconds, count + 1 + accepted
    return time / count / 1.025


def test_depths_follow_costs_and_acceptance():
    assert written(Depths(nn.Module(), 15), right=0.0, slope=0.3) < 1.02
    assert written(Depths(nn.Module(), 15), right=0.3, slope=0.5) < 1.02
    assert written(Depths(nn.Module(), 15), right=0.95, slope=0.02) < 0.15  # 12.9 tokens in 1.3
    assert written(Depths(nn.Module(), 15), right=0.7, slope=0.05) < 0.5  # 2.77 tokens in 1.2
    assert written(Depths(nn.Module(), 1), right=0.95, slope=0.02) > 0.5
    model = nn.Module()
    slow = Depths(model, 15)  # while something else took the time, rounds were measured
    for length, seconds in ((1, 1.0), (1, 1.0), (2, 9.0), (2, 9.0), (3, 9.0), (3, 9.0)):
        slow.record([0], length, [length - 1], [0], seconds)
    assert written(Depths(model, 15), right=0.95, slope=0.02) < 0.3  # the next text


@pytest.mark.parametrize("slow", [{1, 2}, {1, 2, 9, 20}])
def test_what_a_length_waits_for_once_is_not_its_cost(slow):
    """Its first two steps, and later ones where caches grow."""
    depths, chosen = Depths(nn.Module(), 2), []
    for _ in range(40):
        depths.record([0], 1, [0], [0], 1.0)
    for i in range(1, 60):
        chosen.append(depths.depth([0], 1, 15))
        depths.record([0], 3, [2], [2], 40.0 if i in slow else 1.5)
    assert chosen.count(2) > 40 and set(chosen[-10:]) == {2}
    assert depths.known.costs[1, 0][3] < 3


@pytest.mark.parametrize("texts", [1, 4])
def test_a_new_length_waits_for_what_guesses_would_save(texts):
    depths, sources = Depths(nn.Module(), 15), [0] * texts
    nothing = [0] * texts
    for seconds in (20.0, 1.0):  # the first step is captured
        depths.record(sources, 1, nothing, nothing, seconds)
    assert depths.depth(sources, 1, 15) == 1  # if nobody waits
    for right in 35 * [True] + 10 * [False] + 14 * [True]:
        for text in range(texts):
            depths.foretold(0, text, texts, right)
        assert depths.depth(sources, 1, 15, waits=True) == 0
    for text in 2 * [*range(texts)]:
        depths.foretold(0, text, texts, True)
    assert depths.depth(sources, 1, 15, waits=True) == 1
    depths.record(sources, 2, [1] * texts, [1] * texts, 20.0)
    depths.record(sources, 2, [1] * texts, [1] * texts, 1.1)
    assert depths.depth(sources, 1, 15, waits=True) == 1  # the next length waits again
    for _ in range(30):
        depths.record(sources, 2, [1] * texts, [1] * texts, 1.1)
    assert depths.depth(sources, 1, 15, waits=True) == 2


class Slow(Chain):
    """Computes in the call, as the launches of a CPU do."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        time.sleep(0.004)
        return super().__call__(tokens)


class Sometimes:
    """Has guesses behind three tokens of six."""

    def ready(self, tokens: Sequence[int]) -> bool:
        return len(tokens) % 6 < 3

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        return mx.zeros(1, mx.uint32)

    def finish(self, tokens: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("count", [1, 2])
def test_the_time_of_a_step_is_its_own(count):
    """Also where the next one was launched meanwhile, and this one before that."""
    chain = Slow(1)
    depths = Depths(chain, 1, measured=False)
    drawers = [Drawer(None, None) for _ in range(count)]
    texts = [Text([0, 1, 2, 3], drawer, [Sometimes()]) for drawer in drawers]
    run = Rounds(chain, [], texts, depths)
    batch(run, (), 30)
    assert run.report.steps > run.report.rounds > 3
    costs = run.report.plain_seconds, depths.known.costs[count, 0][2]
    assert min(costs) >= 0.003, costs


def test_calls_that_are_refused(tiny_model):
    model, tokenizer = load(str(tiny_model))
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 0, not -1"):
        speculate(model, tokenizer, "a", num_draft_tokens=-1)
    for options in ({"stop": "."}, {"max_tokens": 0}, {"input_embeddings": mx.zeros((1, 4))}):
        with pytest.raises((TypeError, ValueError), match=r"stop|non-zero|input embeddings"):
            list(speculate(model, tokenizer, "a", **options))
