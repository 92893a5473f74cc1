"""Shared by the benchmarks: the machine's description, options, tables and files."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from stored import RESULTS, kernels_hash

from mlx_qlayers.commands.arguments import positive
from mlx_qlayers.commands.info import backends, device, versions
from mlx_qlayers.runtime.backend import backend
from mlx_qlayers.runtime.explain import aligned, significant
from mlx_qlayers.tuning.timing import Sample, turns

__all__ = ["Sample", "Table", "arguments", "facts", "output", "positive", "significant", "turns"]

# Told of every row that a table gets.
_listeners: list[Callable[[Table], None]] = []


@cache
def facts() -> dict[str, str]:
    """The device, the versions, the commit and the date that a measurement belongs to."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    cpu = f"{os.cpu_count()} x {mx.device_info(mx.cpu).get('device_name', platform.machine())}"
    rows = {"date": now, "commit": commit(), "command": command, "cpu": cpu}
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


@cache
def print_facts() -> None:
    """Print the header of a benchmark: once, however many run in one process."""
    print(*aligned([*facts().items()]), sep="\n", end="\n\n")


class Table:
    """Rows that are printed as they are measured, and kept for a file.

    A head stands above the first row, and above one whose columns are others.

    Example:
        >>> table = Table()
        >>> table.add(shape="64 x 64", ms=Sample.of([0.1, 0.2, 0.1]))
        shape            ms
        -------------------
        64 x 64  0.100 ±25%
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._widths: dict[str, int] = {}

    def add(self, **row: Any) -> None:
        """Print a row and keep it."""
        cells = {name: cell(value) for name, value in row.items()}
        is_new = cells.keys() != self._widths.keys()
        before = dict.fromkeys(cells, 0) if is_new else self._widths
        self._widths = {n: max(width, len(n), len(cells[n])) for n, width in before.items()}
        if is_new:
            self._print({name: name for name in cells})
            print("-" * (sum(self._widths.values()) + 2 * len(cells) - 2))
        self.rows.append(row)
        self._print(cells)
        for listener in _listeners:
            listener(self)

    def _print(self, cells: Mapping[str, str]) -> None:
        first, *others = self._widths.items()
        parts = [cells[first[0]].ljust(first[1]), *(cells[n].rjust(w) for n, w in others)]
        print("  ".join(parts), flush=True)

    def flat(self) -> list[dict[str, Any]]:
        """The rows with each sample as its median, low and high."""
        return [
            {key: value for name, cell in row.items() for key, value in _columns(name, cell)}
            for row in self.rows
        ]


def cell(value: Any) -> str:
    """A value as tables show it."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:g}" if value.is_integer() else significant(value)


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> str:
    """A table of Markdown whose first columns are texts and the others numbers."""
    heads = list(heads)
    aligned = ["---"] * texts + ["--:"] * (len(heads) - texts)
    lines = (f"| {' | '.join(row)} |" for row in (heads, *rows))
    return "\n".join([next(lines), f"|{'|'.join(aligned)}|", *lines])


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Sample):
        return [(name, value)]
    parts = asdict(value)
    return [(name if key == "median" else f"{name} {key}", part) for key, part in parts.items()]


def arguments(doc: str | None, repeats: int = 0) -> argparse.ArgumentParser:
    """The options that all benchmarks have: where to write, and how often to measure."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if repeats:
        help = f"measurements of each (default: {repeats})"
        parser.add_argument("--repeats", type=positive, default=repeats, help=help)
    help = "write a CSV file as well, into benchmarks/results by default"
    parser.add_argument("--csv", nargs="?", type=Path, const=RESULTS, metavar="FILE", help=help)
    return parser


@contextmanager
def output(args: argparse.Namespace, name: str) -> Iterator[None]:
    """Print the facts, and write the file of ``--csv`` with every row that a table gets inside.

    A benchmark that is stopped leaves what it has measured.
    """
    tables: list[Table] = []
    path = _path(args.csv, name)

    def keep(table: Table) -> None:
        if table not in tables:
            tables.append(table)
        if path is not None:
            write_csv(path, [row for each in tables for row in each.flat()])

    print_facts()
    _listeners.append(keep)
    try:
        yield
    finally:
        _listeners.remove(keep)
        if path is not None and tables:
            print(f"\nwrote {path}")


def _path(path: Path | None, name: str) -> Path | None:
    if path is None or not (path.is_dir() or path == RESULTS):
        return path
    kind = backend() if backend() in ("cuda", "metal") else ""
    return path / f"{'_'.join(filter(None, (name, kind)))}.csv"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a result: its facts, with a hash of the kernels that it rests on, and its rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    found = {key.strip(): value for key, value in facts().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {found.pop(key)}\n" for key in ("date", "commit"))
        file.write(f"# kernels: {kernels_hash(path.stem)}\n")
        file.writelines(f"# {key}: {value}\n" for key, value in found.items())
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
