"""The gain of tuning on this machine's GPU.

    python benchmarks/bench_tuning.py --tune --decode --csv
    python benchmarks/bench_tuning.py --tune --ship mlx_qlayers/measurements/data

``--tune`` tunes the shapes of a model of Qwen2-7B's shape with random weights, as the command
``mlx-qlayers tune`` does, and ``--ship`` adds what it found to the package's; ``--decode`` prints
tokens a second before and after.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common import Table, arguments, output, positive
from harness import in_turns

from mlx_qlayers import convert_model
from mlx_qlayers.dispatch.measurements import untuned
from mlx_qlayers.measurements.entries import device_name
from mlx_qlayers.measurements.store import listed, save
from mlx_qlayers.tuning.evaluator import IN_ORDER
from mlx_qlayers.tuning.model_records import records_of_model
from mlx_qlayers.tuning.tune import tune_all

# One token: longer prompts would need kernels of their own.
PROMPT = [1]


def tuned(model: Any, args: argparse.Namespace) -> None:
    """Tune what a model asks for; a row for each problem."""
    targets = records_of_model(model, prompt=args.prompt_tokens)
    print(f"tuning {len(targets)} problems within {args.budget:g} s; microseconds")
    start, gains = time.monotonic(), []
    table = Table()
    for found in tune_all(targets, beam=args.beam, budget_s=args.budget):
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
        for trial in (trial for trial in found.trials if trial.problem):
            print(f"    {trial.config}: {trial.problem[:200]}", flush=True)
    if gains:
        better = sum(gain >= 1.05 for gain in gains)
        print(
            f"{len(gains)} of {len(targets)} tuned in {time.monotonic() - start:.0f} s; "
            f"{better} gained 5 percent or more, the least {min(gains):.2f}x\n",
            flush=True,
        )


def decoded(stock: Any, model: Any, tokens: int, repeats: int) -> None:
    """Tokens a second of the stock model, and of the converted one before and after tuning."""
    from decoding_model import decode

    again = copy.deepcopy(stock)
    convert_model(again, verify=False)

    def run(each: tuple[Any, Any]) -> float:
        with each[1]():
            return decode(each[0], [PROMPT], tokens)

    kinds = {"stock": (stock, untuned), "before": (model, untuned)}
    table = Table()
    for name, taken in in_turns(kinds | {"after": (again, nullcontext)}, repeats, run).items():
        table.add(layers=name, **{"tokens/s": taken.per(tokens)})
    print()


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--tune", action="store_true", help="tune a model's shapes")
    parser.add_argument("--decode", action="store_true", help="decode before and after")
    parser.add_argument("--budget", type=positive, default=120, help="seconds to tune")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prefill; 0 for none")
    parser.add_argument("--beam", type=positive, default=4, help="configurations to follow")
    parser.add_argument("--tokens", type=positive, default=64, help="to decode at a time")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out")
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


if __name__ == "__main__":
    main()
