"""What the benchmarks have written, read back for pictures, tables and summaries."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What one benchmark wrote: the facts of the machine, and the rows of its tables."""

    facts: dict[str, str]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Results:
        """From a CSV or JSON file, with numbers as numbers and tasks repeated in every row."""
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            return cls(content["machine"], _filled(content["rows"]))
        lines = path.read_text().splitlines()
        facts = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        numbers = [{key: _number(cell) for key, cell in row.items()} for row in rows]
        return cls({key: value for key, _, value in facts}, _filled(numbers))

    @property
    def device(self) -> str:
        """The name of the GPU, or of the processor."""
        kind, _, name = self.facts["device"].partition("), ")
        return self.facts["cpu"] if "cpu" in kind else name

    @property
    def caption(self) -> str:
        """When it was measured, and with what."""
        versions = (f"{name} {self.facts.get(name, '?')}" for name in ("mlx", "mlx-lm"))
        commit = self.facts.get("commit", "")
        return ", ".join(
            [
                self.facts["date"],
                *versions,
                *([f"commit {commit[:12]}"] if commit not in ("", "unknown") else []),
            ]
        )


def _filled(rows: list[Row]) -> list[Row]:
    """A task is written in the first of its rows only."""
    task = ""
    for row in rows:
        task = row.get("task") or task
        if "task" in row:
            row["task"] = task
    return rows


def _number(cell: str | None) -> Any:
    try:
        return float(cell or "")
    except ValueError:
        return cell or ""
