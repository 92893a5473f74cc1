"""Ctrl-C at any line while a step becomes a graph, asked of the public surface."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from converted import PLAIN
from interrupts import interrupted
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model
from step_models import models_of

import mlx_qlayers
from mlx_qlayers import QLinear
from tests.decode.test_step_faults import TOKENS, decoded

FILES = {str(path) for path in Path(mlx_qlayers.__file__).parent.rglob("*.py")}


def _functions() -> list[dict[str, Any]]:
    spaces = mx, mx.fast, mx.random, np, nn.QuantizedLinear, QLinear
    return [{n: f for n, f in vars(space).items() if callable(f)} for space in spaces]


def test_an_interrupt_at_any_time_leaves_all_as_it_was(compiled_steps):
    """Functions of MLX and NumPy, the model and the cache; the next token is the right one."""
    stock, model = models_of("qwen2", PLAIN)
    cache, functions = make_prompt_cache(stock), _functions()
    stock(TOKENS[:, :3], cache=cache)
    expected = decoded(stock, cache, 3, 7)
    parameters = [(name, id(a)) for name, a in tree_flatten(model.parameters())]
    at, goes_on = 1, True
    while goes_on:
        model.train(not model.training)  # a graph is made anew
        cache = make_prompt_cache(model)
        model(TOKENS[:, :3], cache=cache)
        goes_on = interrupted(partial(decoded, model, cache, 3, 5), at, FILES)
        pairs = zip(_functions(), functions, strict=True)
        changed = {name for now, then in pairs for name in then if now[name] is not then[name]}
        assert not changed, (changed, at)
        assert [(name, id(a)) for name, a in tree_flatten(model.parameters())] == parameters
        begin = cache[0].offset
        found = decoded(model, cache, begin, 7)
        assert_same_model(found, expected[begin - 3 :], bits=None, what=f"line {at}")
        at += 1 + at // 4
    assert at > 10_000, "steps are no graphs any more"
