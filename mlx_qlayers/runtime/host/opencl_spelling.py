"""Words of Metal that C++ for OpenCL spells otherwise, replaced in preprocessed source.

``thread`` becomes ``__generic`` on pointers and nothing elsewhere: unqualified is generic there,
and :mod:`llvm_ir` refuses what reaches it from another address space. Declarations with
``constant`` are const. Constructor calls of vectors become function calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .cpp_text import angle, closing, edit

_SCALARS = "char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"
_CONSTRUCTOR = re.compile(rf"(?<![\w.])(?:metal\s*::\s*)?({_SCALARS})([234])\s*\(")
_VEC = re.compile(r"(?<![\w.])(?:metal\s*::\s*)?vec\s*<")
_BFLOAT = re.compile(r"(?<![\w.])(?:bfloat|bfloat16_t)\s*\(")
_STATIC_CAST = re.compile(r"\bstatic_cast\s*<([^<>&*]*)>\s*\(")
# MLX's steel steps pointers by integral_constant objects, to which clang finds no `+=`.
_STRIDE = re.compile(r"\b(\w+) \+= (str_[xy]);")
_THREAD = re.compile(r"\b__qk_thread__\b")
_THREAD_POINTER = re.compile(r"\s*(?:(?:const|volatile|typename|struct|unsigned|signed)\b\s*)*")
_IDENTIFIER = re.compile(r"\s*(?:::)?\s*[A-Za-z_]\w*")
_CONST_REFERENCE = re.compile(
    r"\bconst\s+__qk_thread__\s+(\w+)\s*&(?!&)|\b__qk_thread__\s+const\s+(\w+)\s*&(?!&)"
)
_TEMPLATE_NAME = re.compile(r"\b(?:typename|class)\s+(\w+)")
_THREAD_REFERENCE = re.compile(r"\b__qk_thread__\s+([A-Za-z_]\w*)\s*&(?!&)")
_CONSTANT = re.compile(r"(?<!const )\b__constant\b(?!\s+const\b)")
_OPERATOR = re.compile(r"\boperator\s*$")
_OPENS = re.compile(r"\s*\(")
# One value in braces fills a whole vector.
_FILLED = re.compile(r"\s+\w+\s*(\{([^{},;]+)\})\s*;")


def _qualifies(text: str, start: int, marks: str) -> bool:
    """Whether the type that begins at ``start`` is followed by one of ``marks``."""
    i = start
    while True:
        i = _THREAD_POINTER.match(text, i).end()  # type: ignore[union-attr]
        m = _IDENTIFIER.match(text, i)
        if not m:
            break
        i = m.end()
        rest = re.compile(r"\s*").match(text, i).end()  # type: ignore[union-attr]
        if text[rest : rest + 1] == "<":
            i = angle(text, rest)
            if i < 0:
                return False
        m = re.compile(r"\s*(::|const\b|int\b|long\b|char\b|short\b)").match(text, i)
        if not m:
            break
        i = m.start() if m.group(1) == "::" else m.end()
        if m.group(1) != "::":
            break
    mark = re.compile(r"\s*(\S)").match(text, i)
    return bool(mark and mark.group(1) in marks)


def _opening(text: str, at: int) -> int:
    """The ``(`` of the parameter list that ``at`` lies in, or -1."""
    depth = 0
    for i in range(at - 1, max(0, at - 4000), -1):
        if text[i] == ")":
            depth += 1
        elif text[i] == "(":
            if depth == 0:
                return i
            depth -= 1
        elif text[i] in ";{}":
            break
    return -1


def _undeduced(text: str) -> str:
    """Keep address spaces out of template arguments that are deduced from ``thread T&`` parameters.

    ``T`` would be ``__private float``, of which the function cannot declare variables. If another
    parameter settles ``T`` the reference is not deduced from, else by way of a second parameter.
    """
    functions: dict[int, set[str]] = {}
    for m in _THREAD_REFERENCE.finditer(text):
        opening = _opening(text, m.start())
        if opening >= 0:
            functions.setdefault(opening, set()).add(m.group(1))
    edits: list[tuple[int, int, str]] = []
    for opening, names in functions.items():
        begin = max((text.rfind(c, 0, opening) for c in ";{}"), default=-1) + 1
        head = re.compile(r"\btemplate\s*<").search(text, begin, opening)
        if not head:
            continue
        end = angle(text, head.end() - 1)
        own = names & set(_TEMPLATE_NAME.findall(text[head.start() : end]))
        close = closing(text, opening)
        parameters, header = text[opening:close], text[head.start() : end]
        for name in sorted(own):
            reference = re.compile(rf"\b__qk_thread__\s+{name}\s*&")
            plain = f"metal::remove_addrspace_t<{name}>&"
            if not re.search(rf"\b{name}\b", reference.sub("", parameters)):
                plain = f"metal::remove_addrspace_t<qk_{name}>&"
                parameters = reference.sub(f"qk_{name}&", parameters, count=1)
                header = re.sub(rf"\b{name}\b", f"qk_{name}", header)[:-1]
                header += f", typename {name} = metal::remove_addrspace_t<qk_{name}>>"
            parameters = reference.sub(plain, parameters)
        if own:
            edits += [(head.start(), end, header), (opening, close, parameters)]
    return edit(text, edits)


def _constant(text: str) -> str:
    """Add const to declarations in the constant address space, where Metal implies it."""
    return _CONSTANT.sub(
        lambda m: "const __constant" if _qualifies(text, m.end(), "*&") else m.group(), text
    )


def _threads(text: str) -> str:
    names = set(_TEMPLATE_NAME.findall(text))

    def by_value(m: re.Match[str]) -> str:
        # A deduced reference would carry the address space of a local into T: pass a copy instead.
        name = m.group(1) or m.group(2)
        return f"{name} " if name in names else m.group()

    text = _undeduced(_CONST_REFERENCE.sub(by_value, text))
    return _THREAD.sub(lambda m: "__generic" if _qualifies(text, m.end(), "*") else "", text)


def _constructors(text: str) -> str:
    def declares(m: re.Match[str]) -> bool:
        return bool(_OPERATOR.search(text, max(0, m.start() - 24), m.start()))

    def becomes(call: str) -> Callable[[re.Match[str]], str]:
        return lambda m: m.group() if declares(m) else m.expand(call)

    text = _CONSTRUCTOR.sub(becomes(r"metal::qk_make<\1, \2>("), text)
    # Clang knows no conversion from half to bfloat, Metal does.
    text = _STATIC_CAST.sub(r"metal::qk_cast<\1>(", text)
    text = _BFLOAT.sub(becomes("metal::qk_cast<bfloat>("), text)
    edits = []
    for m in _VEC.finditer(text):
        end = angle(text, m.end() - 1)
        if end > 0 and not declares(m) and _OPENS.match(text, end):
            edits.append((*m.span(), "metal::qk_make<"))
        elif end > 0 and (filled := _FILLED.match(text, end)):
            made = f" = metal::qk_make<{text[m.end() : end]}({filled[2]})"
            edits.append((*filled.span(1), made))
    return edit(text, edits)


def respell(text: str) -> str:
    """Metal's words in the spelling of C++ for OpenCL."""
    text = _STRIDE.sub(r"\1 = \1 + \2;", text)
    return _constructors(_constant(_threads(text)))
