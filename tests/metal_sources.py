"""Writes the Metal text of every kernel that a test run launches, for Apple's compiler.

A pytest plugin, which ``make metal-sources`` uses: ``PYTHONOPTIMIZE=1 pytest --assert=plain -p
tests.metal_sources --metal-sources build/metal``. Nothing is compiled and no kernel runs: a launch
gives zeros, and Python leaves assertions out, so that tests go on to their next launch. A test that
fails nevertheless counts for what it launched until then: ``make test`` is there to judge it.

The folder then holds each text once, as MLX hands it to the compiler on a Mac, ``utils.h`` (MLX's
preamble, which each text includes), and ``manifest.json``, a list with each text's ``file``,
``function``, ``kernel`` and, of its largest threadgroup, the ``threads``.
``tests/compile_metal_sources.py`` compiles them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_qlayers
from mlx_qlayers.conversion import verify
from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.host.toolchain import mlx_include
from mlx_qlayers.runtime.launch import Bound, Launch

MANIFEST = "manifest.json"
_FILES = {path.name for path in Path(mlx_qlayers.__file__).parent.rglob("*.metal")}
_UTILS = "mlx/backend/metal/kernels/utils.h"
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def flattened(header: str, seen: set[str]) -> str:
    """A header of MLX with the headers that it includes in their places, each once."""
    if header in seen:
        return ""
    seen.add(header)
    text = Path(mlx_include(), header).read_text()
    return _INCLUDE.sub(lambda match: flattened(match[1], seen), text.replace("#pragma once", ""))


class MetalSources:
    """Collects the texts of one process: what is bound, of the kernels that the package has."""

    def __init__(self, folder: Path, process: str) -> None:
        self.folder, self.process = folder, process
        self.launched: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def bind(self, launch: Launch) -> Bound:
        """In the place of the host backend's ``bind``: what it gives are zeros."""
        lines = itertools.chain(*launch.program.file_lines)
        if not _FILES.isdisjoint(line.partition(":")[0] for line in lines):
            self.keep(launch)
        outputs = list(zip(launch.output_shapes, launch.output_dtypes, strict=True))
        return lambda arrays: [mx.zeros(shape, dtype) for shape, dtype in outputs]

    def keep(self, launch: Launch) -> None:
        """Write the text of a launch, once."""
        name, threads = file_name(launch.text), prod(launch.threadgroup)
        kernel, path = launch.program.name, self.folder / name
        known = {"file": name, "function": launch.function, "kernel": kernel, "threads": 0}
        entry = self.launched.setdefault(name, known)
        entry["threads"] = max(entry["threads"], threads)
        if not path.exists():
            path.write_text(f'#include "utils.h"\n{launch.text}', encoding="ascii")

    def save(self) -> None:
        """Write this process's part of the manifest."""
        entries = json.dumps(list(self.launched.values()))
        (self.folder / f".{self.process}.{MANIFEST}").write_text(entries)


@cache
def file_name(text: str) -> str:
    """What a text is called in the folder: the same for the same text in every process."""
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
        host.bind = sources.bind
        # Nor does a conversion compare them.
        verify.rounding_error = lambda *_: (0.0, math.inf)
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


_KEY = pytest.StashKey[MetalSources]()
