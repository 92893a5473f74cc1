"""Bits for the keys and values of each layer's cache, by what they cost the layer's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..decode.quantized_caches import EIGHT_BITS, CacheFormat, quantized
from .gptq import allocated, shipped_text, windows
from .layer_stream import cached_layers

# Those that kernels of every backend read.
_WIDTHS = (2, 3, 4, 8)
_PARTS = ("keys", "values")


def _ends(text: str, samples: int, length: int) -> str:
    """The ends of a text, of which up to two samples are the first and the last tokens."""
    most = 32 * length  # letters, more than so many tokens have
    return text[:most] + text[-most:] if samples <= 2 and len(text) > 2 * most else text


def value_mixture(
    model: nn.Module,
    tokenizer: Any,
    bits_per_value: float,
    *,
    form: CacheFormat = EIGHT_BITS,
    text: str | None = None,
    samples: int = 2,
    length: int = 256,
) -> list[CacheFormat]:
    """A format for each cache of a model, which has so many bits a number in all.

    The decoder layers run one by one, once with plain keys and values and once for each number of
    bits of either. A loss is the error of a layer's output, as a share of it, token by token. Bits
    go where they take off most for their size, as in :func:`.gptq.quantize_model`.

    Args:
        model, tokenizer: converted by :func:`mlx_qlayers.convert_model`, and what came with it.
        bits_per_value: of keys and values, scales and biases included.
        form: group size and rotation.
        text: to measure with; by default the texts in ``models/data``, but for their ends.
        samples, length: sequences of it, and tokens of each.

    A ``FileNotFoundError`` says that there is no text, a ``ValueError`` that so few bits are less
    than 2 with their scales, the text is too short, or layers of such a model cannot be run one by
    one.

    Example:
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> report = convert_model(model)
        >>> formats = value_mixture(model, tokenizer, 4.5, samples=1, length=16)
        >>> sum(f.bits + f.v_bits for f in formats) / (2 * len(formats))
        4.0
    """
    from mlx_lm.models.cache import make_prompt_cache

    text = _ends(shipped_text("train") if text is None else text, samples, length)
    tokens = windows(tokenizer.encode(text), samples, length)
    losses, sizes = dict[str, dict[str, float]](), dict[str, float]()
    scale_bits, empty = 0.0, make_prompt_cache(model)
    for layer in cached_layers(model, tokens):
        for part in _PARTS if type(layer.cache).__name__ in ("KVCache", "RotatingKVCache") else ():
            found = losses[f"{layer.at}.{part}"] = {}
            for bits in _WIDTHS:
                widths = (bits, 8) if part == "keys" else (8, bits)
                cache = quantized(empty[layer.at], form.group_size, *widths, form.hadamard)
                wrong, whole = (x.astype(mx.float32) for x in (layer.run(cache), layer.output))
                shares = mx.square(wrong - whole).sum(-1) / mx.square(whole).sum(-1)
                found[str(bits)] = float(np.array(shares.mean()))
            rows = getattr(layer.cache, part)
            sizes[f"{layer.at}.{part}"] = rows.shape[1] * rows.shape[3]
            scale_bits = 2 * 8 * rows.dtype.size / form.group_size
    if not losses:
        raise ValueError("the model has no caches of keys and values")
    if not (least := _WIDTHS[0] + scale_bits) <= bits_per_value:
        raise ValueError(f"{bits_per_value} bits per value are too few: the least is {least:g}")
    chosen = allocated(losses, sizes, (bits_per_value - least) * sum(sizes.values()))
    either = [[chosen.get(f"{i}.{part}", 8) for part in _PARTS] for i in range(len(empty))]
    return [form._replace(bits=bits, v_bits=v_bits) for bits, v_bits in either]


def summary(formats: Sequence[CacheFormat]) -> str:
    """How many layers have how many bits, in a line."""
    found = []
    for name, widths in zip(_PARTS, zip(*(f[1:3] for f in formats), strict=True), strict=True):
        counts = sorted(Counter(widths).items())
        found.append(f"{name} " + ", ".join(f"{bits} bits in {n} layers" for bits, n in counts))
    return "caches: " + "; ".join(found)
