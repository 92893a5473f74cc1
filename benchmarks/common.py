"""Shared by the benchmarks: the machine's description, fair timing, tables and files.

A measurement verifies before it times. Its contenders take turns, in an order that is reversed
in every other round, so that a machine that warms up or is shared favours nobody.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from stored import RESULTS, kernels_hash

from mlx_qlayers.commands.info import backends, device, versions
from mlx_qlayers.runtime.backend import backend
from mlx_qlayers.runtime.explain import significant
from mlx_qlayers.tuning.timing import Sample, turns

__all__ = [
    "RESULTS",
    "Sample",
    "Table",
    "add_output",
    "arrays",
    "commit",
    "facts",
    "measure",
    "output",
    "peak",
    "print_facts",
    "significant",
    "turns",
    "write_output",
]

# Told of every row that a table gets.
_listeners: list[Callable[[Table], None]] = []


@cache
def facts() -> dict[str, str]:
    """The device, the versions, the commit and the date that a measurement belongs to."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    rows = {"date": now, "commit": commit(), "command": command, "cpu": cpu_name()}
    return rows | device() | versions() | backends()


def commit() -> str:
    """The commit that was measured, and whether files differ from it.

    ``MLX_QLAYERS_COMMIT`` says it where the files were copied without their repository.
    """
    if known := os.environ.get("MLX_QLAYERS_COMMIT"):
        return known
    root = RESULTS.parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


@cache
def print_facts() -> None:
    """Print the header of a benchmark: once, however many run in one process."""
    rows = facts()
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), end="\n\n")


def peak(run: Callable[[], Any]) -> float:
    """Megabytes alive at the worst moment besides what was there before."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(arrays(run()))
    mx.synchronize()
    return (mx.get_peak_memory() - before) / 1e6


class Table:
    """Rows that are printed as they are measured, and kept for a file.

    Args:
        columns: the names of the columns and the width of each.

    Example:
        >>> table = Table({"shape": 12, "ms": 10})
        >>> table.add(shape="64 x 64", ms=Sample.of([0.1, 0.2, 0.1]))
        64 x 64       0.100 ±25%
    """

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.columns = dict(columns)
        self.rows: list[dict[str, Any]] = []

    def print_header(self) -> None:
        """Print the names of the columns and a rule."""
        self._print({name: name for name in self.columns})
        print("-" * (sum(self.columns.values()) + 2 * len(self.columns) - 2))

    def add(self, **row: Any) -> None:
        """Print a row and keep it. A column that is not given stays empty."""
        self.rows.append(row)
        self._print({name: _cell(row.get(name, "")) for name in self.columns})
        for listener in _listeners:
            listener(self)

    def _print(self, cells: Mapping[str, str]) -> None:
        first, *others = self.columns.items()
        parts = [cells[first[0]].ljust(first[1]), *(cells[n].rjust(w) for n, w in others)]
        print("  ".join(parts), flush=True)

    def flat(self) -> list[dict[str, Any]]:
        """The rows with each sample as its median, low and high."""
        return [
            {key: value for name, cell in row.items() for key, value in _columns(name, cell)}
            for row in self.rows
        ]


def _cell(value: Any) -> str:
    return significant(value) if isinstance(value, float) else str(value)


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Sample):
        return [(name, value)]
    parts = asdict(value)
    return [(name if key == "median" else f"{name} {key}", part) for key, part in parts.items()]


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option --csv of every benchmark."""
    parser.add_argument(
        "--csv",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FILE",
        help="write a CSV file as well, into benchmarks/results by default",
    )


@contextmanager
def output(args: argparse.Namespace, name: str) -> Iterator[None]:
    """Write what :func:`add_output` asked for with every row that tables get inside the block.

    A benchmark that is stopped leaves what it has measured.
    """
    tables: list[Table] = []

    def keep(table: Table) -> None:
        if table not in tables:
            tables.append(table)
        _write(args, name, tables)

    _listeners.append(keep)
    try:
        yield
    finally:
        _listeners.remove(keep)
        for path in _write(args, name, tables):
            print(f"\nwrote {path}")


def write_output(args: argparse.Namespace, name: str, tables: Sequence[Table]) -> None:
    """Write what :func:`add_output` asked for, with the facts of the machine."""
    for path in _write(args, name, tables):
        print(f"\nwrote {path}")


def _write(args: argparse.Namespace, name: str, tables: Sequence[Table]) -> list[Path]:
    if (path := args.csv) is None:
        return []
    rows = [row for table in tables for row in table.flat()]
    if path.is_dir() or path == RESULTS:
        kind = backend() if backend() in ("cuda", "metal") else ""
        path = path / f"{'_'.join(filter(None, (name, kind)))}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, rows)
    return [path]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a result: its facts, with a hash of the kernels that it rests on, and its rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    found = {key.strip(): value for key, value in facts().items()}
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {found.pop(key)}\n" for key in ("date", "commit"))
        file.write(f"# kernels: {kernels_hash(path.stem)}\n")
        file.writelines(f"# {key}: {value}\n" for key, value in found.items())
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 10,
    warmup: int = 1,
    least: float = 0.02,
) -> dict[str, Sample]:
    """Time functions against each other.

    What a function returns is evaluated. A fast one is called several times a measurement, one
    call queued behind the other as in a running model, so that each measurement takes at least
    ``least`` seconds and neither the clock nor the wait for the device matters.

    Args:
        contenders: the functions by name.
        repeats: measurements of each.
        warmup: calls of each before the first measurement, besides one that finds its pace.
        least: the shortest measurement in seconds.

    Returns:
        Seconds a call by name.
    """
    calls = {}
    for name, function in contenders.items():
        pace = min(_seconds(function, 1) for _ in range(warmup + 1))
        calls[name] = max(1, round(least / pace))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(contenders, repeats):
        times[name].append(_seconds(contenders[name], calls[name]))
    return {name: Sample.of(values) for name, values in times.items()}


def arrays(result: Any) -> list[mx.array]:
    """The arrays of whatever a function returned."""
    flat: Any = tree_flatten(result)
    return [array for _, array in flat if isinstance(array, mx.array)]


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        mx.async_eval(*arrays(function()))
    mx.eval(*arrays(function()))
    mx.synchronize()
    return (time.perf_counter() - start) / calls
