"""The examples in docstrings, README.md, CONTRIBUTING.md and docs/, executed without a network."""

import doctest
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf_files import save_qwen2

import mlx_qlayers
from mlx_qlayers import explain
from mlx_qlayers.cli import main
from mlx_qlayers.commands.demo import shipped_model

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "mlx_qlayers").rglob("*.py")
    if ">>>" in path.read_text()
)
# Starts a GPU capture, for which the process must have been started with MTL_CAPTURE_ENABLED.
NOT_RUN = {"mlx_qlayers.runtime.capture.capture"}
# Names that an example need not import.
NAMES = {"mx": mx, "nn": nn} | {name: getattr(mlx_qlayers, name) for name in mlx_qlayers.__all__}
BLOCK = re.compile(r"^ *```(python|sh)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
SAYS = {"README.md": "55 swapped", "CONTRIBUTING.md": "60 bytes read", "models.md": "sons"}
SAYS["serving.md"] = "4 bits in caches, rotated"
PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page.name == "models.md" else ())
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
    if "```python" in page.read_text()
]


@pytest.fixture(autouse=True)
def elsewhere(plain_model, tmp_path, monkeypatch):
    """A folder with ``models``, and a cache of the Hub that holds small models by known names."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    hub = {"Qwen--Qwen2-7B-Instruct-MLX": shipped_model(), "Qwen--Qwen2-0.5B-Instruct": plain_model}
    for name, model in hub.items():
        repository = tmp_path / "hub" / f"models--{name}"
        shutil.copytree(model, repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
    save_qwen2(tmp_path / "qwen2.5-0.5b-instruct-q4_0.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    explain(reset=True)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    module = import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    found = finder.find(module, name, globs=NAMES | vars(module))
    for test in found:
        if test.name not in NOT_RUN:
            runner.run(test)
    assert sum(bool(test.examples) for test in found) and not runner.failures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_pages(page, capsys):
    """A comment behind a ``print`` is what it prints. Commands are run where they are in docs/."""
    blocks = BLOCK.findall(page.read_text())
    names: dict[str, object] = {}
    for language, code in blocks:
        if language == "python":
            exec(compile(dedent(code), page.name, "exec"), names)
        elif page.parent == ROOT / "docs":
            run_commands(code)
    expected = [text for _, code in blocks for text in PRINTED.findall(code)]
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line in expected] == expected
    assert expected or SAYS[page.name] in printed


def run_commands(code: str) -> None:
    for line in code.replace("\\\n", "").splitlines():
        name, *arguments = shlex.split(line)
        if name == "mlx-qlayers" and arguments[0] not in ("chat", "server"):
            assert main(arguments) == 0, line
