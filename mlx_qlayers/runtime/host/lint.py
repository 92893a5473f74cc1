"""Finds source text that one version of Metal's compiler accepts and another refuses.

MLX compiles kernels as Metal 3.1, 3.2, 4.0 or 4.1, by the version of macOS; a kernel has to be
right under all four. Clang sees to most of it; the rules here are those that it cannot know.
"""

from __future__ import annotations

import functools
import re

from .cpp_text import closing
from .errors import CompileError

_SPACES = re.compile(r"\b(device|constant|threadgroup|threadgroup_imageblock|thread)\b")
_BUILTIN = (
    r"(?:(?:packed_)?(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]?|"
    r"u?int(?:8|16|32|64)_t|b?float(?:16)?_t|size_t|ptrdiff_t|void|auto|unsigned|"
    r"float16_t|bfloat16_t|complex64_t|atomic_\w+)"
)
# To look for words takes a tenth of what their patterns would take.
_WORDS = {
    "double": "double does not exist in Metal",
    "virtual": "virtual functions do not exist in Metal",
    "goto": "goto does not exist in Metal",
    "new delete": "new and delete do not exist in Metal",
    "try catch throw": "exceptions do not exist in Metal",
    "dynamic_cast typeid": "run-time type information does not exist in Metal",
    "noexcept": "noexcept does not exist in Metal",
    "register thread_local": "this storage class does not exist in Metal",
    "extern": "extern declarations do not exist in Metal",
    "asm __asm __asm__": "there is no inline assembly in Metal",
}
_FORBIDDEN = {
    r"\b(?:thread|device|constant|threadgroup|kernel)\s*[.,;=\[+)]": (
        "this name is a word of the language"
    ),
    r"(?<![\w\])])\[\s*(?:[&=][^\]\[]*|[\w, ]*)\]\s*\([^()]*\)\s*(?:->\s*\w+\s*)?\{": (
        "lambdas are not part of Metal 3.1"
    ),
    r"\b(?:struct|class)\s+\w+(?:\s+final)?\s*:(?!:)": "derived classes are not part of Metal 3.1",
    r"(?<![:\w])vec\s*<": "write metal::vec: a bare vec is ambiguous under newer compilers",
    r"\bstd\s*::": "the C++ standard library does not exist in Metal; the names are in metal::",
    r"\bmemory_order_(?!relaxed\b)\w+": "before Metal 4.1 the only memory order is relaxed",
    r"\bunion\b.*\bhalf\b": "as_type converts bits; reading another member of a union does not",
    r"\b__(?:builtin|metal|qk|opencl)_\w+": "compiler internals differ between versions",
}


def _blanked(text: str) -> str:
    """The text with spaces for comments, strings, directives and attributes."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*|\[\[.*?\]\]'
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S | re.M)


def _types(text: str) -> str:
    names = re.findall(r"\b(?:typename|class|struct|enum|using)\s+([A-Za-z_]\w*)", text)
    names += re.findall(r"\btypedef\s[^;]*?(\w+)\s*;", text)
    names = sorted(set(names) - {"namespace", "metal", "class", "struct"})
    return "|".join([_BUILTIN, r"(?:metal\s*::\s*)?\w+\s*<[^<>;(){}]*>", *names])


def _unqualified(text: str) -> list[tuple[int, str]]:
    """Pointers and references whose address space is left out."""
    found = []
    pattern = re.compile(
        rf"(?<![\w:.])((?:metal\s*::\s*)?(?:{_types(text)}))\s*(?:const\s*)?(\*{{1,2}}|&(?!&))\s*"
        r"(?:const\s+)?(?:(?P<name>\w+)\s*(?=[,;)=\[({:])|(?=[)>,]))"
    )
    for m in pattern.finditer(text):
        begin = max(text.rfind(c, 0, m.start()) for c in ";{}(,<")
        before = text[begin + 1 : m.start()]
        if not _SPACES.search(before + m.group()) and "operator" not in before:
            what = "pointer" if "*" in m.group(2) else "reference"
            why = (
                f"this {what} names no address space: write device, constant, "
                "threadgroup or thread (Metal 4.1 would take it as generic)"
            )
            found.append((m.start(), why))
    return found


def _members(text: str) -> list[tuple[int, str]]:
    """Members that return ``thread`` references and are not themselves ``thread``."""
    found = []
    pattern = re.compile(
        r"\bthread\b[^;{}()=]*[&*]\s*(?:\w+|operator\s*\S+?|operator\s*\(\s*\))\s*\("
    )
    for struct in re.finditer(r"\b(?:struct|class)\b[^;{}()<>]*\{", text):
        begin, end = struct.end(), closing(text, struct.end() - 1)
        for m in pattern.finditer(text, begin, end):
            tail = re.compile(r"[^{;]*").match(text, closing(text, m.end() - 1))
            static = re.search(r"\bstatic\b[^;{}]*$", text[begin : m.start()])
            if tail and not static and not re.search(r"\bthread\b", tail.group()):
                why = (
                    "a member that returns a thread reference needs `thread` "
                    "behind its parameters: in Metal 4.1 `this` is generic"
                )
                found.append((m.start(), why))
    return found


def lint(text: str) -> list[str]:
    """List what some version of Metal's compiler refuses in a source, with line numbers."""
    found = []
    if bad := re.search(r"[^\x00-\x7f]", text):
        found.append((bad.start(), "MLX compiles ASCII only"))
    plain = _blanked(text)
    words = {rf"\b{w}\b": why for ws, why in _WORDS.items() for w in ws.split() if w in plain}
    for pattern, why in {**words, **_FORBIDDEN}.items():
        found += [(m.start(), why) for m in re.finditer(pattern, plain)]
    found += _unqualified(plain) + _members(plain)
    lines = [(plain.count("\n", 0, at) + 1, why) for at, why in sorted(found)]
    return [f"{line}: {why}" for line, why in lines]


@functools.lru_cache(maxsize=64)
def refuse(text: str) -> None:
    """Raise what :func:`lint` finds, as a CompileError."""
    if found := lint(text):
        lines = "\n".join(f"source.metal:{line}" for line in found)
        raise CompileError(f"not Metal for every version\n{lines}")
