"""Reading and rewriting LLVM IR: address spaces that must not mix, recursion, and hooks.

The strict compile keeps MSL's address spaces apart in the IR: 1 device, 2 constant,
3 threadgroup, 4 generic, which is what ``thread`` became.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from os.path import join

from .errors import CompileError

_CAST = re.compile(
    r"(%[\w.]+) = addrspacecast ptr addrspace\(([123])\) \S+ to ptr(?: addrspace\(4\))?(?=[,\s]|$)"
)
_COPY = re.compile(r"call void @llvm\.mem(?:cpy|move)\.")
# Patterns begin with what Python searches for fast: a word, and only then what is in front of it.
_DEFINE = re.compile(r"define (?<=^define ).*?@([\w.$]+|\"[^\"]+\")\(", re.M)
_CALL = re.compile(r"call (?<=\bcall )[^@\n]*@([\w.$]+|\"[^\"]+\")\(")
_ALIGN = re.compile(r"\balign \d+")
_ATOMIC = re.compile(r"\b(?:atomicrmw|cmpxchg|atomic)\b")
_IDLE_CAST = re.compile(
    r"addrspacecast (\(?)ptr (?!addrspace)((?:(?! to ptr)[^\n])*?) to ptr(?! addrspace)"
)
_DECLARED = re.compile(r"^declare .*(@llvm\.[\w.]+).*\n?", re.M)
_NAMES = {"1": "device", "2": "constant", "3": "threadgroup"}


class Locations:
    """Source lines of instructions, from the debug metadata of a module."""

    def __init__(self, ir: str, hidden: str) -> None:
        self._nodes = dict(re.findall(r"^(!\d+) = (.*)$", ir, re.M))
        self._hidden = hidden

    def _field(self, node: str, name: str) -> str:
        m = re.search(rf"\b{name}: (\"[^\"]*\"|!?\w+)", self._nodes.get(node, ""))
        return m.group(1).strip('"') if m else ""

    def _file(self, scope: str) -> str:
        for _ in range(100):
            file = self._field(scope, "file")
            if file:
                return join(self._field(file, "directory"), self._field(file, "filename"))
            scope = self._field(scope, "scope")
        return ""

    def of(self, line: str) -> str:
        """``file:line`` of an instruction, outside the library's own headers where possible."""
        m = re.search(r"!dbg (!\d+)", line)
        return self._of(m.group(1)) if m else ""

    @functools.cache  # noqa: B019 - lives as long as one compilation
    def _of(self, node: str) -> str:
        found = ""
        while node:
            file = self._file(self._field(node, "scope"))
            found = f"{file.rsplit('/', 1)[-1]}:{self._field(node, 'line')}"
            if not file.startswith(self._hidden):
                break
            node = self._field(node, "inlinedAt")
        return found


def functions(ir: str) -> Iterator[tuple[str, str]]:
    """The functions defined in a module: name and text."""
    for m in _DEFINE.finditer(ir):
        yield m.group(1), ir[m.start() : ir.index("\n}", m.start())]


def demangle(name: str) -> str:
    """A mangled C++ name as people know it: its identifier alone."""
    m = re.match(r"_ZN?K?(?:\d+[a-z_]\w*?)?(\d+)", name)
    return name[m.end() : m.end() + int(m[1])] if m else name


def check(ir: str, locate: Callable[[str], str] = lambda line: "") -> None:
    """Refuse recursion, and ``thread`` pointers to other address spaces."""
    calls: dict[str, set[str]] = {}
    for name, body in functions(ir):
        calls[name] = set(_CALL.findall(body))
        for m in _CAST.finditer(body):
            use = re.compile(re.escape(m.group(1)) + r"(?![\w.])")
            lines = [x for x in body[m.end() :].split("\n") if use.search(x)]
            if all(_COPY.search(x) for x in lines):
                continue
            line = body[m.start() : body.find("\n", m.start())]
            raise CompileError(
                f"{locate(line)}: a {_NAMES[m.group(2)]} pointer or object is used where a thread "
                f"one is declared, in {demangle(name)}"
            )
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        raise CompileError(f"recursion: {demangle(error.args[1][0])} calls itself") from None


def unalign(ir: str) -> str:
    """Forget the alignment of vectors and structs in memory.

    MLX's arrays on a CPU begin at multiples of 8 bytes, views at any element, Metal's buffers at
    pages. Unaligned instructions are as fast.
    """
    out = []
    for line in ir.split("\n"):
        if "addrspace(" in line and not _ATOMIC.search(line):
            line = _ALIGN.sub("align 1", line)
        out.append(line)
    return "\n".join(out)


def collapse(ir: str, *, all_spaces: bool) -> str:
    """Merge address spaces: generic into the ordinary one, or all of them."""
    wanted = r"\d+" if all_spaces else "4"
    ir = re.sub(rf" addrspace\({wanted}\)", "", ir)
    # A cast within one address space is called a bitcast.
    ir = _IDLE_CAST.sub(r"bitcast \1ptr \2 to ptr", ir)
    suffix = r"\.p\d+" if all_spaces else r"\.p4"
    renamed = re.sub(
        rf"@llvm\.[\w.]*{suffix}[\w.]*", lambda m: re.sub(suffix + r"(?!\d)", ".p0", m.group()), ir
    )
    seen: set[str] = set()

    def once(m: re.Match[str]) -> str:
        again = m[1] in seen
        seen.add(m[1])
        return "" if again else m.group()

    return _DECLARED.sub(once, renamed)
