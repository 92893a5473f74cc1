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

# Most promising first: what the time limit does not reach is left out.
VARIANTS = {
    "base": "",
    "long": "--steps 3000",
    "short": "--steps 800",
    "drop30": "--dropout 0.3",
    "decay1": "--weight-decay 1.0",
    "vocab2048": "--vocab 2048",
    "noaugment": "--augment 0",
    "deep": "--hidden 384 --layers 6 --intermediate 1024 --heads 6 --kv-heads 2",
    "drop30-long": "--dropout 0.3 --steps 3000",
    "vocab2048-drop30": "--vocab 2048 --dropout 0.3 --steps 2000",
    "augment100": "--augment 1.0 --steps 2000",
    "drop40-long": "--dropout 0.4 --steps 3000 --weight-decay 1.0",
    "wide3": "--hidden 640 --layers 3 --intermediate 1536 --heads 10 --kv-heads 2 --vocab 2048",
    "lr2": "--lr 2e-3",
    "lr05": "--lr 5e-4",
    "mixed-evenly": "--tales-weight 0.45",
    "tales80": "--tales-weight 0.8",
    "augment100-drop30": "--augment 1.0 --dropout 0.3 --steps 3000 --weight-decay 1.0",
    "context256": "--context 256 --batch 32",
    "bpe20": "--bpe-dropout 0.2 --steps 2000",
    "decay1-drop30": "--weight-decay 1.0 --dropout 0.3 --steps 2000",
    "batch32": "--batch 32 --steps 1000",
    "ema999": "--ema 0.999",
    "half": "--hidden 384 --layers 4 --intermediate 1024 --heads 6 --kv-heads 2",
}


def train(name: str, flags: str, folder: Path, deadline: float) -> float | None:
    """Train one variant in a process of its own and return its validation score, if it ends."""
    left = deadline - time.monotonic()
    if left < 45:
        return None
    command = [sys.executable, Path(__file__).with_name("train.py"), "--out", folder / name]
    command += ["--checkpoints", folder / "checkpoints" / name, "--checkpoint-every", "1000000"]
    log = folder / f"{name}.log"
    with log.open("w") as file:
        try:
            subprocess.run(
                [*map(str, command), *flags.split()],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=left,
                check=True,
            )
        except subprocess.SubprocessError as error:
            print(f"{name}: {error}\n{log.read_text()[-1500:]}", flush=True)
            return None
    return report(name, folder)


def report(name: str, folder: Path) -> float:
    """Print one line about a finished variant and return its score in bits per byte."""
    record = json.loads((folder / name / "training.json").read_text())
    best = min(record["history"], key=lambda row: row["score"])
    shown = "  ".join(
        f"{text} {v['bfloat16']['perplexity']:.2f}/{v['quantized']['perplexity']:.2f} ppl"
        f" {v['quantized']['bits_per_byte']:.4f} bpb"
        for text, v in record["validation"].items()
    )
    print(
        f"{best['score']:.4f}  {name:18s} {shown}  best at {best['step']} of {record['step']}"
        f"  {record['seconds']:.0f} s",
        flush=True,
    )
    return best["score"]


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
        runs = {
            name: pool.submit(train, name, f"{options.flags} {flags}", options.work, deadline)
            for name, flags in VARIANTS.items()
        }
    scores = {name: score for name, run in runs.items() if (score := run.result()) is not None}
    print(
        "\n",
        *(f"{score:.4f}  {name}\n" for score, name in sorted((s, n) for n, s in scores.items())),
    )
    for name in sorted(scores, key=scores.__getitem__)[: options.keep]:
        shutil.copy(options.work / f"{name}.log", options.work / name / "log.txt")
        shutil.make_archive(str(options.out / name), "gztar", options.work / name)
        print("-" * 20, name, (options.work / name / "samples.txt").read_text(), sep="\n")


if __name__ == "__main__":
    main()
