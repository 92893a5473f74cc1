"""Measure every kernel beside stock MLX on this machine, with tables and pictures to share."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .demo import shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer sizes, in some minutes")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="run only these benchmarks"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="where the machine's folder goes"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="measure nothing, draw the pictures of the results in a folder",
    )


def run(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(scripts()))
    if args.source is not None:
        if find_spec("matplotlib") is None:
            raise ValueError("pictures need matplotlib: pip install 'mlx-qlayers[bench]'")
        print(*import_module("plot").draw(args.source), sep="\n")
        return
    folder = import_module("suite").run(args.out, quick=args.quick, only=args.only)
    print(
        f"\nThe tables and pictures of this machine are in {folder}.\n"
        "Please share them: add the folder to benchmarks/results of the mlx-qlayers repository in\n"
        "a pull request, or attach it to an issue there ('Benchmark results')."
    )


def scripts() -> Path:
    """The folder of the benchmarks."""
    return shipped("benchmarks", "suite.py").parent
