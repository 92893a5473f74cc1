"""Multi-token-prediction heads: layers of a checkpoint that guess the tokens behind the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode.engine import step
from ..decode.twin import is_stepped
from ..runtime.backend import current, within
from .sources import Draw

# Hidden states that wait for guesses at most: behind a text without any they take memory.
_WAITING = 64


class Head(nn.Module):
    """Predicts a token more than what it is given does, from a hidden state and the next token.

    ``block(eh_proj([enorm(embedding of token i + 1), hnorm(hidden state i)]))`` is a hidden state,
    from which ``norm`` and the model's output layer have the logits of token i + 2. ``block`` is a
    decoder layer of the model's architecture. If ``normed``, the next prediction starts behind
    ``norm``. ``mask`` are options of mlx-lm's ``create_attention_mask``.
    """

    def __init__(
        self,
        block: nn.Module,
        size: int,
        eps: float,
        embedding_first: bool = True,
        normed: bool = False,
        **mask: Any,
    ) -> None:
        super().__init__()
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block, self.norm = block, nn.RMSNorm(size, eps)
        self.embedding_first, self.normed = embedding_first, normed
        self._mask = tuple(mask.items())

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Hidden states (B, L, D) from embeddings of next tokens and hidden states, likewise."""
        from mlx_lm.models.base import create_attention_mask

        pair = [self.enorm(embedded), self.hnorm(hidden)]
        x = self.eh_proj(mx.concatenate(pair if self.embedding_first else pair[::-1], axis=-1))
        mask: Any = create_attention_mask(x, cache, **dict(self._mask))
        block: Any = self.block
        out: mx.array = block(x, mask, cache)
        return self.norm(out) if self.normed else out

    def normal(self, out: mx.array) -> mx.array:
        """The input of the output layer."""
        return out if self.normed else self.norm(out)


class Tapped(nn.Module):
    """A model whose steps give the hidden states behind its logits, in one array."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        owner = getattr(model, "language_model", model)
        self.inner = owner.model
        if "lm_head" in owner:
            self.lm_head = owner.lm_head
        self.invariant = getattr(type(model), "_invariant", False)
        self.stepped = is_stepped(model) and not self.invariant

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """(B, L, vocabulary + D)"""
        if self.stepped and cache and (found := step(self, tokens, cache)) is not None:
            return found
        hidden = self.hidden(tokens, cache)
        return mx.concatenate([self.logits(hidden), hidden], axis=-1)

    def hidden(self, tokens: mx.array, cache: Any) -> mx.array:
        """(B, L, D)"""
        inner: Any = self.inner
        with within(current, current.get()._replace(invariant=self.invariant)):
            found: mx.array = inner(tokens, cache=cache)
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """(B, L, vocabulary)"""
        output: Any = self.lm_head if "lm_head" in self else self.inner.embed_tokens.as_linear
        with within(current, current.get()._replace(invariant=self.invariant)):
            found: mx.array = output(hidden)
        return found


class Trunk:
    """The model that heads belong to, which they share embeddings and output layer with."""

    def __init__(self, model: Any) -> None:
        self.model, self.tapped = model, Tapped(model)
        inner: Any = self.tapped.inner
        self.embed, self.size = inner.embed_tokens, inner.norm.weight.size

    def parts(self, found: mx.array) -> tuple[mx.array, mx.array]:
        """The logits and the hidden states of a step."""
        return found[..., : -self.size], found[..., -self.size :]


class Heads(nn.Module):
    """The heads of a model, the first for the token behind the next: see :func:`load_heads`.

    Args:
        model: whose they are.
        layers: one by one; where more tokens are to be guessed, the last one goes on.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Head]) -> None:
        super().__init__()
        self.layers = [*layers]
        self.trunk = Trunk(model)

    def of(self, model: object) -> Trunk:
        """The model; a ``ValueError`` if it is another."""
        if self.trunk.model is not model:
            raise ValueError("the heads are of another model")
        return self.trunk


class PredictionHeads:
    """Guesses of the heads for one text, a :class:`.sources.Source`."""

    def __init__(self, heads: Heads) -> None:
        from mlx_lm.models.cache import KVCache

        self.layers, self.trunk = heads.layers, heads.trunk
        self.caches: list[Any] = [KVCache() for _ in self.layers]
        # The first and the last position whose hidden state the model has given, with what each
        # head has not taken of the states before it, from where, and the last that it made.
        self.end = 0
        self.waiting: list[mx.array | None] = [None for _ in self.layers]
        self.at = [0 for _ in self.layers]
        self.last: list[mx.array | None] = [None for _ in self.layers]

    def observe(self, tokens: Sequence[int], start: int, hidden: mx.array) -> None:
        """Take note of hidden states (L, D) of the tokens from ``start`` on."""
        if (new := hidden[max(self.end - start, 0) :]).size:
            self.end = start + len(hidden)
            self._wait(0, new[None])
            if self._rows(0) > _WAITING:
                self._follow(tokens)
                states = [c.state for c in self.caches if not c.empty()]
                mx.eval(states, [each for each in self.last if each is not None])

    def ready(self, tokens: Sequence[int]) -> bool:
        return self.end == len(tokens) - 1 > 0

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        self._follow(tokens)
        guesses, drawn = list[mx.array](), [0 for _ in self.layers]
        out, rows = self.last[0], None
        while len(guesses) < depth and out is not None:
            if guesses:
                k = min(len(guesses), len(self.layers) - 1)
                if len(guesses) < len(self.layers):
                    states = [each for each in (self.waiting[k], rows) if each is not None]
                    first, rows = self.at[k] + k + 1, mx.concatenate(states, axis=1)
                    known, made = [*tokens[first:]], max(first - len(tokens), 0)
                    some = guesses[made : made + rows.shape[1] - len(known)]
                    ids = mx.concatenate([mx.array(known, mx.uint32), *some])
                else:
                    rows, ids = out, guesses[-1]
                rows = self._run(k, rows, ids)
                drawn[k] += rows.shape[1]
                out = rows[:, -1:]
            head = self.layers[min(len(guesses), len(self.layers) - 1)]
            logits = self.trunk.tapped.logits(head.normal(out))
            guesses.append(draw(logits[:, -1], guesses).astype(mx.uint32))
            mx.async_eval(guesses[-1])
        for cache, count in zip(self.caches, drawn, strict=True):
            cache.trim(count)
        return mx.concatenate(guesses) if guesses else mx.array([], mx.uint32)

    def finish(self, tokens: Sequence[int]) -> None:
        """There is nothing to do."""

    def _follow(self, tokens: Sequence[int]) -> None:
        """Let all heads take the hidden states behind which all tokens that they need are known."""
        for k in range(len(self.layers)):
            count = min(self._rows(k), len(tokens) - k - 1 - self.at[k])
            states = self.waiting[k]
            if states is None or count < 1:
                continue
            first = self.at[k] + k + 1
            out = self._run(k, states[:, :count], mx.array([*tokens[first : first + count]]))
            self.waiting[k] = states[:, count:] if count < states.shape[1] else None
            self.at[k], self.last[k] = self.at[k] + count, out[:, -1:]
            if k + 1 < len(self.layers):
                self._wait(k + 1, out)

    def _run(self, k: int, states: mx.array, tokens: mx.array) -> mx.array:
        return self.layers[k](self.trunk.embed(tokens[None]), states, self.caches[k])

    def _wait(self, k: int, states: mx.array) -> None:
        before = self.waiting[k]
        self.waiting[k] = states if before is None else mx.concatenate([before, states], axis=1)

    def _rows(self, k: int) -> int:
        states = self.waiting[k]
        return 0 if states is None else states.shape[1]
