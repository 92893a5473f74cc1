"""Bounds of numbers by their names: of command lines, of lora's file and of requests."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

_ENDS = (2**31 - 1, 2**63 - 1, 2**64 - 1)
_MOST = _ENDS[0]  # MLX counts rows and tokens in 32 bits
_LONGEST = 40  # characters of a value in a message


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``, and those of ``also``."""

    low: float
    high: float
    also: tuple[float, ...] = ()
    whole: bool = True

    def __str__(self) -> str:
        ends = [f"2**{int(x).bit_length()} - 1" if x in _ENDS else f"{x:g}" for x in self[:2]]
        span = f"{'a whole number' if self.whole else 'a number'} from {ends[0]} to {ends[1]}"
        return " or ".join([*[span] * (self.low <= self.high), *map(str, self.also)])


def _whole(low: int = 1, high: int = _MOST, *also: int) -> Range:
    return Range(low, high, also)


def _real(low: float, high: float, *also: float) -> Range:
    return Range(low, high, also, whole=False)


def _one_of(*values: int) -> Range:
    return Range(1, 0, values)


# In float32, which samplers compute in, no quotient of these overflows, and no share vanishes.
_PENALTY, COUNT = _real(-1e4, 1e4), _whole()
RANGES = {
    name: allowed
    for allowed, names in {
        COUNT: "grad_accumulation_steps iters max_completion_tokens max_tokens min_tokens_to_keep "
        "prefill_step_size save_every steps_per_eval steps_per_report",
        _whole(0): "frequency_context_size layer presence_context_size quantized_kv_start "
        "repetition_context_size top_k",
        _whole(0, 11, -1): "top_logprobs",
        _whole(0, 2**10): "num_draft_tokens",
        _whole(0, 2**16 - 1): "port",
        _whole(0, 2**16): "prompt_cache_size",
        _whole(0, _MOST, -1): "num_layers val_batches",
        _whole(0, _ENDS[1]): "clear_cache_threshold prompt_cache_bytes",
        _whole(0, _ENDS[2]): "seed",
        _whole(1, 8): "bits",
        _whole(1, 2**10): "beam group_size",
        _whole(1, 2**12): "decode_concurrency prompt_concurrency",
        _whole(1, 2**16): "batch batch_size rank",
        _whole(1, 2**20): "prompt_tokens samples",
        _whole(1, 10**7): "budget",
        _whole(1, _MOST, -1): "test_batches",
        _whole(2): "max_seq_length",
        _whole(2, 2**20): "sequence_length",
        _whole(5): "max_kv_size",  # a window keeps its first four tokens
        _one_of(2, 3, 4, 5, 6, 8): "kv_bits",
        _one_of(8, 32): "optimizer_bits",
        _one_of(32, 64, 128): "kv_group_size",
        _PENALTY: "frequency_penalty presence_penalty",
        _real(1e-30, 100): "learning_rate",
        _real(1e-8, 100): "damping",
        _real(1e-6, 1, 0): "top_p",
        _real(1e-5, 1e5, 0): "temp temperature",
        _real(1e-4, 1e4, 0): "repetition_penalty",
        _real(0, 0.5): "xtc_threshold",
        _real(0, 0.999): "dropout",
        _real(0, 1): "min_p xtc_probability",
        _real(1, 16): "bits_per_weight",
        _real(2, 16): "kv_bits_per_value",
        _real(-1e6, 1e6): "scale",
    }.items()
    for name in names.split()
}


def check_number(name: str, value: Any, allowed: Range | None = None) -> None:
    """Raise a ``ValueError`` unless ``value`` is a number within the range of its name."""
    if (allowed := allowed or RANGES.get(name)) is None:
        return
    number = not isinstance(value, bool) and isinstance(
        value, int if allowed.whole else int | float
    )
    # Comparisons take whole numbers of any size, and with NaN they are false.
    if not number or not (allowed.low <= value <= allowed.high or value in allowed.also):
        raise ValueError(f"must be {allowed}, not {shown(value)}")


def shown(value: Any) -> str:
    """A value in a message, however long it is."""
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return f"one of {int(math.log10(abs(value))) + 1} digits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
