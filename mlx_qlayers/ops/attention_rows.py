"""Attention of few tokens to the rows of a buffer that count, by one plan for all counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan
from ..dispatch.measurements import configure
from ..metal.attention import decode
from .attention import attention, choose_decode
from .attention_checks import checked
from .attention_choice import takes_decode


def _plan(arrays: Sequence[Any], scale: float, causal: bool) -> Plan:
    """Of q, k and v with R rows, None, sinks and held (1,) int32: how many of the R rows count.

    A slice of these rows would be another call with another plan for each count.
    """
    *most, held = arrays
    if held.shape != (1,) or held.dtype != mx.int32:
        raise ValueError(f"held must be int32 (1,), not {held.dtype} {held.shape}")
    rule = "causal" if causal else None
    call = checked(most, (0, 0), scale, rule, None, None)

    def composed(q: Any, k: Any, v: Any, mask: None, sinks: Any, held: mx.array) -> list[mx.array]:
        k, v = (each[:, :, : held.item()] for each in (k, v))
        return [attention(q, k, v, scale=scale, mask=rule, sinks=sinks)]

    if len({*call.dtypes}) > 1 or not takes_decode(call):
        return Plan(None, composed)
    choice = choose_decode(call)
    if choice.path != "host":  # whose kernel takes a count
        return Plan(None, composed)
    config = configure("attention_decode", choice.path, *decode.key_of(call))
    return Plan(choice, decode.attention_decode(call, config, counted=True), reference=composed)


ATTENTION_ROWS = Operation("attention", _plan)
