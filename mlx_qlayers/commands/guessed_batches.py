"""Batches of a server whose sequences each take as many guesses in a step as are right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, _extend_cache
from mlx_lm.sample_utils import greedy_sampler

from ..speculation.drawing import Drawer
from ..speculation.rounds import Flight, Rounds, SpeculationReport
from ..speculation.sequence import Text

if TYPE_CHECKING:
    from ..speculation.loop import Speculation

# The share of a step's time that others may have had in between for it to be a measurement.
_OTHERS = 0.5
# The lists of mlx-lm's batch, with an item for each sequence.
_LISTS = (
    *("uids", "tokens", "samplers", "logits_processors", "max_tokens"),
    *("stop_sequences", "_num_tokens", "_matchers"),
)


class GuessedBatch(GenerationBatch):
    """mlx-lm's batch of sequences that are written, in rounds of guesses.

    ``next`` gives each sequence's tokens of a round, of which there may be several or none.
    ``most`` are guesses in a round.
    """

    def __init__(self, model: Any, speculation: Speculation, most: int | None) -> None:
        none = mx.array([], mx.uint32)
        super().__init__(model, [], none, [], [], [], greedy_sampler, [], [], [])
        self.speculation = speculation
        self.rounds = Rounds(model, [], [], speculation.depths(model, most))
        self.flight: Flight | None = None
        # Tokens that nobody was told of, with log-probabilities and why a sequence ends there.
        self.said: list[list[tuple[int, mx.array, str | None]]] = []
        self.tic = self.left = perf_counter()

    def extend(self, batch: Any) -> None:
        """Take in sequences whose first token mlx-lm has drawn."""
        self._drain()
        tokens: Any = batch._next_tokens.tolist()
        keys = mx.random.split(mx.random.key(_number()), len(tokens))
        old = len(self.uids)
        self.rounds.texts += [
            # A request with a seed has random numbers of its own.
            Text([*text, token], Drawer(s, p, key if not hasattr(s, "key") else None),
                 self.speculation.sources())
            for text, token, s, p, key in zip(
                batch.tokens, tokens, batch.samplers, batch.logits_processors, keys, strict=True
            )
        ]  # fmt: skip
        for name in _LISTS:
            getattr(self, name).extend(getattr(batch, name))
        self.prompt_cache = _extend_cache(self.prompt_cache, batch.prompt_cache)
        self.rounds.caches = self.prompt_cache
        self.said += [[] for _ in tokens]
        for i, (token, logprobs) in enumerate(zip(tokens, batch._next_logprobs, strict=True), old):
            self._say(i, [token], [logprobs])
        self.tic = perf_counter()

    def next(self) -> list[Any]:
        if not self.uids:
            return []
        if not any(self.said):
            self._read(goes_on=True)
        responses, there = list[Any](), list[int]()
        for i, said in enumerate(self.said):
            for token, logprobs, reason in said:
                caches, tokens = None, None
                if reason is not None:
                    caches, tokens = [c.extract(i) for c in self.prompt_cache], self._held(i)
                responses.append(
                    self.Response(self.uids[i], token, logprobs, reason, caches, tokens)
                )
            if not said or said[-1][2] is None:
                there.append(i)
            self.said[i] = []
        if len(there) < len(self.uids):
            self._keep(there)
        if self.uids and self.flight is None:
            self.flight = self.rounds.next()
        self.left = perf_counter()
        return responses

    def filter(self, keep: Sequence[int]) -> None:
        self._drain()
        self._keep(keep)

    def extract_cache(self, idx: int) -> list[Any]:
        self._drain()
        self.tokens[idx] = self._held(idx)
        return [c.extract(idx) for c in self.prompt_cache]

    def _held(self, i: int) -> list[int]:
        """The tokens that caches hold."""
        text = self.rounds.texts[i]
        return text.tokens[: len(text.tokens) - (0 if self.flight else len(text.pending))]

    def _drain(self) -> None:
        """Wait for the step under way: caches and tokens belong together behind it."""
        while self.flight is not None:
            self._read(goes_on=False)

    def _read(self, goes_on: bool) -> None:
        """Read a step, and say its tokens; if it ``goes_on`` the next one is launched before."""
        began = perf_counter()
        flight, ahead = self.flight or self.rounds.next(), None
        if goes_on and flight.checkpoint is None:
            ahead = self.rounds.behind(flight)
        new = self.rounds.read(flight)
        seconds = perf_counter() - self.tic
        measured = goes_on and began - self.left < _OTHERS * seconds
        self.rounds.record(flight, new, seconds if measured else None, ahead)
        self.tic = perf_counter()
        taken = [
            self._say(i, tokens, drawn.logprobs)
            for i, (tokens, drawn) in enumerate(zip(new, flight.drawn, strict=True))
        ]
        self.rounds.settle(flight, new, taken)
        if ahead is not None:
            self.rounds.asked()
        self.flight = ahead

    def _say(self, i: int, tokens: Sequence[int], logprobs: Any) -> int:
        """Hand over tokens of a sequence up to its end; how many those are."""
        for n, token in enumerate(tokens):
            self._num_tokens[i] += 1
            reason = "length" if self._num_tokens[i] >= self.max_tokens[i] else None
            if self._matchers[i].advance(token):
                reason = "stop"
            self.said[i].append((token, logprobs[n], reason))
            if reason is not None:
                return n + 1
        return len(tokens)

    def _keep(self, keep: Sequence[int]) -> None:
        """Go on with some of the sequences; a step under way is one without guesses."""
        if keep:
            self.flight = self.rounds.keep(keep, self.flight)
        else:
            logging.info(str(self.rounds.report))
            self.flight, self.rounds.texts = None, []
            self.rounds.report = SpeculationReport()
            self.prompt_cache.clear()
        for name in (*_LISTS, "said"):
            setattr(self, name, [getattr(self, name)[i] for i in keep])


def _number() -> int:
    """A random number of MLX's state."""
    found: Any = mx.random.randint(0, 2**31 - 1).item()
    return int(found)
