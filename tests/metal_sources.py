"""Writes the Metal text of every kernel that a test run launches, for Apple's compiler.

A pytest plugin, which ``make metal-sources`` uses: ``pytest -p tests.metal_sources --metal-sources
build/metal``. The folder then holds each text once, as MLX hands it to the compiler on a Mac,
``utils.h`` (MLX's preamble, which each text includes), and ``manifest.json``, a list with each
text's ``file``, ``function``, ``kernel`` and, of its largest threadgroup, the ``threads``.
``tests/compile_metal_sources.py`` compiles them.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.host import bound_launch
from mlx_qlayers.runtime.host.toolchain import mlx_include
from mlx_qlayers.runtime.launch import Bound, Launch

MANIFEST = "manifest.json"
PREAMBLE, bind, compile_source = bound_launch._PREAMBLE, host.bind, bound_launch.compile_source
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
    """Collects the texts of one process: what is launched, once the host backend has compiled it.

    Tests also launch kernels that the strict compiler is to refuse; those stay out.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.folder, self.process = folder, process
        self.launched: dict[str, dict[str, Any]] = {}
        self.compiled: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def bind(self, launch: Launch) -> Bound:
        """In the place of the host backend's ``bind``."""
        bound = bind(launch)
        name, threads = file_name(launch.text), prod(launch.threadgroup)
        entry = self.launched.setdefault(
            name,
            {
                "file": name,
                "function": launch.function,
                "kernel": launch.program.name,
                "threads": threads,
            },
        )
        entry["threads"] = max(entry["threads"], threads)
        return bound

    def compile_source(self, text: str, function: str, **options: Any) -> Any:
        """In the place of its ``compile_source``."""
        kernel = compile_source(text, function, **options)
        text = text.removeprefix(PREAMBLE)
        name = file_name(text)
        if name not in self.compiled:
            self.compiled.add(name)
            (self.folder / name).write_text(f'#include "utils.h"\n{text}', encoding="ascii")
        return kernel

    def save(self) -> None:
        """Write this process's part of the manifest."""
        entries = [entry for name, entry in self.launched.items() if name in self.compiled]
        (self.folder / f".{self.process}.{MANIFEST}").write_text(json.dumps(entries))


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
        host.bind, bound_launch.compile_source = sources.bind, sources.compile_source


def pytest_unconfigure(config: pytest.Config) -> None:
    sources = config.stash.get(_KEY, None)
    if sources is not None:
        sources.save()
        if sources.process == "main":
            print(f"{len(merge(sources.folder))} Metal texts in {sources.folder}")


_KEY = pytest.StashKey[MetalSources]()
