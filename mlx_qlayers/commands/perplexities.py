"""How well models predict a text, and how far they are from another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..metal.quantized_matmul.qmv_config import MOST_ROUNDED

Model = Callable[..., mx.array]


class Perplexity(NamedTuple):
    """Of a model on a text."""

    value: float  # exp of the mean loss of a token
    error: float  # its standard error, to first order
    tokens: int  # that were predicted
    # KL(reference || model) in nats a token; None without a reference.
    divergence: float | None = None
    rise: float | None = None  # of the mean loss of a token over the reference's; None without one
    rise_error: float | None = None  # its standard error, of the differences token by token


def perplexities(
    models: Sequence[Model], tokens: mx.array, reference: Model | None = None
) -> list[Perplexity]:
    """The perplexity of each model, on the same sequences (count, length) one after the other.

    ``reference`` is the model that the others were made from. A ValueError if there is no token to
    predict.

    Example:
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> perplexities([model], mx.array([tokenizer.encode("Once upon a time there was a king")]))
        [Perplexity(value=..., error=..., tokens=..., divergence=None, rise=None, rise_error=None)]
    """
    from tqdm import tqdm

    if tokens.shape[1] < 2:
        raise ValueError(f"sequences of shape {tokens.shape} have nothing to predict")
    found: list[list[list[mx.array]]] = [[] for _ in models]
    for row in tqdm(mx.split(tokens, len(tokens)), "perplexity", unit="sequence", disable=None):
        truth = None if reference is None else _log_probabilities(reference, row)
        for i, model in enumerate(models):
            again = truth is None or model is not reference
            given = _log_probabilities(model, row) if again else cast(mx.array, truth)
            measured = [_losses(given, row)]
            if truth is not None:
                divergences = (mx.exp(truth) * (truth - given)).sum(axis=-1).flatten()
                measured += [divergences, measured[0] - _losses(truth, row)]
            mx.eval(measured)
            found[i].append(measured)
    return [_of(*(mx.concatenate([*x]) for x in zip(*parts, strict=True))) for parts in found]


def _losses(log_probabilities: mx.array, row: mx.array) -> mx.array:
    return -mx.take_along_axis(log_probabilities, row[:, 1:, None], axis=-1).flatten()


def _of(loss: mx.array, *compared: mx.array) -> Perplexity:
    value = math.exp(_number(loss.mean()))
    found = Perplexity(value, value * _error(loss), loss.size)
    if not compared:
        return found
    divergence, rise = (_number(x.mean()) for x in compared)
    return found._replace(divergence=divergence, rise=rise, rise_error=_error(compared[1]))


def _error(x: mx.array) -> float:
    """The standard error of the mean."""
    return math.sqrt(_number(mx.var(x)) / x.size)


def _number(x: mx.array) -> float:
    return float(cast(float, x.item()))


def _log_probabilities(model: Model, row: mx.array) -> mx.array:
    if getattr(model, "_integers", False):  # of a CPU, which rounds what it writes, not prompts
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(cast(Any, model))
        parts = mx.split(row[:, :-1], [*range(MOST_ROUNDED, row.shape[1] - 1, MOST_ROUNDED)], 1)
        logits = mx.concatenate([model(part, cache=cache) for part in parts], 1).astype(mx.float32)
    else:
        logits = model(row[:, :-1]).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
