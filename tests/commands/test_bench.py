"""The benchmarks by one command: files, pictures, a summary, and what is said of failures."""

import csv
import shutil
import struct
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mlx_qlayers.cli import main
from mlx_qlayers.commands.bench import scripts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZE = (960, 720)


def size(picture: Path) -> tuple[int, ...]:
    """Width and height of a PNG file."""
    return struct.unpack(">II", picture.read_bytes()[16:24])


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(scripts()))


@pytest.fixture
def suite(monkeypatch):
    """A run of the command, with one family in one small size and one that fails."""
    suite, grid = import_module("suite"), import_module("bench_grid_sample")
    tiny = [grid.Case((1, 8, 8, 3), (5, 7))]
    cuts = {"CPU": lambda _: tiny, "GPU": lambda _: tiny}
    families = (
        suite.Family("grid_sample", "bench_grid_sample", small=cuts),
        suite.Family("broken", "bench_grid_sample", gpu=["--nonsense"], cpu=["--nonsense"]),
        suite.Family("elsewhere", "bench_grid_sample", gpu=None, cpu=None),
    )
    monkeypatch.setattr(suite, "FAMILIES", families)
    return suite


def test_a_run_leaves_tables_pictures_and_a_summary(suite, tmp_path, capsys):
    cases = import_module("bench_grid_sample").CPU
    assert main(["bench", "--quick", "--only", "grid_sample", "--out", str(tmp_path)]) == 0
    assert import_module("bench_grid_sample").CPU is cases
    (folder,) = tmp_path.iterdir()
    assert str(folder) in (out := capsys.readouterr().out) and "Please share" in out
    assert {path.name for path in folder.iterdir()} == {"README.md", "grid_sample.csv", "plots"}
    lines = (folder / "grid_sample.csv").read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("#"))
    assert {"date", "commit", "device", "mlx", "mlx-lm", "mlx-qlayers", "backend"} <= set(facts)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["path"] for row in rows[:2]] == ["operators", "reference"]
    (picture,) = (folder / "plots").iterdir()
    assert size(picture) == SIZE
    text = (folder / "README.md").read_text()
    assert (
        f"plots/{picture.name}" in text and "| 1x8x8x3 float32 bilinear random, forward |" in text
    )


def test_a_benchmark_that_fails_is_named_and_ends_nothing(suite, tmp_path, capsys):
    assert main(["bench", "--quick", "--out", str(tmp_path)]) == 2
    assert "RuntimeError: these benchmarks failed: broken" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert (folder / "grid_sample.csv").exists()


def test_the_families_are_all_scripts_and_constants():
    for family in import_module("suite").FAMILIES:
        script = import_module(family.script)
        assert callable(script.main)
        for name, cut in (family.small or {}).items():
            assert len(cut(getattr(script, name))) >= 1, name


def test_pictures_of_stored_results(tmp_path, capsys):
    for name in ("grid_sample", "grid_sample_cuda", "quantized_matmul", "generate"):
        shutil.copy(RESULTS / f"{name}.csv", tmp_path)
    assert main(["bench", "--from", str(tmp_path)]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.name for path in drawn} >= {
        *(f"grid_sample_{machine}.png" for machine in ("cpu", "cuda")),
        *(f"{name}_cpu.png" for name in ("quantized_matmul_rows", "tokens_per_second")),
    }
    assert all(size(path) == SIZE for path in drawn)


def test_pictures_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--from", str(tmp_path)]) == 2
    line = "mlx-qlayers: error: pictures need matplotlib: pip install 'mlx-qlayers[bench]'\n"
    assert capsys.readouterr().err == line


def test_a_folder_without_results(tmp_path, capsys):
    assert main(["bench", "--from", str(tmp_path)]) == 2
    assert "no results of benchmarks" in capsys.readouterr().err


def test_results_that_no_picture_shows(tmp_path, capsys):
    shutil.copy(RESULTS / "deformable.csv", tmp_path)
    assert main(["bench", "--from", str(tmp_path)]) == 0
    assert "error" not in capsys.readouterr().err
