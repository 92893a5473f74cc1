"""Attention of a token to latent rows: one split and some, masks, heads that fill no group."""

from __future__ import annotations

from functools import partial

from mlx_qlayers.runtime.backend import backend
from tests.ops.test_latent_attention import CASES, test_against_float64

from . import Cases


def cases() -> Cases:
    for case in CASES:
        yield f"latent_attention {case}", partial(run, case)


def run(case: tuple) -> None:
    test_against_float64(case, backend())
