"""Results of benchmarks, read back for pictures and tables, and which of them are stale.

    python benchmarks/stored.py    # lists the stored results, and which are stale

A result is one CSV file, named after its benchmark and the kind of machine (``decode_cuda.csv``; a
CPU's has no kind). Lines that begin with ``#`` hold the facts of the run, among them its commit
and a hash of the kernels that it timed.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]

# Kernels by what was measured; a whole model, and what is not listed, may run any of them.
PRODUCTS = ("quantized_matmul/qm*",)
STEP = ("attention/step*", "attention/*decode*", "attention/combine*", "rotary/*")
TILES = ("attention/*forward*", "attention/*backward*")
KERNELS: dict[str, tuple[str, ...]] = {
    "attention_decode": STEP[:3],
    "attention_tiles": TILES,
    "decode": (*STEP, *TILES[:1], "quantized_matmul/*"),
    "deformable": ("deformable/*",),
    "distributed_check": (),
    "distributed_plan": (),
    "gather_qmm": ("gather_qmm/*", "quantized_matmul/gradients*"),
    "generate": (*STEP, *TILES[:1], "quantized_matmul/*"),
    "gptq": ("gptq/*", "linalg/*"),
    "grid_sample": ("grid_sample/*",),
    "int8": ("int8/*", "quantized_matmul/*"),
    "kv_cache": ("attention/*", "rotary/*", "quantized_matmul/*", "swiglu/*"),
    "linalg": ("linalg/*",),
    "llama_cpp": (
        "attention/serial*",
        "attention/forward*",
        "rotary/*",
        "quantized_matmul/qmv_serial*",
        "quantized_matmul/dequantize*",
        "swiglu/*",
    ),
    "lora": ("add_low_rank/*", "linear_cross_entropy/*", "quantized_matmul/deq*", *TILES),
    "lora_shipped": ("linear_cross_entropy/*", "*/*serial*", *TILES),
    "match_images": ("attention/*", "deformable/*"),
    "peers": (*TILES, *PRODUCTS, "grid_sample/*"),
    "quantization": ("gptq/*", "linalg/*"),
    "quantized": ("quantized_matmul/*",),
    "quantized_few": PRODUCTS,
    "runtime": (),
    "speculation": (*STEP, *TILES[:1], "quantized_matmul/*"),
    "tensor": ("attention/tensor*", "quantized_matmul/qmm*", *TILES),
}


def kernels_hash(name: str, root: Path | None = None) -> str:
    """Of the Metal sources that a result rests on and all that they include, without comments.

    Args:
        name: of the result, with or without the kind of machine.
        root: the folder that holds the package; by default of the one that is imported.

    Returns:
        12 hexadecimal digits, or ``"none"`` for a result that rests on no kernel.
    """
    if root is None and (found := find_spec("mlx_qlayers")) and found.origin:
        root = Path(found.origin).parents[1]
    rooms = [((root or ROOT) / "mlx_qlayers" / room).resolve() for room in ("metal", "ops")]
    name = re.sub("_(cuda|metal)$", "", name)
    known = (name.rsplit("_", i)[0] for i in range(name.count("_") + 1))
    patterns = next((KERNELS[each] for each in known if each in KERNELS), ("*/*",))
    if not patterns:
        return "none"
    globs = (room.glob(f"{pattern}.metal") for room in rooms for pattern in patterns)
    timed, digest = _with_includes(chain.from_iterable(globs), rooms[0]), hashlib.sha256()
    parents = {path: next(room for room in rooms if room in path.parents) for path in timed}
    for name, path in sorted((path.relative_to(room), path) for path, room in parents.items()):
        digest.update(f"{name.as_posix()}\n{_code(path)}\n".encode())
    return digest.hexdigest()[:12]


def _with_includes(paths: Iterable[Path], folder: Path) -> set[Path]:
    left, seen = list(paths), set[Path]()
    while left:
        if (path := left.pop().resolve()) in seen or not path.exists():
            continue
        seen.add(path)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            left += [path.parent / name, folder / name]
    return seen


def _code(path: Path) -> str:
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL).split())


@dataclass(frozen=True)
class Results:
    """The facts of one run, and the rows of its tables."""

    name: str
    facts: dict[str, str]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Results:
        """From a CSV file, with numbers as numbers and tasks repeated in every row."""
        lines = path.read_text().splitlines()
        facts = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        numbers = [{key: _number(cell) for key, cell in row.items()} for row in rows]
        return cls(path.stem, {key: value for key, _, value in facts}, _filled(numbers))

    @property
    def device(self) -> str:
        """The name of the GPU, or of the processor."""
        kind, _, name = self.facts["device"].partition("), ")
        return self.facts["cpu"] if "cpu" in kind else name

    @property
    def commit(self) -> str:
        """The commit that was measured, 8 digits, or ``"unknown"``."""
        commit, changed, _ = self.facts.get("commit", "unknown").partition("-dirty")
        return commit[:8] + changed

    @cached_property
    def stale(self) -> bool:
        """Whether kernels differ from those that were timed."""
        return self.facts.get("kernels") != kernels_hash(self.name)

    @property
    def caption(self) -> str:
        """The date, the versions and the commit."""
        versions = (f"{name} {self.facts.get(name, '?')}" for name in ("mlx", "mlx-lm"))
        return ", ".join([self.facts["date"], *versions, f"commit {self.commit}"])


def stored(folder: Path = RESULTS) -> dict[str, Results]:
    """Every stored result by name."""
    return {path.stem: Results.read(path) for path in sorted(folder.glob("*.csv"))}


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


if __name__ == "__main__":
    for name, found in stored().items():
        state = "stale" if found.stale else "current"
        print(f"{name:28} {found.commit:9} {found.facts['date'][:10]:11} {state}")
