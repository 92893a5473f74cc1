"""Every family of kernels on this machine, beside stock MLX: what ``mlx-qlayers bench`` runs.

Each benchmark is a script of this folder that can be run by itself. Here they run one after the
other in one process, and leave a CSV file each, pictures and a summary in one folder.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import plot
from common import cell, facts, markdown, print_facts
from harness import GPU
from stored import Results, stored

# Machines with less memory than this make the small runs, whether asked to be quick or not.
FULL_BYTES = 32e9
QUICK_REPEATS = 2
Cut = Callable[[Any], Any]


@dataclass(frozen=True)
class Family:
    """A script and how to run it."""

    name: str  # of its results, without the ending
    script: str  # the module of this folder
    gpu: Sequence[str] | None = ()  # its arguments on a GPU; None leaves it out there
    cpu: Sequence[str] | None = ()  # the same without a GPU
    # Constants of the script, and what a small run takes of each; None leaves it out of those.
    small: Mapping[str, Cut] | None = field(default_factory=dict)


def first(count: int) -> Cut:
    """The first entries of a list or dictionary."""
    return lambda x: dict(list(x.items())[:count]) if isinstance(x, dict) else x[:count]


ONE = {"GPU": first(1), "CPU": first(1)}
FAMILIES = (
    Family(
        "quantized_few",
        "bench_quantized_matmul",
        gpu=["--few"],
        cpu=None,
        small={"GPU_SHAPES": lambda shapes: shapes[::3]},
    ),
    Family("quantized_many", "bench_quantized_matmul", gpu=["--many"], cpu=None, small=None),
    Family("quantized_matmul", "bench_quantized_matmul", gpu=None, small={"DTYPES": first(1)}),
    Family("gather_qmm", "bench_gather_qmm", small={"MODELS": first(1)}),
    Family("attention_tiles", "bench_attention_tiles", small={**ONE, "CURVE": first(4)}),
    Family("attention_decode", "bench_attention", small={"KEYS": first(2), "DTYPES": first(1)}),
    Family("grid_sample", "bench_grid_sample", small=ONE),
    Family("deformable", "bench_deformable", small=ONE),
    Family("linalg", "bench_linalg", small=ONE),
    Family("decode", "bench_decode", cpu=None, small=None),
    Family("generate", "bench_generate"),
)


def run(out: Path, *, quick: bool = False, only: Sequence[str] = ()) -> Path:
    """Run the benchmarks; each verifies its results before it times them.

    Args:
        out: where the machine's folder is to be.
        quick: fewer sizes, measured fewer times.
        only: names of families; all by default.

    Returns:
        The machine's folder.

    Raises:
        ValueError: no family has a name of ``only``.
        RuntimeError: benchmarks failed; the others are there.
    """
    if unknown := set(only) - {family.name for family in FAMILIES}:
        names = ", ".join(family.name for family in FAMILIES)
        raise ValueError(f"no benchmark is called {', '.join(sorted(unknown))}; there are {names}")
    machine = facts()
    folder = out / _slug(Results("", machine, []).device)
    folder.mkdir(parents=True, exist_ok=True)
    print_facts()
    failed = [
        family.name
        for family in FAMILIES
        if (family.name in only or not only) and not _run_one(family, folder, quick)
    ]
    if find_spec("matplotlib") is None:
        print("\nno pictures: matplotlib is not installed (pip install 'mlx-qlayers[bench]')")
    else:
        print(*plot.draw(folder), sep="\n")
    (folder / "README.md").write_text(summary(folder))
    if failed:
        raise RuntimeError(f"these benchmarks failed: {', '.join(failed)}; see above")
    return folder


def _run_one(family: Family, folder: Path, quick: bool) -> bool:
    """Whether it ran, or was not meant to."""
    arguments = family.gpu if GPU else family.cpu
    small = quick or mx.device_info().get("memory_size", FULL_BYTES) < FULL_BYTES
    if arguments is None or (small and family.small is None):
        return True
    print(f"\n===== {family.name}\n", flush=True)
    start, script = time.perf_counter(), import_module(family.script)
    repeats = ["--repeats", str(QUICK_REPEATS)] if quick else []
    command = [family.script, *arguments, *repeats, "--csv", str(folder / f"{family.name}.csv")]
    with ExitStack() as changed:
        changed.callback(mx.clear_cache)
        changed.enter_context(mock.patch.object(sys, "argv", command))
        for name, cut in (family.small or {}).items() if small else ():
            changed.enter_context(mock.patch.object(script, name, cut(getattr(script, name))))
        try:
            script.main()
        except (Exception, SystemExit):
            traceback.print_exc()
            return False
    print(f"{time.perf_counter() - start:.0f} s")
    return True


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def summary(folder: Path) -> str:
    """The machine, its pictures and its tables, in Markdown."""
    results = stored(folder)
    newest = max(results.values(), key=lambda found: found.facts["date"])
    parts = [f"# {newest.device}", markdown(["", ""], newest.facts.items(), texts=2)]
    parts += [f"![{path.stem}](plots/{path.name})" for path in sorted(folder.glob("plots/*.png"))]
    for name, found in results.items():
        # A table ends where the columns change: what is measured there is something else.
        tables: dict[tuple[str, ...], list[list[str]]] = {}
        for row in found.rows:
            shown = {k: v for k, v in row.items() if v != "" and not _SPREAD.search(k)}
            tables.setdefault(tuple(shown), []).append([cell(v) for v in shown.values()])
        parts += [f"## {name}", *(markdown(head, rows) for head, rows in tables.items())]
    return "\n\n".join(parts) + "\n"


_SPREAD = re.compile(r" (low|high|count)$")
