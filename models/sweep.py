"""Trains with several settings side by side, and keeps the models that validate best.

    python models/sweep.py --out /tmp/sweep --minutes 7 --jobs 4

This is how the defaults of `settings.py` were chosen, on one GPU.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evaluate import score

# The first sweep overfitted the tales from step 600 on, the more the larger their share was.
BASE = "--tales-weight 0.4 --dropout 0.3 --weight-decay 1 --augment 0.7 --steps 1600"

# Most promising first: what the time limit does not reach is left out.
VARIANTS = {
    "tales40": "",
    "tales30": "--tales-weight 0.3",
    "drop40": "--dropout 0.4 --augment 1 --bpe-dropout 0.15 --steps 2000",
    "tokens10": "--token-dropout 0.1",
    "vocab2048": "--vocab 2048",
    "decay3": "--weight-decay 3 --dropout 0.25 --steps 1300",
    "wide": "--hidden 512 --layers 4 --intermediate 1408 --heads 8 --dropout 0.4",
    "narrow8": "--hidden 320 --layers 8 --intermediate 896 --heads 5 --kv-heads 1 --dropout 0.25",
}

# Seconds of a variant that are not training: starting, cutting texts into tokens, measuring.
OVERHEAD = 35


def train(name: str, flags: str, folder: Path, deadline: float) -> dict[str, Any] | None:
    """Train one variant in a process of its own; return its row of the table, if it ends."""
    minutes = (deadline - time.monotonic() - OVERHEAD) / 60
    if minutes < 0.5:
        return None
    command = [sys.executable, Path(__file__).with_name("train.py"), "--out", folder / name]
    command += ["--checkpoints", folder / "checkpoints" / name, "--checkpoint-every", "1000000"]
    log = folder / f"{name}.log"
    with log.open("w") as file:
        done = subprocess.run(
            [*map(str, command), "--minutes", f"{minutes:.2f}", *flags.split()],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        print(f"{name}: exit code {done.returncode}\n{log.read_text()[-1500:]}", flush=True)
        return None
    shutil.move(log, folder / name / "log.txt")
    return row(name, json.loads((folder / name / "training.json").read_text()))


def row(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return what the table says about a finished variant."""
    measured = {text: v["quantized"] for text, v in record["validation"].items()}
    return {
        "score": score({text: v["bits_per_byte"] for text, v in measured.items()}),
        "name": name,
        "tales": measured["tales"]["perplexity"],
        "plays": measured["plays"]["perplexity"],
        "best": min(record["history"], key=lambda entry: entry["score"])["step"],
        "step": record["step"],
        "seconds": record["seconds"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as aligned text: bits per byte, and perplexities of the quantized model."""
    lines = ["score   name        tales  plays  best  steps  seconds"]
    lines += [
        f"{r['score']:.4f}  {r['name']:10s} {r['tales']:6.2f} {r['plays']:6.2f} {r['best']:5d}"
        f"  {r['step']:5d} {r['seconds']:8.0f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the variants, print their scores, and pack the best ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where archives of models go")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mlx-qlayers-sweep"))
    parser.add_argument("--minutes", type=float, default=7, help="time limit (default: 7)")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (default: 4)")
    parser.add_argument("--keep", type=int, default=5, help="models to keep (default: 5)")
    parser.add_argument("--flags", default="", help="options added to every variant")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    options.out.mkdir(parents=True, exist_ok=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(train, name, f"{BASE} {flags} {options.flags}", options.work, deadline)
            for name, flags in VARIANTS.items()
        ]
    rows = sorted((r for run in runs if (r := run.result())), key=lambda r: r["score"])
    print(table(rows), flush=True)
    for kept in rows[: options.keep]:
        shutil.make_archive(str(options.out / kept["name"]), "gztar", options.work / kept["name"])


if __name__ == "__main__":
    main()
