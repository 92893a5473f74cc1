"""Kernels as the fast build of the host backend has them, for other processors than this one too.

Nothing runs: a launch is stopped ahead of its compiler, and the assembly that clang writes is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from mlx_qlayers import use_backend
from mlx_qlayers.runtime.host import bound_launch, compiler, toolchain
from mlx_qlayers.runtime.host import llvm_ir as ir
from mlx_qlayers.runtime.host import translate as source

_LABEL, _INSTRUCTION = re.compile(r"^(\.L\w+):"), re.compile(r"^\t(?:\{\w+\}\s+)?([a-z][^#]*)")
_JUMP = re.compile(r"^(?:j|b\.|cbn?z|tbn?z).*?(\.L\w+)")


class _Launched(Exception):
    """A launch reached its compiler: its text and function."""


def launched(run: Callable[[], object]) -> tuple[str, str]:
    """The text and the function that the host backend would compile for a call."""

    def stop(text: str, function: str, **_: object) -> None:
        raise _Launched(text, function)

    # As if it were compiled for the first time.
    again = mock.patch.object(bound_launch, "_compiled", bound_launch._compiled.__wrapped__)
    with use_backend("host"), again, mock.patch.object(bound_launch, "compile_source", stop):
        try:
            run()
        except _Launched as found:
            return found.args
    raise AssertionError("nothing was launched")


@contextmanager
def compiling_for(*target: str) -> Iterator[None]:
    """Compile for a platform, by flags that name a processor."""
    remembered = toolchain._surroundings, compiler._translated
    with mock.patch.object(toolchain, "target", lambda: ("-target", *target)):
        for each in remembered:
            each.cache_clear()
        yield
    for each in remembered:
        each.cache_clear()


def assembly(text: str, function: str, target: Sequence[str]) -> str:
    """A kernel as the fast build has it, for a platform and by flags that name a processor."""
    with compiling_for(*target):
        unit, _ = source.translate(compiler.preprocess(text, {}, 320), function, {})
        strict = compiler.strict(unit, checked=False, debug=False)
    fast = ir.collapse(ir.unalign(strict), all_spaces=True)
    intel = ["-masm=intel"] * target[0].startswith("x86")
    command = ["clang", "-x", "ir", "-target", *target, *intel, "-O3", "-S", "-o", "-", "-"]
    return toolchain.run(command, fast)[0]


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each innermost loop: from a label to the last jump back to it."""
    lines, at, ends = list[str](), dict[str, int](), dict[int, int]()
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            at[label[1]] = len(lines)
        elif found := _INSTRUCTION.match(line):
            lines.append(found[1].strip())
            if (jump := _JUMP.match(lines[-1])) and jump[1] in at:
                ends[at[jump[1]]] = len(lines)
    inner = ((b, e) for b, e in ends.items() if not any(b < c and d <= e for c, d in ends.items()))
    return [lines[begin:end] for begin, end in inner]
