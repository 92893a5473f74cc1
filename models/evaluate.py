"""Validation: the likelihood of a held-out stream, as perplexity per token and bits per byte."""

import math
from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np
from corpus import windows
from numpy.typing import NDArray


def total_loss(
    losses: Callable[[mx.array], mx.array],
    stream: NDArray[np.int32],
    length: int,
    stride: int,
    rows: int = 32,
) -> float:
    """Return the negative log likelihood, in nats, of all tokens of a stream but the first.

    Args:
        losses: Maps token ids of shape (B, L + 1) to losses of shape (B, L).
        stream: Token ids.
        length: The most tokens that the model is given at once, L.
        stride: The distance between windows; less than `length` gives every token more context.
        rows: The number of windows B evaluated at a time.
    """
    cut = list(windows(stream, length, stride))
    cut += [(stream[:2], 0)] * (-len(cut) % rows)
    tokens = np.zeros((len(cut), length + 1), dtype=np.int32)
    scored = np.zeros((len(cut), length), dtype=np.float32)
    for i, (window, count) in enumerate(cut):
        tokens[i, : len(window)] = window
        scored[i, len(window) - 1 - count : len(window) - 1] = 1
    total = 0.0
    for i in range(0, len(cut), rows):
        loss = losses(mx.array(tokens[i : i + rows])) * mx.array(scored[i : i + rows])
        total += loss.sum().item()
    return total


def score(bits_per_byte: Mapping[str, float]) -> float:
    """Return the one number that models are compared by, whatever mixture they were trained on."""
    return 0.6 * bits_per_byte["tales"] + 0.4 * bits_per_byte["plays"]


def figures(nats: float, tokens: int, size: int) -> dict[str, float]:
    """Return perplexity per token and bits per byte of a text of so many tokens and bytes."""
    return {
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / size,
    }
