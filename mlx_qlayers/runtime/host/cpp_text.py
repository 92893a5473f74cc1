"""Reading C++ text: where brackets close, how lists split, replacing parts of it."""

from __future__ import annotations

import re

from .errors import CompileError

_OPENERS = {"(": ")", "[": "]", "{": "}"}


def closing(text: str, start: int) -> int:
    """The index just past the bracket that closes the one at ``start``."""
    depth, pair = 0, (text[start], _OPENERS.get(text[start], ">"))
    for m in re.compile(r'"(?:\\.|[^"\\])*"|' + "|".join(map(re.escape, pair))).finditer(
        text, start
    ):
        if m.group() == pair[0]:
            depth += 1
        elif m.group() == pair[1]:
            depth -= 1
            if depth == 0:
                return m.end()
    raise CompileError(f"unbalanced {pair[0]} in: {text[start : start + 60]!r}")


def split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators that lie outside brackets, ``<>`` among them."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1 : i] != "-"):
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    parts.append(text[begin:])
    return [p.strip() for p in parts if p.strip()]


def angle(text: str, start: int) -> int:
    """The index past the ``>`` that closes the ``<`` at ``start``; brackets inside are skipped."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == "<":
            depth += 1
        elif c == ">":
            depth -= 1
            if depth == 0:
                return i + 1
        elif c in _OPENERS:
            i = closing(text, i) - 1
        elif c in ";":
            break
        i += 1
    return -1


def edit(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Replace parts of a text, keeping its lines, so that diagnostics name the right ones."""
    out, at = [], 0
    for begin, end, replacement in sorted(edits):
        lost = text.count("\n", begin, end) - replacement.count("\n")
        out += [text[at:begin], replacement, "\n" * lost]
        at = end
    return "".join([*out, text[at:]])
