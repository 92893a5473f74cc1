"""The tokens of a step as the model draws them one by one, and how many guesses were these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


class Drawn(NamedTuple):
    """The tokens that a model draws behind each of some tokens."""

    tokens: mx.array  # (L,)
    logprobs: mx.array  # (L, vocabulary)
    keys: list[mx.array]  # states of random numbers behind each token; none where it needs no such


class Drawer:
    """Draws tokens from logits as ``mlx_lm.generate_step`` does.

    The i-th token of a text is drawn with the i-th random numbers behind the seed, however many
    tokens a step has: :meth:`keep` puts the state back behind those that count. So the same seed
    gives the same text with guesses as without.

    A sampler makes a token (1,) of log-probabilities (1, vocabulary), by default the likeliest;
    processors make logits of all tokens so far and logits (1, vocabulary). ``own`` is a key of
    random numbers of its own; else those of MLX are taken.
    """

    def __init__(
        self,
        sampler: Sampler | None,
        processors: Sequence[Processor] | None,
        own: mx.array | None = None,
    ) -> None:
        from mlx_lm.sample_utils import greedy_sampler

        self.own = own
        self.sampler, self.processors = sampler or greedy_sampler, [*(processors or ())]
        self.at_once = self.sampler is greedy_sampler and not self.processors

    @property
    def state(self) -> mx.array:
        """The state of random numbers: MLX's, unless a sampler has its own."""
        own: mx.array | None = getattr(self.sampler, "key", None)
        return cast(Any, mx.random.state)[0] if own is None else own

    def __call__(self, logits: mx.array, before: mx.array | None, fed: mx.array) -> Drawn:
        """The tokens behind the last L of those that a step was ``fed``: logits (L, vocabulary).

        Where there are processors ``before`` has all tokens before the step.
        """
        if self.own is not None and not self.at_once:
            return self._by_own_numbers(logits, before, fed)
        if self.at_once:
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return Drawn(self.sampler(logprobs), logprobs, [])
        tokens, rows, keys = list[mx.array](), list[mx.array](), list[mx.array]()
        for i in range(count := len(logits)):
            row, end = logits[i : i + 1], len(fed) - count + i + 1
            if self.processors:
                text = fed[:end] if before is None else mx.concatenate([before, fed[:end]])
            for processor in self.processors:
                row = processor(text, row)
            rows.append(row - mx.logsumexp(row, axis=-1, keepdims=True))
            tokens.append(self.sampler(rows[-1]))
            keys.append(mx.array(self.state))
        return Drawn(mx.concatenate(tokens), mx.concatenate(rows), keys)

    def _by_own_numbers(self, *args: Any) -> Drawn:
        """The same, with the state of random numbers in the place of MLX's."""
        own, self.own = self.own, None
        before = self.key()
        try:
            self.keep(own)
            return self(*args)
        finally:
            own = self.key()
            self.keep(before)
            self.own = own

    def key(self) -> mx.array | None:
        """The state of random numbers, to be put back."""
        if self.at_once or self.own is not None:
            return self.own
        return mx.array(self.state)

    def keep(self, key: mx.array | None) -> None:
        """Put a state back."""
        if self.own is not None:
            self.own = key
        elif key is not None:
            self.state[:] = key


def accepted(tokens: mx.array, guesses: mx.array) -> mx.array:
    """How many guesses are what the model draws, up to the first that is not.

    A guess x, whatever it comes from, is accepted with the probability p(x) that the model gives
    it, as :func:`Drawer` draws from p. A token in the place of one that was not accepted has the
    distribution p without x. So all tokens have those of the model: rejection sampling (Leviathan
    et al., 2023, https://arxiv.org/abs/2211.17192) where guesses have no probabilities.

    Of (..., L + 1) tokens of the model and (..., L) guesses: (...) int32.
    """
    same = (tokens[..., :-1] == guesses).astype(mx.int32)
    if not same.shape[-1]:
        return mx.zeros(same.shape[:-1], mx.int32)
    return mx.cumprod(same, axis=-1).sum(axis=-1)
