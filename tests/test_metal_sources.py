"""The texts for Apple's compiler, and the program that compiles them on a Mac."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_qlayers.metal import records  # noqa: F401, the modules of all kernels
from mlx_qlayers.runtime.kernel import Kernel
from tests import compile_metal_sources
from tests.metal_sources import MANIFEST, declared, evaluated, main

ROOT = Path(__file__).parents[1]
# As Apple's compiler drives: it knows two versions, and refuses a text that says so.
XCRUN = """#!/bin/sh
case "$*" in *metal4.0*) echo "invalid value" >&2; exit 1;; esac
for x; do
  case "$x" in
    *.metal) if grep -q refuse_me "$x"; then echo "error: refused" >&2; exit 1; fi;;
  esac
done
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The files that a run of one small test file writes."""
    folder = tmp_path_factory.mktemp("sources") / "metal"
    cache = folder.parent / "cache"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.metal_sources"]
    command += ["--metal-sources", str(folder), "tests/ops/test_exp.py"]
    changed = {"PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": "1", "MLX_QLAYERS_CACHE_DIR": str(cache)}
    environment = {**os.environ, **changed}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert not [*cache.rglob("*.so")]  # nothing was compiled, and what failed does not count
    return folder


def test_each_text_is_there_once(sources):
    entries = json.loads((sources / MANIFEST).read_text())
    assert entries and len({e["file"] for e in entries}) == len(entries)
    assert {path.name for path in sources.glob("*.metal")} == {e["file"] for e in entries}
    for entry in entries:
        text = (sources / entry["file"]).read_text(encoding="ascii")
        assert text.startswith('#include "utils.h"\n')
        assert entry["function"] in text and 0 < entry["threads"] <= 1024
    preamble = (sources / "utils.h").read_text()
    assert '#include "' not in preamble and "elem_to_loc" in preamble
    assert sorted(p.name for p in sources.iterdir() if p.name.startswith(".")) == []


def test_a_text_is_of_the_kernel_that_ends_where_it_ends():
    rooms = "mlx_qlayers.metal.", "mlx_qlayers.ops."
    modules = [module for name, module in sys.modules.items() if name.startswith(rooms)]
    kernels = [x for module in modules for x in vars(module).values() if isinstance(x, Kernel)]
    assert len(kernels) > 20
    assert [declared(x.program) for x in kernels] == [x.function or x.name for x in kernels]


def test_kernels_that_no_test_launched_are_named(sources, capsys):
    assert main(str(sources)) == 1
    said = capsys.readouterr().out
    assert "; attention_backward_keys " in said and " qmv " in said and "exp_forward" not in said


def test_what_is_asserted_is_computed_and_comes_to_nothing():
    tree, found = ast.parse("for i in 1, 0, 2:\n  assert found.append(1 / i), i"), []
    evaluated(tree)
    exec(compile(tree, "", "exec", optimize=2), {"found": found})
    assert found == [1.0, 0.5]


@pytest.fixture
def xcode(monkeypatch, tmp_path):
    """Stand-ins for Apple's compiler and framework: pipelines of at most 512 threads."""
    program = tmp_path / "bin" / "xcrun"
    program.parent.mkdir()
    program.write_text(XCRUN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    state = SimpleNamespace(
        maxTotalThreadsPerThreadgroup=lambda: 512, staticThreadgroupMemoryLength=lambda: 64
    )
    library = SimpleNamespace(newFunctionWithName_=lambda name: name)
    device = SimpleNamespace(
        newLibraryWithURL_error_=lambda url, error: (library, None),
        newComputePipelineStateWithFunction_error_=lambda name, error: (
            (None, "no such function") if "missing" in name else (state, None)
        ),
    )
    metal = SimpleNamespace(MTLCreateSystemDefaultDevice=lambda: device)
    foundation = SimpleNamespace(NSURL=SimpleNamespace(fileURLWithPath_=str))
    monkeypatch.setitem(sys.modules, "Metal", metal)
    monkeypatch.setitem(sys.modules, "Foundation", foundation)


def entry(folder: Path, function: str, threads: int) -> dict[str, object]:
    (folder / f"{function}.metal").write_text(function)
    return {
        "file": f"{function}.metal",
        "function": function,
        "kernel": function,
        "threads": threads,
    }


@pytest.mark.parametrize(
    ("function", "threads", "wrong"),
    [
        ("good", 512, ""),
        ("large", 513, "launched with 513 threads, at most 512 are possible"),
        ("refuse_me", 32, "error: refused"),
        ("missing", 32, "no such function"),
    ],
)
def test_what_apple_refuses_fails(xcode, tmp_path, capsys, function, threads, wrong):
    (tmp_path / MANIFEST).write_text(json.dumps([entry(tmp_path, function, threads)]))
    assert compile_metal_sources.main([str(tmp_path)]) == bool(wrong)
    table = json.loads((tmp_path / "pipelines.json").read_text())
    assert [row["version"] for row in table] == ["3.1", "3.2"]
    printed = capsys.readouterr()
    assert "Metal 4.0: not installed" in printed.out
    assert wrong in printed.err
    if not wrong:
        assert {(row["max_threads"], row["memory"]) for row in table} == {(512, 64)}


def test_a_version_that_is_needed_and_not_known_fails(xcode, tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps([entry(tmp_path, "good", 32)]))
    known = [str(tmp_path), "--needs", "3.1", "3.2"]
    assert [compile_metal_sources.main(x) for x in (known, [*known, "4.0"])] == [0, 1]


def test_without_a_compiler_it_fails(monkeypatch, tmp_path, xcode):
    (tmp_path / MANIFEST).write_text("[]")
    monkeypatch.setattr(compile_metal_sources, "VERSIONS", ("4.0",))
    assert compile_metal_sources.main([str(tmp_path)]) == 1
