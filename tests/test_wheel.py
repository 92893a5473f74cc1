"""The wheel: complete, and enough for the demo in an environment that holds nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".metal", ".h", ".cpp", ".json", ".typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a source distribution builds, which shows what that one lacks."""
    out = tmp_path_factory.mktemp("dist")
    # Builds share build/ and *.egg-info with others that run at the same time, unless copied.
    source = out / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith((".ci", "tests", "notebooks")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run([sys.executable, "-m", "build", "--outdir", str(out), str(source)], out)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_has_every_file(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "mlx_qlayers").rglob("*")
        if path.suffix in SOURCES or path.name == "py.typed"
    }
    model = ROOT / "models" / "tales-qwen2"
    wanted |= {f"mlx_qlayers/_models/{model.name}/{path.name}" for path in model.iterdir()}
    assert names == wanted


@pytest.mark.slow
def test_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", str(tmp_path / "env")], tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    extra = "" if sys.platform == "darwin" else "[cpu]"
    run([python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}"], tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = str(tmp_path / "env" / "bin" / "mlx-qlayers")
    out = run([command, "demo", "--max-tokens", "10"], elsewhere)
    assert "stock mlx-lm" in out and "Once upon a time" in out
    where = run([python, "-c", "import mlx_qlayers; print(mlx_qlayers.__file__)"], elsewhere)
    assert where.startswith(str(tmp_path / "env"))


def run(command: list[str], folder: Path) -> str:
    """The output of a command that sees nothing of this environment's packages."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
