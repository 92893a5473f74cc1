"""The wheel: complete, and enough for the demo in an environment that holds nothing else."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MODEL = Path("models") / "tales-qwen2"
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
PROJECT = (*FILES, "mlx_qlayers", "benchmarks", MODEL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that a source distribution builds, which shows what that one lacks."""
    out = tmp_path_factory.mktemp("dist")
    source = out / "source"  # a build writes beside its sources
    for name in PROJECT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    run([sys.executable, "-m", "build", "--outdir", str(out), str(source)], out)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_wheel_has_every_file(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "mlx_qlayers").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {f"mlx_qlayers/_models/{MODEL.name}/{p.name}" for p in (ROOT / MODEL).iterdir()}
    wanted |= {f"mlx_qlayers/_benchmarks/{p.name}" for p in (ROOT / "benchmarks").glob("*.py")}
    assert names == wanted


@pytest.mark.slow
def test_demo_runs_from_the_wheel(wheel, tmp_path):
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*install, "--no-compile", "--no-deps", "--no-index", str(wheel)], tmp_path)
    (site,) = tmp_path.glob("env/lib/*/site-packages")
    (own,) = metadata.distributions(name="mlx_qlayers", path=[str(site)])
    link_requirements(own, () if sys.platform == "darwin" else ("cpu",), site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = str(tmp_path / "env" / "bin" / "mlx-qlayers")
    out = run([command, "demo", "--max-tokens", "4"], elsewhere)
    assert "stock mlx-lm" in out and "Once upon a time" in out
    script = "from mlx_qlayers.commands.bench import scripts; print(scripts())"
    assert run([python, "-c", script], elsewhere).startswith(str(tmp_path / "env"))


def link_requirements(package: metadata.Distribution, extras: tuple[str, ...], site: Path) -> None:
    """Give an environment what a package asks for, as pip would, from this environment's files."""
    for requirement in map(Requirement, package.requires or ()):
        wanted = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker and not any(map(requirement.marker.evaluate, wanted)):
            continue
        found = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), requirement
        names = {path.parts[0] for path in found.files or () if path.parts[0] != ".."}
        new = [name for name in names if not (site / name).exists()]
        for name in new:
            (site / name).symlink_to(found.locate_file(name))
        if new or requirement.extras:
            link_requirements(found, tuple(requirement.extras), site)


def test_floors_are_those_that_are_tested():
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    tested = dict(
        line.split("==")
        for line in (ROOT / "tests" / "floors.txt").read_text().splitlines()
        if "==" in line
    )
    for dependency in dependencies:
        name, floor = dependency.split(">=")
        assert f"{tested[name]}.".startswith(f"{floor}."), dependency


def test_citation_names_this_version():
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def run(command: list[str], folder: Path) -> str:
    """The output of a command that sees nothing of this environment's packages."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
