"""Declarations of kernels: the file, the arguments and the requirements."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .devices.record import MAX_THREADS
from .parse import parse
from .program import Program
from .source import METAL, OPERATIONS, SourceError


class KernelError(ValueError):
    """A kernel's declaration or a call of it is wrong; the message names the kernel."""


class Multiple(NamedTuple):
    """The extent of an input's axis is a multiple of a number, or of a template parameter."""

    input: str
    axis: int
    of: int | str


@dataclass(frozen=True, eq=False)
class Declaration:
    """The fields of a :class:`~mlx_qlayers.runtime.kernel.Kernel`, and the text they stand for."""

    name: str
    file: str | Path
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    template: tuple[str, ...] | None = None
    function: str = ""
    omitted: tuple[str, ...] = ()
    atomic_outputs: bool = False
    max_threads: int = MAX_THREADS
    threadgroup_memory: int | Callable[..., int] = 0
    registers: int | Callable[..., int] = 0
    multiples: tuple[Multiple, ...] = ()
    large: bool = False
    ensure_row_contiguous: bool = True
    errors: tuple[str, ...] = ()
    folder: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.folder is None:
            # That of the Python file which declares the kernel, behind the generated __init__.
            beside = sys._getframe(2).f_globals.get("__file__")
            object.__setattr__(self, "folder", Path(beside).parent if beside else Path())

    @cached_property
    def program(self) -> Program:
        """The kernel's text, read from its file at first use; a KernelError if that is another."""
        program = self._load(self.name)
        for what, declared, written in (
            ("inputs", self.inputs, program.input_names),
            ("outputs", self.outputs, program.output_names),
            ("template", self.template, tuple(name for name, _ in program.template)),
            ("atomic_outputs", self.atomic_outputs, program.atomic_outputs),
        ):
            if declared not in (None, written):
                file = self._source[0].name
                raise self.error(f"{what} declared as {declared}, {file} has {written}")
        if self.max_threads > MAX_THREADS:
            raise self.error(f"max_threads is {self.max_threads}, Metal has {MAX_THREADS}")
        return program

    @cached_property
    def program_with_health(self) -> Program:
        """The text with the health buffer of the debug mode as one more output."""
        return self._load(f"{self.name}_health", health=True)

    def _load(self, name: str, *, health: bool = False) -> Program:
        path, text = self._source
        try:
            return parse(
                path,
                self.function or self.name,
                name,
                text=text,
                ensure_row_contiguous=self.ensure_row_contiguous,
                health=health,
                omitted=self.omitted,
            )
        except (SourceError, OSError) as error:
            raise self.error(str(error)) from error

    @cached_property
    def _source(self) -> tuple[Path, str | None]:
        """Where the text is and, if it was given here, the text itself."""
        beside = self.folder or Path()
        if isinstance(self.file, str) and re.search(r"[\n{]", self.file):
            return beside / f"{self.name}.metal", self.file
        # A plain name is one of the package's own before it is one of the caller's.
        own, others = [METAL, OPERATIONS], [beside, Path()]
        folders = own + others if isinstance(self.file, str) else others + own
        for path in [folder / self.file for folder in folders]:
            if path.is_file():
                return path, None
        looked = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
        raise self.error(f"No such file: {self.file}, looked up in {looked}")

    def error(self, message: str) -> KernelError:
        """An error that names the kernel."""
        return KernelError(f"kernel {self.name}: {message}")
