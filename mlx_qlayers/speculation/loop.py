"""The loop of rounds: guesses and the last token in one step, and what of it counts.

Its generator takes the place of ``mlx_lm.generate.speculative_generate_step``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from ..decode.engine import MAX_LENGTH
from .depth import Depths
from .drawing import Drawer, Drawn, Processor, Sampler, accepted
from .rollback import Checkpoint, longest
from .sources import DraftModel, PromptLookup, Source


@dataclass
class SpeculationReport:
    """What guesses were worth in a text.

    Attributes:
        tokens: of the text, behind the prompt.
        rounds: steps with guesses; ``steps`` are all.
        guesses: in all rounds; ``accepted`` of them were right.
        lengths: how many rounds had 0, 1, ... accepted guesses.
        seconds: behind the prompt.
        plain_seconds: of a step without guesses, as measured in between; None if there was none.
    """

    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    guesses: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)
    seconds: float = 0.0
    plain_seconds: float | None = None

    def __str__(self) -> str:
        of_round = f"{self.accepted / self.rounds:.2f}" if self.rounds else "0"
        speed = f"{self.tokens / self.seconds:.1f}" if self.seconds else "no"
        without = f"{1 / self.plain_seconds:.1f} without" if self.plain_seconds else "not measured"
        return (
            f"guesses: {self.accepted} of {self.guesses} accepted in {self.rounds} rounds, "
            f"{of_round} a round; {speed} tokens/s with guesses, {without}"
        )


class Flight(NamedTuple):
    """A step that was launched.

    Attributes:
        fed: (L,) its tokens; ``guesses`` of them are at the end, and ``source`` made them.
        before: all tokens before these, where there are processors.
        checkpoint: what caches were before, where there are guesses.
        drawn: its tokens and log-probabilities, of the last token that is no guess and behind.
        found: (1 + guesses + 1,) int32: how many guesses were accepted, and all tokens drawn;
            without guesses the token.
    """

    fed: mx.array
    before: mx.array | None
    guesses: int
    source: int | None
    checkpoint: Checkpoint | None
    drawn: Drawn
    found: mx.array


class Rounds:
    """The rounds of one text.

    Args:
        model, caches: as mlx-lm makes them; these are behind all of the prompt but its last token.
        sources: of guesses, the first that is ready counts.
        prompt: the tokens of the prompt.
        drawer: draws tokens.
        depths: chooses how many guesses a round has.
        quantize: options of ``maybe_quantize_kv_cache`` by name.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        sources: Sequence[Source],
        prompt: Sequence[int],
        drawer: Drawer,
        depths: Depths,
        quantize: dict[str, Any],
    ) -> None:
        self.model, self.caches, self.sources = model, caches, sources
        self.tokens, self.pending = [*prompt], [*prompt[-1:]]
        self.drawer, self.quantize = drawer, quantize
        self.depths, self.report = depths, SpeculationReport()
        self.text = mx.array([], mx.uint32) if drawer.processors else None
        self.goes_ahead = False

    def next(self) -> Flight:
        """Launch the step behind all tokens so far, with guesses if they are worth it."""
        pending, before = mx.array(self.pending, mx.uint32), self._before()
        source, depth = self.asked()
        if source is None:
            return self._launched(pending, before, 0, None)
        key = self.drawer.key()

        def draw(logits: mx.array, guesses: list[mx.array]) -> mx.array:
            return self.drawer(logits, before, mx.concatenate([pending, *guesses])).tokens

        guesses = self.sources[source].propose(self.tokens, depth, draw)
        self.drawer.keep(key)
        return self._launched(mx.concatenate([pending, guesses]), before, guesses.size, source)

    def behind(self, flight: Flight) -> Flight:
        """Launch the step behind one without guesses, before its token is known here."""
        before = flight.before
        before = None if before is None else mx.concatenate([before, flight.fed])
        return self._launched(flight.drawn.tokens.astype(mx.uint32), before, 0, None)

    def _before(self) -> mx.array | None:
        """All tokens but those that the next step takes, if there are processors."""
        if self.text is not None:
            end = len(self.tokens) - len(self.pending)
            new = mx.array(self.tokens[self.text.size : end], mx.uint32)
            self.text = mx.concatenate([self.text[:end], new])
        return self.text

    def asked(self) -> tuple[int | None, int]:
        """Which source is to guess, and how many tokens; without one, steps go ahead."""
        self.goes_ahead, room = True, None
        for number, source in enumerate(self.sources):
            if source.ready(self.tokens):
                room = self._room() if room is None else room
                depth = self.depths.depth(number, len(self.pending), room - len(self.pending))
                if depth:
                    self.goes_ahead = False
                    return number, depth
                self.depths.forget(number)
        return None, 0

    def _room(self) -> int:
        """How many tokens a step can have, as caches treat all of them like the first."""
        room = min(longest(self.model, self.caches) or MAX_LENGTH, MAX_LENGTH)
        if self.quantize["kv_bits"] is None:
            return room
        start = self.quantize["quantized_kv_start"]
        left = [start - c.offset for c in self.caches if hasattr(c, "to_quantized")]
        return min([room, *(n for n in left if n > 0)])

    def _launched(
        self, fed: mx.array, before: mx.array | None, guesses: int, source: int | None
    ) -> Flight:
        maybe_quantize_kv_cache(self.caches, **self.quantize)
        checkpoint = Checkpoint(self.model, self.caches, fed.size) if guesses else None
        logits = self.model(fed[None], cache=self.caches)[0, fed.size - guesses - 1 :]
        drawn = self.drawer(logits, before, fed)
        found = drawn.tokens.astype(mx.int32)
        if guesses:
            count = accepted(found, fed[fed.size - guesses :])
            found = mx.concatenate([count[None], found])
        mx.async_eval(found)
        return Flight(fed, before, guesses, source, checkpoint, drawn, found)

    def read(self, flight: Flight) -> list[int]:
        """The new tokens of a step; random numbers go on behind the last of them."""
        found = cast(list[int], flight.found.tolist())
        count, drawn = (found[0], found[1:]) if flight.guesses else (0, found)
        if flight.drawn.keys and count < flight.guesses:
            self.drawer.keep(flight.drawn.keys[count])
        report = self.report
        report.steps += 1
        if flight.guesses:
            report.rounds, report.guesses = report.rounds + 1, report.guesses + flight.guesses
            report.accepted += count
            report.lengths[count] += 1
        return drawn[: count + 1]

    def record(self, flight: Flight, new: list[int], seconds: float) -> None:
        """Take note of what a step cost."""
        length, guesses = flight.fed.size, flight.guesses
        self.depths.record(flight.source, length, guesses, len(new) - 1, seconds)
        self.report.seconds += seconds
        self.report.plain_seconds = self.depths.plain

    def settle(self, flight: Flight, new: list[int], taken: int) -> None:
        """Caches go back to what was taken of a step's new tokens; what they lack is pending."""
        right = min(taken, len(new) - 1)
        dropped = flight.checkpoint.back(flight.guesses - right) if flight.checkpoint else 0
        held = self.pending + new[:right]
        self.pending = held[flight.fed.size - dropped :] + new[right:taken]
        self.tokens += new[:taken]
        self.report.tokens += taken

    def finish(self, ahead: Flight | None) -> None:
        """Let all caches hold all tokens, as they do behind ``mlx_lm.generate_step``."""
        if self.pending and ahead is None:
            self.model(mx.array([self.pending], mx.uint32), cache=self.caches)
        for source in self.sources:
            source.finish(self.tokens)


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: nn.Module | Speculation,
    stream: Any = generation_stream,
    *,
    num_draft_tokens: int | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[Processor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
) -> Generator[tuple[int, mx.array, bool]]:
    """What ``mlx_lm.generate.speculative_generate_step`` gives, with any source and any caches.

    Args:
        prompt: (tokens,).
        model: whose text it is.
        draft_model: a smaller one, or where guesses come from.
        stream: on which the models run.
        num_draft_tokens: guesses in a round at most; as many as are worth it by default.
        max_tokens, sampler, logits_processors, prompt_cache, prefill_step_size, kv_bits,
            kv_group_size, quantized_kv_start: as in ``mlx_lm.generate_step``. Caches of a draft
            model come behind those of the model.
        max_kv_size: likewise.

    Yields:
        A token, its log-probabilities (vocabulary,), and whether it was guessed.
    """
    caches = make_prompt_cache(model, max_kv_size)
    given = [*(prompt_cache or ())]
    if given:
        caches, given = given[: len(caches)], given[len(caches) :]
    speculation = Speculation(draft_model) if isinstance(draft_model, nn.Module) else draft_model
    names = ("kv_bits", "kv_group_size", "quantized_kv_start")
    quantize = dict(zip(names, (kv_bits, kv_group_size, quantized_kv_start), strict=True))
    most = min(MAX_LENGTH if num_draft_tokens is None else num_draft_tokens, MAX_LENGTH - 1)
    with mx.stream(stream):
        _prefill(model, caches, prompt[:-1], prefill_step_size, quantize)
        drawer = Drawer(sampler, logits_processors)
        sources = speculation.sources(given or None, prefill_step_size)
        depths, tokens = Depths(model, most, speculation.measured), cast(list[int], prompt.tolist())
        run = Rounds(model, caches, sources, tokens, drawer, depths, quantize)
        run.report = speculation.report
        yield from texts(run, max_tokens, prompt_cache is not None)
        if prompt_cache is not None:  # caches may have been quantized
            prompt_cache[: len(caches)] = caches


def texts(run: Rounds, max_tokens: int, is_kept: bool) -> Generator[tuple[int, mx.array, bool]]:
    """The tokens of all rounds; behind them caches that somebody has hold what was taken."""
    tic, flight, count = perf_counter(), run.next(), 0
    while count != max_tokens:
        ahead = run.behind(flight) if run.goes_ahead else None
        new, taken = run.read(flight), 0
        run.record(flight, new, perf_counter() - tic)
        try:
            for token in new[: None if max_tokens < 0 else max_tokens - count]:
                taken += 1
                yield token, flight.drawn.logprobs[taken - 1], taken < len(new)
        except GeneratorExit:
            max_tokens = count + taken
        tic = perf_counter()
        run.settle(flight, new, taken)
        count += taken
        if ahead is not None:
            run.asked()  # guesses that there are now come behind the step under way
        if count != max_tokens:
            flight = ahead or run.next()
    if is_kept:
        run.finish(ahead)


def _prefill(
    model: Any, caches: list[Any], prompt: mx.array, chunk: int, quantize: dict[str, Any]
) -> None:
    for start in range(0, prompt.size, chunk):
        model(prompt[start : start + chunk][None], cache=caches)
        maybe_quantize_kv_cache(caches, **quantize)
        mx.eval([c.state for c in caches])
        mx.clear_cache()


class Speculation:
    """Where the guesses of a text come from, and what they were worth.

    Args:
        draft: a smaller model with the same tokens.
        prompt_lookup: whether text is looked up in what was written before, first of all.
        others: more sources, behind both.
        measured: whether the number of guesses is chosen by measurement, see :class:`Depths`.
        history: tokens ahead of the prompt, to be looked up.
    """

    def __init__(
        self,
        draft: nn.Module | None = None,
        prompt_lookup: bool = False,
        others: Sequence[Source] = (),
        measured: bool = True,
        history: Sequence[int] = (),
    ) -> None:
        self.draft, self.prompt_lookup, self.others = draft, prompt_lookup, others
        self.measured, self.history = measured, history
        self.report = SpeculationReport()

    def sources(self, caches: list[Any] | None, chunk: int) -> list[Source]:
        """New ones for a text.

        Args:
            caches: of the draft model, if there are some.
            chunk: tokens of a prompt that it takes at once.
        """
        found: list[Source] = [PromptLookup(self.history)] if self.prompt_lookup else []
        if self.draft is not None:
            found.append(DraftModel(self.draft, caches, chunk))
        return [*found, *self.others]
