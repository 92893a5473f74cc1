"""Prints the lines of each room beside its budget in ``budget.toml``, and fails above one.

    python .ci/size.py

A budget is one of code: lines that are neither blank nor part of a docstring. The budgets under
``lines`` are of all lines of Python in a folder.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("budget.toml")
FOLDERS = ("mlx_qlayers", "tests", "benchmarks", "examples", "models", "notebooks")
KERNELS = {".metal", ".h", ".cpp", ".cuh", ""}
Count = tuple[int, int, int]


def count(path: Path) -> Count:
    """Lines of code, of docstrings, and blank ones outside of docstrings."""
    text = path.read_text()
    lines = text.splitlines()
    documented: set[int] = set()
    if path.suffix == ".py":
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                documented |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    blank = sum(not line.strip() for i, line in enumerate(lines, 1) if i not in documented)
    return len(lines) - len(documented) - blank, len(documented), blank


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """The files that count, with their rooms: a package's folder, or a folder of the repository."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root).parts
            kernels = path.suffix in KERNELS and folder == "mlx_qlayers"
            counted = kernels or path.suffix == ".py"
            if not counted or "__pycache__" in parts or not path.is_file():
                continue
            room = "/".join(parts[: 2 if folder == "mlx_qlayers" and len(parts) > 2 else 1])
            yield room + (", kernels" if kernels else ""), path


def main(root: Path = ROOT, budgets: Path = BUDGETS) -> int:
    """Print the table.

    Returns:
        1 where a room is above its budget or has none, else 0.
    """
    rooms: dict[str, list[Count]] = defaultdict(list)
    for room, path in sources(root):
        rooms[room].append(count(path))
    sums = {room: tuple(map(sum, zip(*counts, strict=True))) for room, counts in rooms.items()}
    budget = tomllib.loads(budgets.read_text())
    print(f"{'room':28}{'code':>9}{'budget':>9}{'docstrings':>12}{'blank':>8}{'lines':>9}")
    above: list[str] = []
    for room, (code, docs, blank) in sorted(sums.items()):
        most = budget["code"].get(room, 0)
        above += [room] * (code > most)
        print(f"{room:28}{code:9,}{most:9,}{docs:12,}{blank:8,}{code + docs + blank:9,}")
    print(f"\n{'all lines of Python':28}{'lines':>9}{'budget':>9}")
    for folder, most in budget["lines"].items():
        inside = [s for r, s in sums.items() if r.split("/")[0] == folder and "kernels" not in r]
        lines = sum(map(sum, inside))
        above += [folder] * (lines > most)
        print(f"{folder:28}{lines:9,}{most:9,}")
    if above:
        print(f"\nNot within {budgets.name}: {', '.join(above)} (CONTRIBUTING.md, Size)")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
