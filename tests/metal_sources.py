"""Writes the Metal text of every kernel that a test run launches, for Apple's compiler.

A pytest plugin, which ``make metal-sources`` uses: ``PYTHONOPTIMIZE=1 pytest -p tests.metal_sources
--metal-sources build/metal``. Nothing is compiled and no kernel runs: launches give zeros. All that
tests assert is computed, since it may launch, and nothing comes of it, so that they go on to their
next launch. A test that fails nevertheless counts for what it launched until then: ``make test`` is
there to judge it.

The folder then holds each text once, as MLX hands it to the compiler on a Mac, ``utils.h`` (MLX's
preamble, which each text includes), and ``manifest.json``, a list with each text's ``file``,
``function``, ``kernel``, as which it is ``declared`` in the package and, of its largest
threadgroup, the ``threads``. ``tests/compile_metal_sources.py`` compiles them; ``python -m
tests.metal_sources build/metal`` exits with 1 if the folder lacks a kernel of the package.
"""

import ast
import hashlib
import json
import math
import re
import sys
from bisect import bisect
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from _pytest.assertion import rewrite

import mlx_qlayers
from mlx_qlayers.conversion import verify
from mlx_qlayers.runtime import host, metal
from mlx_qlayers.runtime.explain import count
from mlx_qlayers.runtime.host import bound_launch
from mlx_qlayers.runtime.host.runtime_library import Counters
from mlx_qlayers.runtime.host.toolchain import mlx_include
from mlx_qlayers.runtime.launch import Bound, Launch
from mlx_qlayers.runtime.program import Program
from mlx_qlayers.tuning.evaluator import Evaluator

MANIFEST = "manifest.json"
_DECLARED = re.compile(r"^\[\[kernel\]\] void (\w+)")
_UTILS = "mlx/backend/metal/kernels/utils.h"
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def flattened(header: str, seen: set[str]) -> str:
    """A header of MLX with the headers that it includes in their places, each once."""
    if header in seen:
        return ""
    seen.add(header)
    text = Path(mlx_include(), header).read_text()
    return _INCLUDE.sub(lambda match: flattened(match[1], seen), text.replace("#pragma once", ""))


@cache
def declarations() -> dict[str, list[tuple[int, str]]]:
    """The kernels of the package: by file their lines and names."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in Path(mlx_qlayers.__file__).parent.rglob("*.metal"):
        lines = enumerate(path.read_text().splitlines(), 1)
        found[path.name] = [(i, m[1]) for i, line in lines if (m := _DECLARED.match(line))]
    return found


@cache
def declared(program: Program) -> str:
    """The kernel of the package whose body a program has; nothing if it is not one of these."""
    file, _, line = (program.file_lines[1] or ("",))[-1].partition(":")
    kernels = declarations().get(file, [])
    before = bisect(kernels, int(line or 0), key=lambda each: each[0])
    return kernels[before - 1][1] if before else ""


class _Evaluated(ast.NodeTransformer):
    """Has what is asserted computed, whatever comes of it."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        ignored = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        return ast.copy_location(ast.Try([ast.Expr(node.test)], [ignored], [], []), node)


def evaluated(module: ast.Module, *_: Any) -> None:
    """In the place of what pytest makes of a test's assertions."""
    ast.fix_missing_locations(_Evaluated().visit(module))


class MetalSources:
    """Collects the texts of one process: what is bound, of the kernels that the package has."""

    def __init__(self, folder: Path, process: str) -> None:
        self.folder, self.process = folder, process
        self.launched: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def bind(self, launch: Launch) -> Bound:
        """In the place of the host backend's ``bind``: what it gives are zeros, and counts."""
        self.keep(launch)
        outputs = list(zip(launch.output_shapes, launch.output_dtypes, strict=True))
        rows, counted = launch.rows("host"), (launch.program.name, _ONE_OF_EACH)

        def zeros(arrays: list[mx.array]) -> list[mx.array]:
            count(rows)
            if (report := bound_launch._report.get()) is not None:
                report.launches.append(counted)
            mx.eval(found := [mx.zeros(shape, dtype) for shape, dtype in outputs])
            return found  # with values, as other threads may need them

        return zeros

    def bind_on_metal(self, launch: Launch) -> Bound:
        """Likewise on a Mac that a test pretends."""
        self.keep(launch)
        return _BIND_ON_METAL(launch)

    def keep(self, launch: Launch) -> None:
        """Write the text of a launch of the package's kernels once, and what an M1 makes of it."""
        if kernel := declared(launch.program):
            for text in {launch.text, metal.widened(launch.text)}:
                self.keep_text(text, launch, kernel)

    def keep_text(self, text: str, launch: Launch, kernel: str) -> None:
        name, function = file_name(text), launch.function
        entry = {"file": name, "function": function, "kernel": launch.program.name}
        entry = self.launched.setdefault(name, {**entry, "declared": kernel, "threads": 0})
        entry["threads"] = max(entry["threads"], prod(launch.threadgroup))
        path = self.folder / name
        if not path.exists():
            path.write_text(f'#include "utils.h"\n{text}', encoding="ascii")

    def save(self) -> None:
        """Write this process's part of the manifest."""
        entries = json.dumps(list(self.launched.values()))
        (self.folder / f".{self.process}.{MANIFEST}").write_text(entries)


@cache
def file_name(text: str) -> str:
    """The name of a text in the folder: the same for the same text in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:24] + ".metal"


def merge(folder: Path) -> list[dict[str, Any]]:
    """Write a folder's manifest from those of the processes that filled it."""
    merged: dict[str, dict[str, Any]] = {}
    for part in folder.glob(f".*.{MANIFEST}"):
        for entry in json.loads(part.read_text()):
            same = merged.setdefault(entry["file"], entry)
            same["threads"] = max(same["threads"], entry["threads"])
        part.unlink()
    entries = sorted(merged.values(), key=lambda entry: (entry["kernel"], entry["function"]))
    (folder / "utils.h").write_text(flattened(_UTILS, set()))
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1) + "\n")
    return entries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--metal-sources", type=Path, help="write the Metal texts into this folder")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--metal-sources")
    if folder is not None:
        worker = getattr(config, "workerinput", {"workerid": "main"})["workerid"]
        sources = config.stash[_KEY] = MetalSources(folder.absolute(), worker)
        host.bind, metal.bind = sources.bind, sources.bind_on_metal
        # Of tests and of what they share, beside their usual bytecode.
        rewrite.rewrite_asserts, rewrite.PYC_TAIL = evaluated, ".metal-sources.pyc"
        pytest.register_assert_rewrite(*{p.stem for p in Path(__file__).parent.iterdir()}, "tests")
        # Nor do a conversion and the tuner compare them.
        verify.rounding_error = lambda *_: (0.0, math.inf)
        Evaluator._error = lambda *_: None
        for name in ("assert_allclose", "assert_array_equal"):
            setattr(np.testing, name, lambda *_, **__: None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Tests fail where kernels give zeros."""
    if _KEY in session.config.stash and exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_unconfigure(config: pytest.Config) -> None:
    sources = config.stash.get(_KEY, None)
    if sources is not None:
        sources.save()
        if sources.process == "main":
            print(f"{len(merge(sources.folder))} Metal texts in {sources.folder}")


def main(folder: str) -> int:
    """Say which kernels of the package a folder lacks; 1 if there are any."""
    every = {name for kernels in declarations().values() for _, name in kernels}
    there = {entry["declared"] for entry in json.loads(Path(folder, MANIFEST).read_text())}
    lacking = sorted(every - there)
    print(f"{len(every) - len(lacking)} of {len(every)} kernels;", *lacking or ["none"], "lacking")
    return int(bool(lacking))


_BIND_ON_METAL = metal.bind
_ONE_OF_EACH = Counters(*[1] * len(Counters._fields_))
_KEY = pytest.StashKey[MetalSources]()

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
