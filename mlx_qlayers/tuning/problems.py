"""The problems that a model really has: found by watching what its launchers ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .families import FAMILIES
from .family import Family, Problem
from .lookup import Question, questions


class Target(NamedTuple):
    """A problem and the kernel family that it belongs to."""

    family: Family[Any]
    problem: Problem

    @property
    def key(self) -> str:
        """Where its result is stored."""
        return self.family.key(self.problem)


def problems_of_model(
    model: nn.Module, *, prompt: int = 512, steps: int = 2, batch: int = 1
) -> list[Target]:
    """Trace one prefill and some decode steps, and collect what could be tuned.

    Launches are asked for and never evaluated, so that no kernel is built. The prefill goes without
    the head, of which mlx-lm evaluates one row alone.

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
    found: list[dict[str, Target]] = []
    body: Any = getattr(model, "model", model)
    for run, lengths in ((body, [prompt] * (prompt > 0)), (model, [1] * steps)):
        with questions() as asked:
            for length in lengths:
                run(mx.zeros((batch, length), mx.int32), cache=cache)
        found.insert(0, {problem.key: problem for problem in problems_of(asked)})
    return list({**found[0], **found[1]}.values())


def problems_of(asked: Iterable[Question]) -> list[Target]:
    """The problems behind questions, in their order; those of one bucket count as one."""
    found: dict[str, Target] = {}
    for problem in _problems(asked):
        found.setdefault(problem.key, problem)
    return list(found.values())


def _problems(asked: Iterable[Question]) -> Iterator[Target]:
    for name, arguments in asked:
        family = FAMILIES[name]
        yield Target(family, family.asked(*arguments))
