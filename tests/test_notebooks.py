"""The notebooks run from top to bottom, and what is stored in them is fit to be shown."""

import contextlib
import io
import linecache
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import mlx.core as mx
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
sys.path.insert(0, str(FOLDER))
from execute import execute  # noqa: E402

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# A slash that begins a path of two names or more, or a drive: no fraction, no URL.
ABSOLUTE = re.compile(r"(?<![\w./:])(?:/\w[\w.-]*/\w|[A-Za-z]:\\)")
LARGEST = 500_000

# Numbers that take long and show nothing else: layers of the shipped model, steps of training,
# repetitions, tokens, lengths.
SMALLER = {
    "02_grid_sample": {"(160, 25)": "(160, 3)", "repeats=15": "repeats=2"},
    "04_convert_qwen2": {
        "(40, 192)": "(8, 48)",
        "(2, 3, 4, 6, 8)": "(2, 3)",
        "print(stock.model.layers[0]": "del stock.model.layers[2:]; print(stock.model.layers[0]",
        "layers = range(len(": "del dense.model.layers[2:]; layers = range(len(",
        "settings = load_config(path)": "settings = load_config(path) | {'num_hidden_layers': 2}",
    },
    "05_fused_attention": {
        "(20, 16)": "(3, 16)",
        "(64, 128, 256, 512)": "(16, 32, 64, 128)",
        "base.set_dtype": "del base.model.layers[2:]; base.set_dtype",
    },
    "06_tuning": {
        "(4096, 64)": "(512, 64)",
        "(512, 4096)": "(64, 1024)",
        "width=2": "width=1",
        "budget_s=20": "budget_s=0.5",
    },
    "09_fine_tuning": {
        "SECONDS = 60": "SECONDS = 0.5",
        "    convert_model(model)": "    del model.model.layers[2:]; convert_model(model)",
        ".read_text()": ".read_text()[:100_000]",
        "BATCH, LENGTH = 4, 64": "BATCH, LENGTH = 1, 16",
        "np.arange(16) * (len(held_out) // 16": "np.arange(4) * (len(held_out) // 4",
        "max_tokens=60": "max_tokens=20",
    },
    "10_warp_and_match": {
        "most=300": "most=100",
        "(20, 50,": "(20, 3,",
        "(8, 40,": "(8, 2,",
        "(3, 30,": "(3, 2,",
        "(1, 30,": "(1, 2,",
    },
    "11_speculation": {
        "model.set_dtype": "del model.model.layers[2:]; model.set_dtype",
        "TOKENS = 96": "TOKENS = 40",
    },
}
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def texts(output: nbformat.NotebookNode) -> list[str]:
    """The text of an output, its pictures left out."""
    shown = {mime: data for mime, data in output.get("data", {}).items() if "image" not in mime}
    return [*map(str, shown.values()), output.get("text", ""), *output.get("traceback", [])]


def test_notebooks_are_numbered():
    numbers = [int(path.name.split("_")[0]) for path in NOTEBOOKS]
    assert numbers == sorted(set(numbers)) and len(numbers) == 11


@every_notebook
def test_outputs_are_stored(path):
    cells = code_cells(path)
    # Stored from one run, top to bottom.
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert "stream" in kinds and "display_data" in kinds and "error" not in kinds
    assert path.stat().st_size < LARGEST


@every_notebook
def test_outputs_hold_no_absolute_path(path):
    said = [text for cell in code_cells(path) for output in cell.outputs for text in texts(output)]
    assert not [text for text in said if ABSOLUTE.search(text)]


def changed(path):
    """The code of a notebook's cells, where that takes long with other numbers."""
    sources = [cell.source for cell in code_cells(path)]
    for code, other in SMALLER.get(path.stem, {}).items():
        (at,) = (i for i, source in enumerate(sources) if source.count(code) == 1)
        sources[at] = sources[at].replace(code, other)
    return sources


@pytest.mark.slow
@every_notebook
def test_runs_from_top_to_bottom(path, monkeypatch):
    """In this process, which has imported most; what is stored must not have disappeared."""
    plt.switch_backend("agg")
    monkeypatch.chdir(path.parent)
    names = {"__name__": "__main__"}
    for number, (code, stored) in enumerate(zip(changed(path), code_cells(path), strict=True)):
        place = f"{path.stem}, cell {number}"
        monkeypatch.setitem(linecache.cache, place, (len(code), None, code.splitlines(True), place))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(code, place, "exec"), names)
        found = ["stream"] * bool(said.getvalue()) + ["display_data"] * len(plt.get_fignums())
        plt.close("all")
        assert sorted(found) == sorted(output.output_type for output in stored.outputs), code
    mx.enable_compile()  # which 09 ends for its process


@pytest.mark.slow
def test_a_notebook_that_is_stored_anew():
    """As `make notebooks` executes it, by a kernel."""
    path = FOLDER / "07_metal_tensors.ipynb"
    fresh = [cell for cell in execute(path).cells if cell.cell_type == "code"]
    for cell, stored in zip(fresh, code_cells(path), strict=True):
        kinds = [[output.output_type for output in c.outputs] for c in (cell, stored)]
        assert kinds[0] == kinds[1], cell.source
