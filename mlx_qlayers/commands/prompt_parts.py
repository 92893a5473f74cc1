"""Batches whose prompts are read in parts that take no longer than others may wait."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mlx_lm import server

from .guessed_batches import GuessedBatch

# Seconds that a part may take: so long other sequences wait for a token, and requests to begin.
_PART = 0.25
_FIRST, _FEWEST = 64, 16  # tokens of a part; the first one measures the model


@dataclass
class _Reading:
    """A prompt that is being read: its tokens so far, parts, and seconds of the longest."""

    tokens: int = 0
    parts: int = 0
    longest: float = 0.0


class BatchGenerator(server.BatchGenerator):
    """mlx-lm's, with ``prefill_step_size`` as the most tokens that a part may have of a prompt.

    How many it has follows from what the parts before it took. In how many parts a prompt was read,
    and what the longest took, is logged. ``guesses`` gives where guesses come from, and how many
    there are in a step at most.
    """

    def __init__(self, model: Any, *, guesses: Any = None, **options: Any) -> None:
        super().__init__(model, **options)
        if guesses is not None:
            self._generation_batch = GuessedBatch(model, *guesses())
        self._most: int = self.prefill_step_size
        self._tokens = _FIRST  # of a part of all prompts
        self._readings: dict[int, _Reading] = {}

    def _next(self) -> Any:
        prompts = len(self._prompt_batch) + len(self._unprocessed_sequences)
        share = self._tokens // max(1, min(prompts, self.prefill_batch_size))
        # Powers of two: few shapes have to be compiled.
        self.prefill_step_size = min(self._most, 1 << max(share, _FEWEST).bit_length() - 1)
        before = self._counters.prompt_time
        responses, texts = super()._next()
        seconds, widest = self._counters.prompt_time - before, 0
        reading = [each for each in responses if not each.end_of_prompt]
        for each in reading:
            one = self._readings.setdefault(each.uid, _Reading())
            widest = max(widest, each.progress[0] - one.tokens)
            one.tokens, one.parts = each.progress[0], one.parts + 1
            one.longest = max(one.longest, seconds)
        tokens = widest * len(reading)  # of this part, padding and all
        if reading and seconds > _PART:
            self._tokens = max(_FEWEST, int(tokens * _PART / seconds))
        elif reading and seconds < _PART / 2 and 2 * tokens > self._tokens:
            self._tokens = min(2 * self._tokens, self._most * self.prefill_batch_size)
        for each in responses:
            if each.end_of_prompt and (done := self._readings.pop(each.uid, None)):
                text = "Prompt of %d tokens: %d parts, the longest took %.2f s"
                logging.info(text, each.progress[1], done.parts, done.longest)
        return responses, texts

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        for uid in uids:
            self._readings.pop(uid, None)
        return super().remove(uids, return_prompt_caches)
