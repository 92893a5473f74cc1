"""Sources of guesses: what was written before, or a smaller model. Heads stand in :mod:`.heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from ..decode.engine import MAX_LENGTH
from .rollback import Checkpoint

# From logits (1, vocabulary) and the guesses before to a token (1,), as the model itself draws.
Draw = Callable[[mx.array, list[mx.array]], mx.array]


class Source(Protocol):
    """What guesses the next tokens.

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
        """What it would guess, up to so many tokens."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A source that is shown the model's hidden states."""

    def observe(self, tokens: Sequence[int], start: int, hidden: mx.array) -> None:
        """Take note of hidden states (L, D) of the tokens from ``start`` on."""
        ...


class PromptLookup:
    """Takes what followed the last tokens where they stood before, in the prompt or behind it.

    Args:
        history: tokens ahead of the prompt.
        longest: the most tokens that are looked up; the longest match counts, then the latest.
        shortest: the fewest.
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


class DraftModel:
    """A smaller model with the same tokens.

    Args:
        model: as mlx-lm loads it.
        caches: its own, which hold what the model's do; new ones by default.
        chunk: tokens of a prompt that it takes at once.
    """

    def __init__(
        self, model: nn.Module, caches: list[Any] | None = None, chunk: int = 2048
    ) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.model, self.chunk = model, chunk
        self.caches = make_prompt_cache(model) if caches is None else caches
        # Tokens that the caches are known to hold; what they took since then, and from where.
        self._held = 0
        self._taken: tuple[list[int], mx.array, Checkpoint] | None = None

    def ready(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        self._follow(tokens, len(tokens) - MAX_LENGTH)
        rest, guesses = [*tokens[self._held :]], list[mx.array]()
        token = mx.array(rest, mx.uint32)
        checkpoint = Checkpoint(self.model, self.caches, len(rest) + depth - 1, singly=True)
        while len(guesses) < depth:
            logits = self._step(token)
            token = draw(logits[:, -1], guesses).astype(mx.uint32)
            mx.async_eval(token)
            guesses.append(token)
        made = mx.concatenate(guesses)
        self._taken = rest, made[:-1], checkpoint
        return made

    def finish(self, tokens: Sequence[int]) -> None:
        self._follow(tokens, len(tokens))

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        """Let the caches hold nothing but these tokens, and those up to ``end`` at least."""
        if self._taken is not None:
            rest, made, checkpoint = self._taken
            pairs = zip(
                [*rest, *cast(list[int], made.tolist())], tokens[self._held :], strict=False
            )
            right = sum(1 for _ in takewhile(lambda pair: eq(*pair), pairs))
            (dropped,) = checkpoint.back([checkpoint.length - right])
            self._held += checkpoint.length - dropped
            self._taken = None
        while self._held < end:
            some = [*tokens[self._held : min(self._held + self.chunk, end)]]
            self._step(mx.array(some, mx.uint32))
            mx.eval([c.state for c in self.caches])
            self._held += len(some)

    def _step(self, tokens: mx.array) -> mx.array:
        model: Any = self.model
        logits: mx.array = model(tokens[None], cache=self.caches)
        return logits
