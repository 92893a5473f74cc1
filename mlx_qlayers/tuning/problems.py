"""The problems of a model: found by watching what its operations ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..dispatch.measurements import Question, questions
from ..dispatch.tunable import Problem
from ..runtime.backend import backend
from .families import FAMILIES
from .family import Family


class Target(NamedTuple):
    """A problem, and the kernel family that is tuned for it."""

    family: Family[Any, Any]
    problem: Problem

    @property
    def key(self) -> str:
        """Where its result is stored."""
        return self.problem.key


def problems_of_model(
    model: nn.Module, *, prompt: int = 512, steps: int = 2, batch: int = 1
) -> list[Target]:
    """Run one prefill and some decode steps, and collect what could be tuned.

    On a GPU nothing is evaluated, so that no kernel is built. The prefill goes without the head, of
    which mlx-lm evaluates one row alone.

    Args:
        model: a converted language model of mlx-lm.
        prompt: tokens of the prefill; 0 leaves it out.
        steps: tokens that are decoded after it.
        batch: sequences side by side.

    Returns:
        The problems of decoding, then those of the prefill, as they come up.
    """
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    body: Any = getattr(model, "model", model)
    with questions() as prefill:
        if prompt:
            body(mx.zeros((batch, prompt), mx.int32), cache=cache)
    with questions() as decoding:
        for _ in range(steps):
            model(mx.zeros((batch, 1), mx.int32), cache=cache)
    return problems_of([*decoding, *prefill])


def problems_of(asked: Iterable[Question]) -> list[Target]:
    """The problems behind questions, in their order; those that share results count as one.

    What is not configured on this backend as the family's configurations say is left out.
    """
    found: dict[str, Target] = {}
    for name, arguments in asked:
        family = FAMILIES[name]
        problem = family.problem(*arguments)
        if isinstance(problem.heuristic(backend()), problem.configs):
            found.setdefault(problem.key, Target(family, problem))
    return list(found.values())
