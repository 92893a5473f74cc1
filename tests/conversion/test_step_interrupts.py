"""Ctrl-C at any line while a step becomes a graph, asked of the public surface."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from converted import PLAIN
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model
from step_models import models_of

from mlx_qlayers import QLinear
from tests.conversion.test_step_faults import TOKENS, decoded


class _Lines:
    """Counts lines of this package that are run, and raises KeyboardInterrupt at one of them.

    Attributes:
        replaced: at which of them a function of MLX or NumPy was not its own.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.before, self.replaced = at, _functions(), list[bool]()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if "/mlx_qlayers/" not in name and not name.endswith("contextlib.py"):
            return None
        if event == "line":
            self.replaced.append(_functions() != self.before if not self.at else False)
            if len(self.replaced) == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def _functions() -> list[dict[str, Any]]:
    spaces = mx, mx.fast, mx.random, np, nn.QuantizedLinear, QLinear
    return [{n: f for n, f in vars(space).items() if callable(f)} for space in spaces]


def test_an_interrupt_at_any_time_leaves_all_as_it_was(compiled_steps: None) -> None:
    """Functions of MLX and NumPy, the model and the cache; the next token is the right one."""
    stock, model = models_of("qwen2", PLAIN)
    cache, functions = make_prompt_cache(stock), _functions()
    stock(TOKENS[:, :3], cache=cache)
    expected = decoded(stock, cache, 3, 7)
    parameters = [(name, id(a)) for name, a in tree_flatten(model.parameters())]

    def interrupted(lines: _Lines) -> None:
        model.train(not model.training)  # a graph is made anew
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        try:
            sys.settrace(lines)
            decoded(model, cache, 3, 5)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        now = _functions()
        changed = {n for a, b in zip(now, functions, strict=True) for n in b if a[n] is not b[n]}
        assert not changed, (changed, lines.at)
        assert [(name, id(a)) for name, a in tree_flatten(model.parameters())] == parameters
        begin = cache[0].offset
        found = decoded(model, cache, begin, 7)
        assert_same_model(found, expected[begin - 3 :], bits=None, what=f"line {lines.at}")

    for _ in range(3):  # at first more is made
        interrupted(lines := _Lines())
    count, replaced = len(lines.replaced), lines.replaced
    ends = [i for i in range(1, count) if replaced[i] != replaced[i - 1]]
    points = {i + more for i in ends for more in range(-18, 3, 3)}
    points |= {*range(1, count, max(1, count // 8))}
    for at in sorted(points):
        interrupted(lines := _Lines(at))
        assert len(lines.replaced) > 0.9 * at, "steps are no graphs any more"
