"""The problems that a model really has: found by watching it run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..runtime.backend import prefer_kernels
from ..runtime.tracing import Record, trace
from .families import FAMILIES
from .family import Family, Problem

Found = tuple[Family[Any], Problem, int]


def problems_of_model(
    model: nn.Module, *, prompt: int = 512, steps: int = 2, batches: Sequence[int] = (1,)
) -> list[Found]:
    """Run one prefill and some decode steps, and collect what was launched.

    Args:
        model: a converted language model of mlx-lm.
        prompt: tokens of the prefill.
        steps: tokens that are decoded after it.
        batches: batch sizes.

    Returns:
        Each problem with its family and how often it came up, the most frequent first.
    """
    from mlx_lm.models.cache import make_prompt_cache

    with prefer_kernels(), trace() as launches:
        for batch in batches:
            cache = make_prompt_cache(model)
            for length in (prompt, *[1] * steps):
                mx.eval(model(mx.zeros((batch, length), mx.int32), cache=cache))
    return problems_of(launches)


def problems_of(launches: Iterable[Record]) -> list[Found]:
    """The problems behind some launches, the most frequent first."""
    counts: Counter[tuple[str, Problem]] = Counter()
    for record in launches:
        for family in FAMILIES.values():
            if record.kernel in {kernel.name for kernel in family.kernels}:
                counts[family.name, family.problem(record)] += 1
    return [(FAMILIES[name], problem, n) for (name, problem), n in counts.most_common()]
