"""What tuning gains on this machine's GPU, how good the search is, and how good the cost model.

    python benchmarks/bench_tuning.py --tune --decode
    python benchmarks/bench_tuning.py --exhaustive 60 --json
    python benchmarks/bench_tuning.py --correlate benchmarks/results/tuning.json

``--tune`` tunes the shapes of a model of Qwen2-7B's shape with random weights, as the command
``mlx-qlayers tune`` does; ``--decode`` prints tokens a second before and after. ``--exhaustive``
measures every configuration of some problems and holds the beam against the best of all.
``--correlate`` needs no GPU but the extra ``host``: for what was measured exhaustively it computes
costs with the figures of that machine, and prints how often the model ranks two configurations as
the measurements do.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_decode import QWEN2_7B, TINY, build, decode
from common import Table, add_output, measure, print_facts, write_output

from mlx_qlayers import convert_model
from mlx_qlayers.commands.arguments import positive
from mlx_qlayers.tuning.families import FAMILIES
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import Judge, judge_of
from mlx_qlayers.tuning.lookup import heuristics_alone
from mlx_qlayers.tuning.search import Trial, beam_search
from mlx_qlayers.tuning.shapes import Target, problems_of_model
from mlx_qlayers.tuning.store import device_name
from mlx_qlayers.tuning.tune import tune_all
from mlx_qlayers.tuning.workers import processes

# Few rows at the shapes of a projection, of gate and up together, and of the head.
EXHAUSTIVE = tuple(
    Target(FAMILIES["quantized_matmul_few_rows"], Problem(shape, mx.bfloat16, "affine-64-4-t"))
    for shape in ((1, 3584, 3584), (1, 37888, 3584), (1, 152064, 3584))
)
PROMPT = list(range(64))


def tuned(model: Any, budget: float, beam: int) -> Table:
    """Tune what a model asks for; a row for each problem."""
    columns = {"heuristic us": 12, "us": 8, "gain": 6, "tried": 5, "stock us": 8, "path": 11}
    table = Table({"problem": 60, **columns})
    targets = problems_of_model(model)
    print(f"tuning {len(targets)} problems within {budget:g} s")
    table.print_header()
    start, gains = time.monotonic(), []
    for target, found in tune_all(targets, beam=beam, budget_s=budget):
        gains.append(found.heuristic / found.times["kernel"])
        table.add(
            **{
                "problem": target.key,
                "heuristic us": found.heuristic * 1e6,
                "us": found.times["kernel"] * 1e6,
                "gain": gains[-1],
                "tried": len(found.trials),
                "stock us": found.times["stock"] * 1e6,
                "path": found.path,
            }
        )
        print(f"    {found.config}")
        for trial in (trial for trial in found.trials if trial.problem):
            print(f"    {trial.config}: {trial.problem[:200]}")
    better = sum(gain >= 1.05 for gain in gains)
    print(
        f"{len(gains)} of {len(targets)} tuned in {time.monotonic() - start:.0f} s; "
        f"{better} gained 5 percent or more, the least {min(gains):.2f}x\n"
    )
    return table


def decoded(stock: Any, model: Any, tokens: int, repeats: int) -> Table:
    """Tokens a second of the stock model, and of the converted one before and after tuning."""
    table = Table({"layers": 20, "tokens/s": 16})
    table.print_header()
    with heuristics_alone():
        rates = {"stock": _rate(stock, tokens, repeats), "before": _rate(model, tokens, repeats)}
    again = copy.deepcopy(stock)
    convert_model(again)
    rates["after"] = _rate(again, tokens, repeats)
    for name, rate in rates.items():
        table.add(layers=name, **{"tokens/s": rate})
    print()
    return table


def _rate(model: Any, tokens: int, repeats: int) -> Any:
    run = measure({"": lambda: decode(model, [PROMPT], tokens)}, repeats=repeats, least=0.0)[""]
    return run.per(tokens)


def exhaustive(limit: float, path: Path) -> Table:
    """Every configuration of some problems, and the beam held against the best."""
    table = Table({"problem": 60, "all": 5, "best us": 8, "heuristic": 9, "beam": 6, "launches": 8})
    kept: dict[str, Any] = {"device": device_name(), "problems": []}
    table.print_header()
    with processes(None) as workers:
        for family, problem in EXHAUSTIVE:
            judge = judge_of(family, problem)
            heuristic = family.heuristic(problem, judge.device)
            examples = [heuristic, *family.others(problem, judge.device)]
            configs = list(dict.fromkeys(c for e in examples for c in family.all(problem, e)))
            end = time.monotonic() + limit
            some = judge.attempts(configs)
            if workers is not None:
                some = workers.attempts(family, problem, configs)
            trials = {}
            for trial in some:
                trials[trial.config] = trial
                if time.monotonic() > end:
                    print(f"only {len(trials)} of {len(configs)} within {limit:g} s")
                    break
            best = min(trial.seconds for trial in trials.values())
            found = _searched(family, problem, judge, trials)
            table.add(
                **{
                    "problem": family.key(problem),
                    "all": len(trials),
                    "best us": best * 1e6,
                    "heuristic": trials[heuristic].seconds / best,
                    "beam": found[0].seconds / best,
                    "launches": len(found) / len(trials),
                }
            )
            kept["problems"].append(_written(family.name, problem, trials.values()))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept) + "\n")
    print(f"\nwrote {path}\n")
    return table


def _searched(
    family: Any, problem: Problem, judge: Judge[Any], known: dict[Any, Trial[Any]]
) -> list[Trial[Any]]:
    """The trials of a beam search that looks times up among those that are known."""
    return beam_search(
        [],
        [family.heuristic(problem, judge.device), *family.others(problem, judge.device)],
        lambda config: family.near(config, problem),
        lambda configs: [known[config] for config in configs if config in known],
    )


def _written(family: str, problem: Problem, trials: Any) -> dict[str, Any]:
    return {
        "family": family,
        "shape": problem.shape,
        "form": problem.form,
        "trials": [[asdict(t.config), t.seconds] for t in trials if not t.problem],
    }


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
    for fields, seconds in random.Random(0).sample(trials, min(most, len(trials))):
        kind = next(k for k in family.configs if set(asdict_names(k)) == set(fields))
        trial = judge.attempt(kind(**fields))
        if not trial.problem:
            yield seconds, trial.seconds


def asdict_names(kind: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return list(kind.__dataclass_fields__)


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
    results = Path(__file__).parent / "results" / "tuning.json"
    parser.add_argument("--tune", action="store_true", help="tune a model's shapes")
    parser.add_argument("--decode", action="store_true", help="decode before and after")
    parser.add_argument("--budget", type=positive, default=120, help="seconds to tune")
    parser.add_argument("--beam", type=positive, default=4, help="configurations to follow")
    parser.add_argument("--tokens", type=positive, default=48, help="to decode at a time")
    parser.add_argument("--repeats", type=positive, default=5, help="measurements of decoding")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out")
    parser.add_argument("--exhaustive", type=float, metavar="S", help="S seconds a problem")
    parser.add_argument("--measured", type=Path, default=results, help="where that is written")
    parser.add_argument("--correlate", type=Path, metavar="FILE", help="what was written")
    parser.add_argument("--machine", default="sm_90", help="whose figures the cost model takes")
    parser.add_argument("--most", type=positive, default=100, help="configurations to correlate")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    tables = []
    if args.tune or args.decode:
        stock = build(TINY if args.tiny else QWEN2_7B, 64, 4)
        model = copy.deepcopy(stock)  # the arrays are shared
        convert_model(model)
        if args.tune:
            tables.append(tuned(model, args.budget, args.beam))
        if args.decode:
            tables.append(decoded(stock, model, args.tokens, args.repeats))
    if args.exhaustive:
        tables.append(exhaustive(args.exhaustive, args.measured))
    if args.correlate:
        tables.append(correlated(args.correlate, args.machine, args.most))
    write_output(args, "tuning", tables)


if __name__ == "__main__":
    main()
