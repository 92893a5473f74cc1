"""Executes notebooks and stores their outputs: ``python notebooks/execute.py [NAME.ipynb ...]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
# Of one cell, in seconds, where kernels are compiled first and others share the machine.
TIMEOUT = 240


def execute(path: Path, changes: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """A notebook with the outputs of a fresh run, top to bottom, in the notebook's folder.

    The standard error stream is left out: it tells of compilations, which happen once.

    Args:
        path: the notebook.
        changes: code that is run in the place of other code, which must be there once.

    Raises:
        CellExecutionError: a cell raised an exception.
        CellTimeoutError: a cell took longer than ``TIMEOUT``.
    """
    notebook = nbformat.read(path, as_version=4)
    for code, other in (changes or {}).items():
        (cell,) = (cell for cell in notebook.cells if cell.source.count(code) == 1)
        cell.source = cell.source.replace(code, other)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    # Without the version of the Python that ran it.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    """Execute the notebooks of these names, or all."""
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        seconds, kilobytes = time.perf_counter() - start, path.stat().st_size / 1000
        print(f"{path.name}: {seconds:.0f} s, {kilobytes:.0f} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
