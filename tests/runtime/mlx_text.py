"""MLX's own record of a custom kernel: the text that ours must equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx


class Recorded(NamedTuple):
    """One kernel call as ``mx.export_function`` tells of it."""

    function: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shape_words: list[tuple[bool, bool, bool]]
    ensure_row_contiguous: bool


def record(call: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array]) -> Recorded:
    """Export a function that launches one custom kernel."""
    said: list[dict[str, Any]] = []
    mx.export_function(said.append, call, *inputs)
    (made,) = (each["arguments"] for each in said if each.get("name") == "CustomKernel")
    return Recorded(made[0], made[1], tuple(made[2:5]), tuple(made[5:8]), made[8], made[9])
