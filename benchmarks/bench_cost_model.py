"""How well the cost model ranks configurations: held against what an exhaustive search measured.

    python benchmarks/bench_tuning.py --exhaustive 60 --measured FILE
    python benchmarks/bench_cost_model.py FILE

It needs no GPU but the extra ``host``: for what was measured it computes costs with the figures of
that machine, and prints how often the model ranks two configurations as the measurements do.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import Table, add_output, print_facts, write_output

from mlx_qlayers.commands.arguments import positive
from mlx_qlayers.tuning.families import FAMILIES
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import Judge, judge_of


def correlated(path: Path, machine: str, most: int) -> Table:
    """How well the cost model ranks what was measured, with a sample of so many configurations."""
    table = Table({"problem": 60, "configurations": 14, "pairs alike": 11, "rank corr.": 10})
    table.print_header()
    for content in json.loads(path.read_text())["problems"]:
        family = FAMILIES[content["family"]]
        problem = Problem(tuple(content["shape"]), mx.bfloat16, content["form"])
        judge = judge_of(family, problem, machine)
        pairs = [*_both(family, judge, content["trials"], most)]
        table.add(
            **{
                "problem": family.key(problem),
                "configurations": len(pairs),
                "pairs alike": alike(pairs),
                "rank corr.": rank_correlation(pairs),
            }
        )
    print()
    return table


def _both(
    family: Any, judge: Judge[Any], trials: Sequence[Any], most: int
) -> Iterator[tuple[float, float]]:
    """Measured and computed seconds."""
    for values, seconds in random.Random(0).sample(trials, min(most, len(trials))):
        kind = next(k for k in family.configs if set(asdict_names(k)) == set(values))
        trial = judge.attempt(kind(**values))
        if not trial.problem:
            yield seconds, trial.seconds


def asdict_names(kind: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in fields(kind)]


def alike(pairs: Sequence[tuple[float, float]], apart: float = 0.05) -> float:
    """The share of pairs that both rank alike, of those whose measurements are apart."""
    found = [
        (a[0] < b[0]) == (a[1] < b[1])
        for a, b in combinations(pairs, 2)
        if abs(a[0] - b[0]) > apart * min(a[0], b[0])
    ]
    return sum(found) / max(1, len(found))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of measured and computed seconds."""
    n = len(pairs)
    ranks = [_ranks([pair[i] for pair in pairs]) for i in (0, 1)]
    squares = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    return 1 - 6 * squares / max(1, n * (n * n - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="what bench_tuning.py --exhaustive wrote")
    parser.add_argument("--machine", default="sm_90", help="whose figures the cost model takes")
    parser.add_argument("--most", type=positive, default=100, help="configurations of a problem")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    write_output(args, "cost_model", [correlated(args.measured, args.machine, args.most)])


if __name__ == "__main__":
    main()
