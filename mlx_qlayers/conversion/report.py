"""The report of a conversion: the action for every module of a model, and the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime.explain import aligned

SWAPPED, QUANTIZED, LEFT = "swapped", "quantized", "left"
ALREADY, REVERTED, FUSED = "already converted", "reverted", "fused"
INVARIANT = "batch-invariant"  # why a step is left to the model's code that runs by other kernels
_FUSION_HEADER = ("part", "fusion", "what or why")
_HEADER = ("path", "kind", "shape", "group", "bits", "mode", "action", "why")


@dataclass(frozen=True)
class ModuleReport:
    """One module.

    Attributes:
        path: its path in the model.
        kind: ``"linear"``, ``"embedding"``, ``"experts"``, ``"attention"``, ``"gate"`` of a
            feed-forward layer, or ``"module"`` where its class was registered.
        shape: logical shape of its weight, or None.
        group_size, bits, mode: its format, or None where nothing is packed.
        action: ``"swapped"``, ``"quantized"`` (and swapped), ``"left"``, ``"already converted"``
            or ``"reverted"``.
        reason: why.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None
    group_size: int | None
    bits: int | None
    mode: str | None
    action: str
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """The columns of the printed table."""
        shape = "x".join(map(str, self.shape)) if self.shape else None
        cells = (self.path, self.kind, shape, self.group_size, self.bits, self.mode)
        return (*("-" if cell is None else str(cell) for cell in cells), self.action, self.reason)


@dataclass(frozen=True)
class FusionReport:
    """A model that could decode by the graphs of its steps.

    Attributes:
        path: its path, which is empty.
        kind: ``"step"``.
        action: ``"fused"``, ``"already converted"`` or ``"left"``.
        reason: how many operations a step has, and how many are left of them; or the line of the
            model's code that leaves steps to it, and why.
    """

    path: str
    kind: str
    action: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """One row a module, in the order of the model; prints as an aligned table.

    Attributes:
        rows: what happened to each module.
        unmatched: per-layer keys of the configuration that name no module of the model.
        dry_run: nothing was changed; the actions are what would be done.
        fusions: whether steps of decoding run by graphs.
        calibration: what was measured on this device, in a line; empty where nothing was.
        counts: modules by what happened to them.

    Example:
        >>> from mlx_lm import load
        >>> model, tokenizer = load("Qwen/Qwen2-7B-Instruct-MLX")
        >>> report = convert_model(model)
        >>> report.counts
        {'swapped': 55}
        >>> [row.path for row in report.rows if row.action == "left"]
        []
    """

    rows: tuple[ModuleReport, ...]
    unmatched: tuple[str, ...] = ()
    dry_run: bool = False
    fusions: tuple[FusionReport, ...] = ()
    calibration: str = ""
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", dict(Counter(row.action for row in self.rows)))

    def to_dict(self) -> dict[str, Any]:
        """Counts, rows and unmatched keys as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self._text(list)

    def summary(self) -> str:
        """The table with the same module of consecutive layers folded into one row."""
        return self._text(_folded)

    def brief(self) -> str:
        """A summary in one line."""
        fused = [row for row in self.fusions if row.action == FUSED]
        how = (
            "batch-invariant" if any(r.reason == INVARIANT for r in fused) else "decodes by graphs"
        )
        done = f"{self._total()}; {how}" if fused else self._total()
        return "\n".join(filter(None, (done, self.calibration)))

    def _total(self) -> str:
        total = ", ".join(f"{n} {action}" for action, n in self.counts.items()) or "no modules"
        return f"dry run: {total}" if self.dry_run else total

    def _text(self, fold: Callable[[list[tuple[str, ...]]], list[Any]]) -> str:
        lines = aligned([_HEADER, *fold([row.cells() for row in self.rows])])
        if self.fusions:
            steps = [(row.kind, row.action, row.reason) for row in self.fusions]
            lines += ["", *aligned([_FUSION_HEADER, *steps]), ""]
        lines += filter(None, (self._total(), self.calibration))
        if self.unmatched:
            keys = ", ".join(self.unmatched)
            lines.append(f"keys of the configuration that name no module: {keys}")
        return printable("\n".join(lines))


def printable(text: str) -> str:
    """Text that a file may hold, with what would steer a terminal written out as in a string."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _folded(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for those alike but for the first number in their path."""
    folded: dict[tuple[str, ...], list[int]] = {}
    for path, *rest in rows:
        match = re.search(r"\d+", path)
        start, end = match.span() if match else (len(path), len(path))
        key = (path[:start], path[end:], *rest)
        folded.setdefault(key, []).extend([int(match.group())] if match else [])
    found = []
    for (before, after, *rest), indices in folded.items():
        each = (f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs_of(indices))
        found.append((before + ",".join(each) + after, *rest))
    return found


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Numbers in turn as ranges of those that follow each other: 0, 1, 2 and 5 are two."""
    runs: list[range] = []
    for n in numbers:
        if runs and n == runs[-1].stop:
            runs[-1] = range(runs[-1].start, n + 1)
        else:
            runs.append(range(n, n + 1))
    return runs
