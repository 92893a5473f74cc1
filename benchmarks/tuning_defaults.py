"""What the cost model says of Apple's GPUs: the results that come with the package, and a forecast.

    python benchmarks/tuning_defaults.py --write
    python benchmarks/tuning_defaults.py

Both need the extra ``host`` and no GPU. ``--write`` searches the configurations of the kernels that
decode a 4-bit model of Qwen2-7B's shape, for every Apple GPU in ``tuning/machines.py``, and writes
``mlx_qlayers/tuning/results``; to be run again whenever one of the kernels changes. Without it, the
time of a token is forecast from those results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from common import Table

from mlx_qlayers.formats import Format
from mlx_qlayers.tuning import store
from mlx_qlayers.tuning.families import FAMILIES
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import judge_of
from mlx_qlayers.tuning.machines import MACHINES
from mlx_qlayers.tuning.tune import tune

RESULTS = Path(store.__file__).with_name("results")
LAYERS, KEYS = 28, 1024
# Launches of a layer that are not modelled: two rotations and two writes to the cache.
OTHERS = 4


def _few(n: int, k: int, kind: str) -> tuple[str, Problem]:
    family = FAMILIES["qmv"]
    return family.name, family.asked(1, n, k, mx.bfloat16, Format(64, 4), kind)


# By part of the model: the kernel's family, the problem, and how often a token needs it.
PARTS = {
    "q, k, v": (*_few(4608, 3584, "norm-3"), LAYERS),
    "o": (*_few(3584, 3584, "residual"), LAYERS),
    "gate, up": (*_few(37888, 3584, "norm-gate"), LAYERS),
    "down": (*_few(3584, 18944, "residual"), LAYERS),
    "head": (*_few(152064, 3584, ""), 1),
    "attention": (
        "attention_decode",
        Problem((4, 7, KEYS, 128, 128), mx.bfloat16, "bits-0"),
        LAYERS,
    ),
}
# What has to be read for a token at least, in bytes: weights of 4.5 bits, keys and values.
READ = 7.07e9 * 4.5 / 8 + LAYERS * KEYS * 4 * 2 * 128 * 2
APPLE = [name for name in MACHINES if name.startswith("applegpu")]


def write(beam: int, parts: list[str]) -> None:
    """Search for every Apple GPU, and put the results of some parts into the package."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLX_QLAYERS_CACHE_DIR"] = folder
        if RESULTS.is_dir():
            shutil.copytree(RESULTS, Path(folder, "tuning"))
        store.forget()
        for part in parts:
            family, problem, _ = PARTS[part]
            for name in APPLE:
                start = time.monotonic()
                found = tune(FAMILIES[family], problem, machine=name, beam=beam, budget_s=600)
                took = time.monotonic() - start
                tried = len(found.trials)
                print(f"{part} {name}: {found.gain:.2f}x of {tried}, {took:.0f} s", flush=True)
                print(f"    {found.config}", flush=True)
        found, locks = Path(folder, "tuning"), shutil.ignore_patterns("*.lock")
        shutil.copytree(found, RESULTS, ignore=locks, dirs_exist_ok=True)
    del os.environ["MLX_QLAYERS_CACHE_DIR"]
    store.forget()


def forecast() -> Table:
    """Milliseconds of a token by its parts, with the configurations that are stored."""
    columns = dict.fromkeys((*PARTS, "rest"), 9)
    table = Table({"GPU": 9, **columns, "ms": 7, "tokens/s": 8, "bound": 6})
    table.print_header()
    for name in APPLE:
        machine = MACHINES[name]
        parts = {
            part: _seconds(name, family, problem) * count
            for part, (family, problem, count) in PARTS.items()
        }
        parts["rest"] = OTHERS * LAYERS * machine.launch
        total = sum(parts.values())
        table.add(
            GPU=machine.name,
            **{part: seconds * 1e3 for part, seconds in parts.items()},
            ms=total * 1e3,
            **{"tokens/s": 1 / total, "bound": machine.gigabytes * 1e9 / READ},
        )
    return table


def _seconds(name: str, family_name: str, problem: Problem) -> float:
    family = FAMILIES[family_name]
    known = store.stored(family.key(problem), family.configs, family.kernels, name)
    judge = judge_of(family, problem, name)
    config = family.heuristic(problem, judge.device) if known is None else known[1]
    return judge.attempt(config).seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="search anew; takes minutes")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="which")
    parser.add_argument("--beam", type=int, default=1, help="configurations to follow")
    args = parser.parse_args()
    if args.write:
        write(args.beam, args.parts)
    forecast()


if __name__ == "__main__":
    main()
