"""How many Python functions a call goes through, which is what it costs before a kernel runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import mlx.core as mx


def python_calls(function: Callable[[], object]) -> int:
    """Those of one call whose plan is known, without that of ``function`` itself."""
    for _ in range(2):
        mx.eval(function())
    calls = -1

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
