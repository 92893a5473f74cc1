"""One sequence that is written: its tokens, what draws them, and what guesses the next ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..decode.engine import MAX_LENGTH
from .drawing import Drawer
from .sources import Draw, Foreteller, Observer, Pipelined, Source


class Text:
    """One sequence of a batch: its ``tokens`` so far, of which caches lack the ``pending`` last.

    The first of its sources that is ready guesses.
    """

    def __init__(self, prompt: Sequence[int], drawer: Drawer, sources: Sequence[Source]) -> None:
        self.tokens, self.pending = [*prompt], [*prompt[-1:]]
        self.drawer, self.sources = drawer, sources
        self.seen = mx.array([], mx.uint32) if drawer.processors else None
        # The source that would have guessed the next tokens, and these.
        self.source, self.foretold = 0, list[int]()

    def before(self) -> mx.array | None:
        """All tokens but those that the next step takes, if there are processors."""
        if self.seen is not None:
            end = len(self.tokens) - len(self.pending)
            new = mx.array(self.tokens[self.seen.size : end], mx.uint32)
            self.seen = mx.concatenate([self.seen[:end], new])
        return self.seen

    def observe(self, start: int, hidden: mx.array) -> None:
        """Show the sources that ask for them the hidden states of tokens from ``start`` on."""
        for source in self.sources:
            if isinstance(source, Observer):
                source.observe(self.tokens, start, hidden)

    def ready(self) -> int | None:
        """The number of the first source that has something to guess."""
        found = (i for i, source in enumerate(self.sources) if source.ready(self.tokens))
        return next(found, None)

    def follow(self) -> tuple[int, bool] | None:
        """Which source would have guessed the last token, behind a step without guesses, or not."""
        said = None
        if self.foretold:
            said = self.source, self.foretold.pop(0) == self.tokens[-1]
            if not said[1]:
                self.foretold = []
        if not self.foretold and (found := self.ready()) is not None:
            source = self.sources[found]
            if isinstance(source, Foreteller):
                self.source, self.foretold = found, source.foretell(self.tokens, MAX_LENGTH)
        return said

    def fed(self, source: int | None, length: int) -> tuple[mx.array, int]:
        """The tokens (length,) of a step, and how many of them are guesses; zeros come behind."""
        fed, depth, count = mx.array(self.pending, mx.uint32), length - len(self.pending), 0
        if source is not None and depth:
            key, draw = self.drawer.key(), self._draw(fed)
            guesses = self.sources[source].propose(self.tokens, depth, draw)
            self.drawer.keep(key)
            fed, count = mx.concatenate([fed, guesses]), guesses.size
        return mx.pad(fed, (0, length - fed.size)) if fed.size < length else fed, count

    def fed_behind(self, last: mx.array, right: mx.array, length: int) -> mx.array | None:
        """The tokens (length,) of the round behind one that is not read yet, by the first source.

        ``last`` (2,) and ``right`` () are those of :meth:`.sources.Pipelined.propose_behind`.
        """
        source, key = self.sources[0], self.drawer.key()
        assert isinstance(source, Pipelined)
        guesses = source.propose_behind(self.tokens, last, right, length - 1, self._draw(last[1:]))
        self.drawer.keep(key)
        return None if guesses is None else mx.concatenate([last[1:], guesses])

    def _draw(self, pending: mx.array) -> Draw:
        """Draws guesses behind tokens as the model draws tokens."""
        before = self.before()

        def draw(logits: mx.array, guesses: list[mx.array]) -> mx.array:
            return self.drawer(logits, before, mx.concatenate([pending, *guesses])).tokens

        return draw
