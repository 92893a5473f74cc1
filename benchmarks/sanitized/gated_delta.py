"""The gated delta rule: gates of heads and of columns, masks, rows that fill no threadgroup."""

from __future__ import annotations

from functools import partial

from mlx_qlayers.runtime.backend import backend
from tests.ops.test_gated_delta import CASES, test_against_float64

from . import Cases


def cases() -> Cases:
    for case in CASES:
        yield f"gated_delta {case}", partial(run, case)


def run(case: tuple) -> None:
    test_against_float64(case, backend())
