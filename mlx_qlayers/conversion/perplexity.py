"""How well models predict a text, and how far they are from another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn


class Perplexity(NamedTuple):
    """Of a model on a text.

    Attributes:
        value: exp of the mean loss of a token.
        error: its standard error, to first order.
        divergence: KL(reference || model) in nats a token; None without a reference.
        tokens: that were predicted.
    """

    value: float
    error: float
    divergence: float | None
    tokens: int


def perplexities(
    models: Sequence[nn.Module], tokens: mx.array, reference: nn.Module | None = None
) -> list[Perplexity]:
    """The perplexity of each model, on the same sequences one after the other.

    Args:
        models: of one vocabulary.
        tokens: (count, length); all but the first of each sequence are predicted.
        reference: the model that the others were made from.

    Raises:
        ValueError: the sequences have less than two tokens.

    Example:
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> perplexities([model], mx.array([tokenizer.encode("Once upon a time there was a king")]))
        [Perplexity(value=..., error=..., divergence=None, tokens=...)]
    """
    from tqdm import tqdm

    if tokens.shape[1] < 2:
        raise ValueError(f"sequences of shape {tokens.shape} have nothing to predict")
    losses: list[list[mx.array]] = [[] for _ in models]
    distances: list[list[mx.array]] = [[] for _ in models]
    for row in tqdm(mx.split(tokens, len(tokens)), "perplexity", unit="sequence", disable=None):
        truth = None if reference is None else _log_probabilities(reference, row)
        for i, model in enumerate(models):
            found = _log_probabilities(model, row)
            losses[i].append(-mx.take_along_axis(found, row[:, 1:, None], axis=-1).flatten())
            if truth is not None:
                distances[i].append((mx.exp(truth) * (truth - found)).sum(axis=-1).flatten())
            mx.eval(losses[i], distances[i])
    return [_of(*pair) for pair in zip(losses, distances, strict=True)]


def _of(losses: list[mx.array], distances: list[mx.array]) -> Perplexity:
    loss = mx.concatenate(losses)
    mean, variance = _number(loss.mean()), _number(mx.var(loss))
    value = math.exp(mean)
    divergence = _number(mx.concatenate(distances).mean()) if distances else None
    return Perplexity(value, value * math.sqrt(variance / loss.size), divergence, loss.size)


def _number(x: mx.array) -> float:
    return float(cast(float, x.item()))


def _log_probabilities(model: nn.Module, row: mx.array) -> mx.array:
    logits = model(row[:, :-1]).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
