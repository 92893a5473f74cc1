"""Sources of guesses: what was written before, or a smaller model. Heads stand in :mod:`.heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from ..decode.engine import MAX_LENGTH
from .rollback import Checkpoint

# From logits (1, vocabulary) and the guesses before to a token (1,), as the model itself draws.
Draw = Callable[[mx.array, list[mx.array]], mx.array]


class Source(Protocol):
    """A source of guesses for the next tokens.

    A guess is a token, without a probability: what the model draws decides, with the same random
    numbers as ``draw`` has here. So a text is what it is without guesses, whatever these are.
    """

    def ready(self, tokens: Sequence[int]) -> bool:
        """Whether there is something to guess behind these tokens, told without much work."""
        ...

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        """Guesses (up to depth,) behind the tokens so far."""
        ...

    def finish(self, tokens: Sequence[int]) -> None:
        """Behind the last token: caches of its own are to hold just these tokens."""
        ...


@runtime_checkable
class Foreteller(Protocol):
    """A source whose guesses cost nothing, so that what they are worth is known without rounds."""

    def foretell(self, tokens: Sequence[int], depth: int) -> list[int]:
        """The tokens that it would guess, at most so many."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A source that is shown the model's hidden states."""

    def observe(self, tokens: Sequence[int], start: int, hidden: mx.array) -> None:
        """Take note of hidden states (L, D) of the tokens from ``start`` on."""
        ...


@runtime_checkable
class Pipelined(Protocol):
    """A source whose guesses need no value read: it is asked before the last round is."""

    def propose_behind(
        self, tokens: Sequence[int], last: mx.array, right: mx.array, depth: int, draw: Draw
    ) -> mx.array | None:
        """Guesses (depth,) behind a round that is not read yet; None if they have to wait.

        Of that round, ``tokens`` end before its guesses, ``last`` (2,) are the last two up to the
        one that it drew, and ``right`` () says how many of its guesses were accepted.
        """
        ...


class PromptLookup:
    """Takes what followed the last tokens where they stood before, in the prompt or behind it.

    ``history`` stands ahead of the prompt. Of matches of the shortest to the longest number of
    tokens the longest counts, then the latest.
    """

    def __init__(self, history: Sequence[int] = (), longest: int = 4, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._text, self._ahead, self._known = [*history], len(history), 0
        self._ends: dict[tuple[int, ...], int] = {}

    def ready(self, tokens: Sequence[int]) -> bool:
        return self._found(tokens) is not None

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        return mx.array(self.foretell(tokens, depth), mx.uint32)

    def foretell(self, tokens: Sequence[int], depth: int) -> list[int]:
        at = self._found(tokens)
        text = self._text[at : at + depth] if at is not None else []
        while text and len(text) < depth:  # what repeats itself goes on as it does
            text += text[: depth - len(text)]
        return text

    def finish(self, tokens: Sequence[int]) -> None:
        """There is nothing to do."""

    def _found(self, tokens: Sequence[int]) -> int | None:
        """The place behind an earlier occurrence of the last tokens."""
        text = self._text
        text += tokens[len(text) - self._ahead :]
        for end in range(self._known, len(text)):  # that of the last tokens comes later
            for size in self.sizes:
                if end >= size:
                    self._ends[tuple(text[end - size : end])] = end
        self._known = len(text)
        keys = (tuple(text[-size:]) for size in self.sizes)
        return next((self._ends[key] for key in keys if key in self._ends), None)


class _Taken(NamedTuple):
    """Inputs of a draft model for a round: ``known`` tokens, and its guesses but for the last."""

    known: int
    guesses: mx.array
    checkpoint: Checkpoint


class DraftModel:
    """A smaller model with the same tokens, and caches of its own that hold what the model's do."""

    def __init__(
        self, model: nn.Module, caches: list[Any] | None = None, chunk: int = 2048
    ) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.model, self.chunk = model, chunk
        self.caches = make_prompt_cache(model) if caches is None else caches
        # Tokens that the caches are known to hold, and what they took since then.
        self._held = 0
        self._taken: list[_Taken] = []

    def ready(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        self._follow(tokens, len(tokens) - MAX_LENGTH)
        return self._proposed(mx.array([*tokens[self._held :]], mx.uint32), depth, draw)

    def propose_behind(
        self, tokens: Sequence[int], last: mx.array, right: mx.array, depth: int, draw: Draw
    ) -> mx.array | None:
        self._settle(tokens, 1)
        if not self._taken:
            return None
        (before,) = self._taken
        # The last of two tokens may be the guess that the caches did not take.
        lengths = last.size, *[1] * (depth - 1)
        if not before.checkpoint.moves_back(before.guesses.size - right, *lengths):
            return None
        return self._proposed(last, depth, draw)

    def _proposed(self, token: mx.array, depth: int, draw: Draw) -> mx.array:
        count, guesses = token.size, list[mx.array]()
        checkpoint = Checkpoint(self.model, self.caches, count + depth - 1, singly=True)
        while len(guesses) < depth:
            logits = self._step(token)
            token = draw(logits[:, -1], guesses).astype(mx.uint32)
            mx.async_eval(token)
            guesses.append(token)
        made = mx.concatenate(guesses)
        self._taken.append(_Taken(count, made, checkpoint))
        return made

    def finish(self, tokens: Sequence[int]) -> None:
        self._follow(tokens, len(tokens))

    def _settle(self, tokens: Sequence[int], rounds: int = 0) -> None:
        """Let the caches count what was right of their guesses, but for those of some rounds."""
        while len(self._taken) > rounds:
            count, guesses, checkpoint = self._taken.pop(0)
            behind = tokens[self._held + count :]
            if checkpoint.gone is not None:  # to before the last of the right ones
                count -= 1
            else:
                guesses = guesses[:-1]
            if len(tokens) < self._held + count:  # the text has ended before
                count, behind = 0, behind[:0]
            pairs = zip(cast(list[int], guesses.tolist()), behind, strict=False)
            right = count + sum(1 for _ in takewhile(lambda pair: eq(*pair), pairs))
            right = min(right, len(tokens) - 1 - self._held)  # the next step has a token, too
            (dropped,) = checkpoint.back([checkpoint.length - right])
            self._held += checkpoint.length - dropped

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        """Let the caches hold nothing but these tokens, and those up to ``end`` at least."""
        self._settle(tokens)
        while self._held < end:
            some = [*tokens[self._held : min(self._held + self.chunk, end)]]
            self._step(mx.array(some, mx.uint32))
            mx.eval([c.state for c in self.caches])
            self._held += len(some)

    def _step(self, tokens: mx.array) -> mx.array:
        model: Any = self.model
        logits: mx.array = model(tokens[None], cache=self.caches)
        return logits
