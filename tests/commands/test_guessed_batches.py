"""Sequences of a server's batch with guesses are what mlx-lm's batches write without."""

from typing import Any

import mlx.core as mx
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from mlx_lm import server
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors

from mlx_qlayers import convert_model
from mlx_qlayers.commands.prompt_parts import BatchGenerator
from mlx_qlayers.commands.serving import make_sampler
from mlx_qlayers.decode.quantized_caches import CacheFormat, make_prompt_cache
from mlx_qlayers.speculation.loop import Speculation
from mlx_qlayers.speculation.rounds import SpeculationReport

PATTERN = [5, 6, 7, 8]
PROMPTS = [PATTERN * 4, [1, 2, 3, *PATTERN, 9, *PATTERN], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [7] * 6]


class Seeded:
    """The arguments from which mlx-lm's server makes a sampler."""

    seed = 5

    class sampling:
        temperature, top_p, top_k, min_p, xtc_probability, xtc_threshold = 0.9, 0.9, 0, 0.0, 0.0, 0

    def encode(self, text: str) -> list[int]:
        return [0]

    eos_token_ids = (0,)


def written(generator: Any, caches: Any = None) -> tuple[dict[int, list[int]], list[Any]]:
    """The tokens of sequences that come and go at other times, and those that ended."""
    texts: dict[int, list[int]] = {}
    ended: list[Any] = []
    ways: list[dict[str, Any]] = [
        {"max_tokens": [40]},
        {"samplers": [make_sampler(Seeded, Seeded())], "max_tokens": [30]},
        {"logits_processors": [make_logits_processors(repetition_penalty=1.3)]},
        {"stop_sequences": [StopSequences([[t] for t in range(0, VOCABULARY, 5)])]},
        {"max_tokens": [1]},
    ]
    steps = 0
    pending = [*zip([*PROMPTS, PROMPTS[0]], ways, strict=True)]
    while pending or len(ended) < len(ways):
        if pending and (steps % 3 == 0 or not texts):
            prompt, options = pending.pop(0)
            (uid,) = generator.insert([prompt], caches=caches and [caches()], **options)
            texts[uid] = []
        _, responses = generator.next()
        for each in responses:
            assert each.logprobs.shape == (VOCABULARY,)
            texts[each.uid].append(each.token)
            if each.finish_reason is not None:
                ended.append(each)
        steps += 1
    assert not generator.next()[1]
    return texts, sorted(ended, key=lambda each: each.uid)


class Known:
    """Guesses of texts that are known, every fifth of them wrong."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def ready(self, tokens: Any) -> bool:
        return True

    def propose(self, tokens: Any, depth: int, draw: Any) -> mx.array:
        text = next(t for t in self.texts if t[: len(tokens)] == [*tokens])
        places = range(len(tokens), min(len(tokens) + depth, len(text)))
        return mx.array([(text[i] + (i % 5 == 0)) % VOCABULARY for i in places], mx.uint32)

    def finish(self, tokens: Any) -> None:
        pass


def check(name: str, speculation: Speculation, caches: Any = None, **how: Any) -> SpeculationReport:
    """The texts are those of mlx-lm; what guesses were worth."""
    model = build(name, ARCHITECTURES[name])
    if how:
        convert_model(model, verify=False, calibrate=False)
    options = {"max_tokens": 20, "sampler": greedy_sampler}
    make = caches and (lambda: caches(model))
    wanted, ends = written(server.BatchGenerator(model, **options), make)
    speculation.others = [Known([each.all_tokens for each in ends])]
    guesses = BatchGenerator(model, guesses=lambda: (speculation, 7), **options)
    reports: dict[int, Any] = {}
    batch = guesses._generation_batch
    keep = batch._keep

    def kept(rows: Any) -> None:
        reports[id(batch.rounds.report)] = batch.rounds.report
        keep(rows)

    batch._keep = kept
    found, ours = written(guesses, make)
    assert found == wanted
    for end, own in zip(ends, ours, strict=True):
        assert own.finish_reason == end.finish_reason
        held = own.all_tokens  # where guesses were wrong, states go back to before them
        assert end.all_tokens[: len(held)] == held and len(end.all_tokens) - len(held) <= 16
        for a, b in zip(own.prompt_cache, end.prompt_cache, strict=True):
            if hasattr(a, "offset"):
                assert a.offset == len(held) and b.offset == len(end.all_tokens)
    counts = [sum(getattr(r, n) for r in reports.values()) for n in ("guesses", "accepted")]
    return SpeculationReport(guesses=counts[0], accepted=counts[1])


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_next", "lfm2"])
def test_sequences_that_come_and_go(name):
    """Greedy, with a seed, with a penalty, up to a stop token, and with one token alone."""
    report = check(name, Speculation(measured=False))
    assert 0 < report.accepted < report.guesses, report


def test_with_a_draft_model_and_graphs():
    draft = build("qwen2", ARCHITECTURES["qwen2"])
    report = check("qwen2", Speculation(draft, prompt_lookup=True, measured=False), convert=True)
    assert report.accepted > report.guesses / 2


def test_depths_that_are_measured():
    check("qwen2", Speculation(prompt_lookup=True))


def test_quantized_caches():
    report = check(
        "qwen2",
        Speculation(prompt_lookup=True, measured=False),
        lambda model: make_prompt_cache(model, formats=CacheFormat(32)),
    )
    assert report.guesses


def test_a_sequence_that_is_taken_out():
    model = build("qwen2", ARCHITECTURES["qwen2"])
    texts = []
    for guesses in (None, lambda: (Speculation(prompt_lookup=True, measured=False), 7)):
        generator = BatchGenerator(model, max_tokens=25, guesses=guesses)
        first, second = generator.insert(PROMPTS[:2])
        found: dict[int, list[int]] = {first: [], second: []}
        while len(found[first]) < 6:
            for each in generator.next()[1]:
                found[each.uid].append(each.token)
        caches = generator.remove([first], return_prompt_caches=True)[first]
        assert caches[0][0].offset == len(caches[1])
        while len(generator._generation_batch):
            for each in generator.next()[1]:
                found[each.uid].append(each.token)
        assert mx.array(found[second]).size == 25
        texts.append((found[first][:6], found[second]))
    assert texts[0] == texts[1]
