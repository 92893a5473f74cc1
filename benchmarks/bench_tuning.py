"""The gain of tuning on this machine's GPU, and the quality of the search.

    python benchmarks/bench_tuning.py --tune --decode --csv
    python benchmarks/bench_tuning.py --tune --ship mlx_qlayers/measurements/data
    python benchmarks/bench_tuning.py --exhaustive 60

``--tune`` tunes the shapes of a model of Qwen2-7B's shape with random weights, as the command
``mlx-qlayers tune`` does, and ``--ship`` adds what it found to the package's; ``--decode`` prints
tokens a second before and after. ``--exhaustive`` measures every configuration of some problems,
has the beam search what was measured, then measures its finalists and the best of all once more
side by side: what the tuner takes of its finalists is compared with the fastest of all. Files are
written anew with every row.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import Sample, Table, arguments, output, positive
from harness import in_turns

from mlx_qlayers import backend, convert_model
from mlx_qlayers.dispatch.measurements import untuned
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.entries import device_name
from mlx_qlayers.measurements.store import listed, save
from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
from mlx_qlayers.metal.record import Record
from mlx_qlayers.tuning.evaluator import IN_ORDER, Evaluator
from mlx_qlayers.tuning.problems import problems_of_model
from mlx_qlayers.tuning.search import Trial, beam_search
from mlx_qlayers.tuning.tune import NOISE, fastest, finalists, tune_all

# The outputs of attention and of the MLP, which share kernels, and the head. All take one row.
EXHAUSTIVE = tuple(
    QmvRecord(1, n, k, mx.bfloat16, Format(64, 4), kind)
    for n, k, kind in ((3584, 3584, "residual"), (3584, 18944, "residual"), (152064, 3584, ""))
)
# Of all that was measured, so many are measured again beside the beam's finalists: what looked best
# once is often what chance favoured.
_BEST = 8
# One token: longer prompts would need kernels of their own.
PROMPT = [1]


def tuned(model: Any, args: argparse.Namespace) -> None:
    """Tune what a model asks for; a row for each problem."""
    targets = problems_of_model(model, prompt=args.prompt_tokens)
    print(f"tuning {len(targets)} problems within {args.budget:g} s; microseconds")
    start, gains = time.monotonic(), []
    columns = {"heuristic": 12, "tuned": 12, "gain": 6, "tried": 5, "stock": 12, "path": 11}
    table = Table({"problem": 60, **columns, "warm": 12, "warm heuristic": 14})
    shown = partial(_shown, start) if args.verbose else lambda record, gain: None
    for found in tune_all(targets, beam=args.beam, budget_s=args.budget, progress=shown):
        times = found.times.get("kernel", found.untuned)
        gains.append(found.heuristic / times.cold.median)
        table.add(
            **{
                "problem": found.record.key,
                "heuristic": found.untuned.cold.scaled(1e6),
                "tuned": times.cold.scaled(1e6),
                "gain": gains[-1],
                "tried": len(found.trials),
                "stock": found.times.get("stock", times).cold.scaled(1e6),
                "path": found.path,
                "warm": times.warm.scaled(1e6),
                "warm heuristic": found.untuned.warm.scaled(1e6),
                "config": str(found.config),
            }
        )
        print(f"    {time.monotonic() - start:.0f} s: {found.config}", flush=True)
        for trial in (trial for trial in found.trials if trial.problem):
            print(f"    {trial.config}: {trial.problem[:200]}", flush=True)
    if gains:
        better = sum(gain >= 1.05 for gain in gains)
        print(
            f"{len(gains)} of {len(targets)} tuned in {time.monotonic() - start:.0f} s; "
            f"{better} gained 5 percent or more, the least {min(gains):.2f}x\n",
            flush=True,
        )


def _shown(start: float, record: Record, gain: float) -> None:
    print(f"    {time.monotonic() - start:.1f} s: {record.key}: {gain:.2f}x", flush=True)


def decoded(stock: Any, model: Any, tokens: int, repeats: int) -> None:
    """Tokens a second of the stock model, and of the converted one before and after tuning."""
    from decoding_model import decode

    again = copy.deepcopy(stock)
    convert_model(again, verify=False)

    def run(each: tuple[Any, Any]) -> float:
        with each[1]():
            return decode(each[0], [PROMPT], tokens)

    kinds = {"stock": (stock, untuned), "before": (model, untuned)}
    table = Table({"layers": 20, "tokens/s": 16})
    for name, values in in_turns(kinds | {"after": (again, nullcontext)}, repeats, run).items():
        table.add(layers=name, **{"tokens/s": Sample.of(values).per(tokens)})
    print()


def exhaustive(limit: float, beam: int) -> None:
    """Every configuration of some problems, and the beam held against the best."""
    first = EXHAUSTIVE[0]
    heuristic = first.heuristic(backend())
    configs = first.all(heuristic)
    random.Random(0).shuffle(configs)
    configs = list(dict.fromkeys([heuristic, *configs]))
    evaluators = [Evaluator(record) for record in EXHAUSTIVE]
    found: list[dict[Any, Trial[Any]]] = [{} for _ in EXHAUSTIVE]
    end = time.monotonic() + limit
    for config in configs:  # of the problems, which share kernels, one after the other
        for evaluator, trials in zip(evaluators, found, strict=True):
            if time.monotonic() < end and not evaluator.lost:
                trials[config] = evaluator.attempt(config)
                if problem := trials[config].problem:
                    print(f"    {config}: {problem[:200]}", flush=True)
    print(f"measured {[len(trials) for trials in found]} of {len(configs)}; microseconds")
    columns = {"heuristic": 12, "best": 12, "beam": 12, "heuristic/best": 14, "beam/best": 9}
    table = Table({"problem": 60, "all": 5, **columns, "tried": 5, "launches": 8})
    for evaluator, trials in zip(evaluators, found, strict=True):
        _compared(table, evaluator, trials, beam)


def _compared(
    table: Table, evaluator: Evaluator[Any], known: dict[Any, Trial[Any]], beam: int
) -> None:
    """A row: what the tuner would take if it found what is known, beside the best of that.

    Its finalists and the best of all are measured once more, side by side.
    """
    record = evaluator.record
    heuristic = record.heuristic(backend())
    asked: list[Any] = []

    def attempt(config: Any) -> Trial[Any] | None:
        asked.append(config)
        return known.get(config)

    trials = beam_search(
        [],
        [heuristic, *record.starts(backend())[1:]],
        record.near,
        attempt,
        width=beam,
        noise=max(NOISE, evaluator.noise),
    )
    last = finalists(heuristic, trials)
    best = sorted(known.values(), key=lambda trial: trial.seconds)[:_BEST]
    configs = list(dict.fromkeys([*last, *(trial.config for trial in best)]))
    times, _ = evaluator.compared(configs, paths=False)
    untuned, taken = times[0].cold, times[fastest(times[: len(last)])].cold
    least = min((found.cold for found in times), key=lambda sample: sample.median)
    table.add(
        **{
            "problem": record.key,
            "all": len(known),
            "heuristic": untuned.scaled(1e6),
            "best": least.scaled(1e6),
            "beam": taken.scaled(1e6),
            "heuristic/best": untuned.median / least.median,
            "beam/best": taken.median / least.median,
            "tried": len(asked),
            "launches": len(asked) / max(1, len(known)),
        }
    )
    for config, found in zip(configs, times, strict=True):
        print(f"    {config}: cold {found.cold.scaled(1e6)}, warm {found.warm.scaled(1e6)}")


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--tune", action="store_true", help="tune a model's shapes")
    parser.add_argument("--decode", action="store_true", help="decode before and after")
    parser.add_argument("--budget", type=positive, default=120, help="seconds to tune")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prefill; 0 for none")
    parser.add_argument("--beam", type=positive, default=4, help="configurations to follow")
    parser.add_argument("--tokens", type=positive, default=64, help="to decode at a time")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out")
    parser.add_argument("--exhaustive", type=float, metavar="S", help="seconds to measure all")
    parser.add_argument("--verbose", action="store_true", help="print a line for each trial")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="add what was found there")
    args = parser.parse_args()
    if not args.decode:  # which graphs make faster; MLX reads this when it first uses a GPU
        os.environ.update(IN_ORDER)
    with output(args, "tuning"):
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure everything that the arguments ask for."""
    from decoding_model import QWEN2_7B, TINY, build

    if args.tune or args.decode:
        stock = build(TINY if args.tiny else QWEN2_7B, 64, 4)
        model = copy.deepcopy(stock)  # the arrays are shared
        convert_model(model, verify=False)
        if args.tune:
            tuned(model, args)
        if args.ship is not None:
            save(device_name(), listed(device_name()).get(device_name(), {}), args.ship)
        if args.decode:
            decoded(stock, model, args.tokens, args.repeats)
    if args.exhaustive:
        exhaustive(args.exhaustive, args.beam)


if __name__ == "__main__":
    main()
