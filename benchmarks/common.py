"""What the benchmarks share: the machine's description, fair timing, tables and files.

A measurement verifies before it times. Its contenders take turns, in an order that is reversed
in every other round, so that a machine that warms up or is shared favours nobody.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_qlayers.commands.info import backends, device, versions

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one quantity: the median, and the middle half around it.

    Times are in seconds. Where a rate is wanted, :meth:`per` turns a time into one.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """Summarise the measurements; the spread is between the quartiles."""
        values = sorted(values)
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a fraction of the median."""
        return (self.high - self.low) / self.median

    def per(self, amount: float) -> Sample:
        """``amount`` a second: tokens/s, bytes/s or operations/s from seconds."""
        return Sample(amount / self.median, amount / self.high, amount / self.low, self.count)

    def scaled(self, factor: float) -> Sample:
        """The same in another unit, as 1e3 for milliseconds."""
        return Sample(self.median * factor, self.low * factor, self.high * factor, self.count)

    def __str__(self) -> str:
        return f"{significant(self.median)} ±{self.spread / 2:.0%}"


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

    Example:
        >>> a = mx.random.normal((64, 64))
        >>> measure({"matmul": lambda: a @ a})["matmul"].median < 1
        True
    """
    calls = {}
    for name, function in contenders.items():
        pace = min(_seconds(function, 1) for _ in range(warmup + 1))
        calls[name] = max(1, round(least / pace))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns(contenders, repeats):
        times[name].append(_seconds(contenders[name], calls[name]))
    return {name: Sample.of(values) for name, values in times.items()}


def turns(names: Iterable[str], repeats: int) -> Iterable[str]:
    """Each name once a round, in an order that alternates."""
    order = list(names)
    for _ in range(repeats):
        yield from order
        order.reverse()


def arrays(result: Any) -> list[mx.array]:
    """The arrays of whatever a function returned."""
    return [array for _, array in tree_flatten(result) if isinstance(array, mx.array)]


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls - 1):
        mx.async_eval(*arrays(function()))
    mx.eval(*arrays(function()))
    mx.synchronize()
    return (time.perf_counter() - start) / calls


def facts() -> dict[str, str]:
    """The device, the versions and the date that a measurement belongs to."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": now, "cpu": cpu_name()} | device() | versions() | backends()


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def print_facts() -> None:
    """Print the header of a benchmark."""
    rows = facts()
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), end="\n\n")


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, and none in powers of ten."""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if abs(value) >= 1e-4 else f"{value:.{digits - 1}e}"


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
    """The options --csv and --json of every benchmark."""
    for kind in ("csv", "json"):
        parser.add_argument(
            f"--{kind}",
            nargs="?",
            type=Path,
            const=RESULTS,
            metavar="FILE",
            help=f"write {kind.upper()} as well, into benchmarks/results by default",
        )


def write_output(args: argparse.Namespace, name: str, tables: Sequence[Table]) -> None:
    """Write what :func:`add_output` asked for, with the facts of the machine."""
    rows = [row for table in tables for row in table.flat()]
    for kind, write in (("csv", _write_csv), ("json", _write_json)):
        if (path := getattr(args, kind)) is not None:
            path = path / f"{name}.{kind}" if path.is_dir() or path == RESULTS else path
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, rows)
            print(f"\nwrote {path}")


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        file.writelines(f"# {key.strip()}: {value}\n" for key, value in facts().items())
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"machine": facts(), "rows": rows}, indent=1) + "\n")
