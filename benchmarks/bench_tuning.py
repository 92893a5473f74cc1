"""The gain of tuning on this machine's GPU.

    python benchmarks/bench_tuning.py --tune --decode --csv
    python benchmarks/bench_tuning.py --tune --ship mlx_qlayers/measurements/data

``--tune`` tunes the shapes of a model of Qwen2-7B's shape with random weights, as the command
``mlx-qlayers tune`` does (``--only qmm``: products of prompts alone), and ``--ship`` adds what it
found to the package's; ``--decode`` prints tokens a second before and after.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common import Table, arguments, output
from harness import in_turns

from mlx_qlayers import convert_model
from mlx_qlayers.dispatch.measurements import untuned
from mlx_qlayers.measurements.entries import device_name
from mlx_qlayers.measurements.store import listed, save
from mlx_qlayers.tuning.evaluator import IN_ORDER
from mlx_qlayers.tuning.model_records import records_of_model
from mlx_qlayers.tuning.tune import tune_all

# Tokens of the prefill that is tuned, seconds to tune, and configurations to follow.
PROMPT_TOKENS, BUDGET, BEAM = 512, 120, 4
# Tokens to decode at a time, behind one: longer prompts would need kernels of their own.
TOKENS = 64


def tuned(model: Any, only: str) -> None:
    """Tune what a model asks for; a row for each problem, in microseconds."""
    targets = [r for r in records_of_model(model, prompt=PROMPT_TOKENS) if r.key.startswith(only)]
    table = Table()
    print(f"tuning {len(targets)} problems within {BUDGET} s")
    for found in tune_all(targets, beam=BEAM, budget_s=BUDGET):
        times = found.times.get("kernel", found.untuned)
        row = {"heuristic": found.untuned.cold.scaled(1e6), "tuned": times.cold.scaled(1e6)}
        row |= {"gain": found.heuristic / times.cold.median, "tried": len(found.trials)}
        row |= {"stock": found.times.get("stock", times).cold.scaled(1e6), "path": found.path}
        table.add(problem=found.record.key, **row, config=str(found.config))
    print()


def decoded(stock: Any, model: Any, repeats: int) -> None:
    """Tokens a second of the stock model, and of the converted one before and after tuning."""
    from decoding_model import decode

    again = copy.deepcopy(stock)
    convert_model(again, verify=False)

    def run(each: tuple[Any, Any]) -> float:
        with each[1]():
            return decode(each[0], [[1]], TOKENS)

    kinds, table = {"stock": (stock, untuned), "before": (model, untuned)}, Table()
    for name, taken in in_turns(kinds | {"after": (again, nullcontext)}, repeats, run).items():
        table.add(layers=name, **{"tokens/s": taken.per(TOKENS)})
    print()


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--tune", action="store_true", help="tune a model's shapes")
    parser.add_argument("--only", default="", help="how the problems begin that are tuned")
    parser.add_argument("--decode", action="store_true", help="decode before and after")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try it out")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="add what was found there")
    args = parser.parse_args()
    os.environ.update({} if args.decode else IN_ORDER)  # before MLX first uses a GPU
    from decoding_model import QWEN2_7B, TINY, build

    with output(args, "tuning"):
        stock = build(TINY if args.tiny else QWEN2_7B, 64, 4)
        model = copy.deepcopy(stock)  # the arrays are shared
        convert_model(model, verify=False)
        if args.tune:
            tuned(model, args.only)
        if args.ship:
            save(device_name(), listed(device_name()).get(device_name(), {}), args.ship)
        if args.decode:
            decoded(stock, model, args.repeats)


if __name__ == "__main__":
    main()
