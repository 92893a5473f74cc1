"""From preprocessed Metal source to C++ for OpenCL: the few constructs that need other words.

``thread`` becomes ``__generic`` on pointers and nothing elsewhere (unqualified is generic there,
and :mod:`ir` refuses what reaches it from another address space), vector constructor calls become
function calls, ``threadgroup`` variables of kernels become references to the runtime's storage, and
the entry point that fills the kernel's parameters is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .errors import CompileError

_SCALARS = "char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"
_CONSTRUCTOR = re.compile(rf"(?<![\w.])(?:metal\s*::\s*)?({_SCALARS})([234])\s*\(")
_VEC = re.compile(r"(?<![\w.])(?:metal\s*::\s*)?vec\s*<")
_BFLOAT = re.compile(r"(?<![\w.])(?:bfloat|bfloat16_t)\s*\(")
_STATIC_CAST = re.compile(r"\bstatic_cast\s*<([^<>&*]*)>\s*\(")
# MLX's steel steps pointers by integral_constant objects, to which clang finds no `+=`.
_STRIDE = re.compile(r"\b(\w+) \+= (str_[xy]);")
_KERNEL = re.compile(r"\b__qk_kernel__\b")
_THREAD = re.compile(r"\b__qk_thread__\b")
_THREAD_POINTER = re.compile(r"\s*(?:(?:const|volatile|typename|struct|unsigned|signed)\b\s*)*")
_IDENTIFIER = re.compile(r"\s*(?:::)?\s*[A-Za-z_]\w*")
_CONST_REFERENCE = re.compile(
    r"\bconst\s+__qk_thread__\s+(\w+)\s*&(?!&)|\b__qk_thread__\s+const\s+(\w+)\s*&(?!&)"
)
_TEMPLATE_NAME = re.compile(r"\b(?:typename|class)\s+(\w+)")
_FUNCTION_CONSTANT = re.compile(
    r"__constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\d+)\s*\)\s*\]\]\s*;"
)
_DEFINED = re.compile(r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)")
_HOST_NAME = re.compile(r"host_name\s*\(\s*((?:\"[^\"]*\"\s*)+)\)")
_OPENERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its name and what its attribute asks for."""

    name: str
    attribute: str
    index: int = 0
    optional: bool = False  # only there where a function constant asks for it


@dataclass(frozen=True)
class Signature:
    """What the entry point needs to know of a kernel."""

    expression: str
    parameters: tuple[Parameter, ...]
    shared: tuple[str, ...] = ()

    @property
    def buffers(self) -> dict[int, Parameter]:
        """The buffer parameters by index."""
        return {p.index: p for p in self.parameters if p.attribute == "buffer"}


@dataclass
class _Kernel:
    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[int, int]
    shared: list[str] = field(default_factory=list)


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


def _angle(text: str, start: int) -> int:
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
            i = _angle(text, rest)
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


_THREAD_REFERENCE = re.compile(r"\b__qk_thread__\s+([A-Za-z_]\w*)\s*&(?!&)")


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
    """Keep address spaces out of template arguments deduced from ``thread T&`` parameters.

    ``T`` would become ``__private float`` or ``__generic float``, of which the function cannot
    declare variables. Where another parameter settles ``T`` the reference is not deduced from;
    else a second parameter is, and ``T`` is what remains of it without its address space.
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
        end = _angle(text, head.end() - 1)
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
    return _edit(text, edits)


def _edit(text: str, edits: list[tuple[int, int, str]]) -> str:
    """Replace parts of a text, keeping its lines, so that diagnostics name the right ones."""
    out, at = [], 0
    for begin, end, replacement in sorted(edits):
        lost = text.count("\n", begin, end) - replacement.count("\n")
        out += [text[at:begin], replacement, "\n" * lost]
        at = end
    return "".join([*out, text[at:]])


_CONSTANT = re.compile(r"(?<!const )\b__constant\b(?!\s+const\b)")


def _constant(text: str) -> str:
    """What lies in the constant address space is const without saying so."""
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
    def vector(m: re.Match[str]) -> str:
        if re.search(r"\boperator\s*$", text[max(0, m.start() - 24) : m.start()]):
            return m.group()
        return f"metal::qk_make<{m.group(1)}, {m.group(2)}>("

    def bfloat(m: re.Match[str]) -> str:
        declares = re.search(r"\boperator\s*$", text[max(0, m.start() - 24) : m.start()])
        return m.group() if declares else "metal::qk_cast<bfloat>("

    text = _CONSTRUCTOR.sub(vector, text)
    # Clang knows no conversion from half to bfloat, Metal does.
    text = _STATIC_CAST.sub(r"metal::qk_cast<\1>(", text)
    text = _BFLOAT.sub(bfloat, text)
    out, at = [], 0
    for m in _VEC.finditer(text):
        end = _angle(text, m.end() - 1)
        before = text[max(0, m.start() - 40) : m.start()]
        if end < 0 or not re.compile(r"\s*\(").match(text, end) or "operator" in before[-12:]:
            continue
        out += [text[at : m.start()], "metal::qk_make<", text[m.end() : end]]
        at = end
    return "".join([*out, text[at:]])


def _constants(text: str, constants: Mapping[int, object]) -> str:
    defined = {}

    def define(m: re.Match[str]) -> str:
        kind, name, index = m.group(1), m.group(2), int(m.group(3))
        defined[name] = index in constants
        value = constants.get(index, 0)
        literal = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"constexpr __constant {kind} {name} = ({kind})({literal});"

    text = _FUNCTION_CONSTANT.sub(define, text)
    return _DEFINED.sub(lambda m: str(defined.get(m.group(1), False)).lower(), text)


def _parameter(text: str) -> Parameter:
    attributes = " , ".join(re.findall(r"\[\[(.*?)\]\]", text, re.S))
    plain = re.sub(r"\[\[.*?\]\]", "", text, flags=re.S).strip()
    named = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", plain)
    name = named.group(1) if named else ""
    if m := re.search(r"\b(buffer|__local)\s*\(\s*(\d+)\s*\)", attributes):
        kind = "buffer" if m.group(1) == "buffer" else "threadgroup"
        return Parameter(name, kind, int(m.group(2)), "function_constant" in attributes)
    if not attributes and re.search(r"[*&]", plain):
        return Parameter(name, "buffer", -1)
    return Parameter(name, attributes.split(",")[0].strip())


def _parameters(text: str) -> tuple[Parameter, ...]:
    """The parameters of a kernel; buffers that name no index get the free ones in order."""
    parameters = [_parameter(p) for p in split(text)]
    taken = {p.index for p in parameters if p.attribute == "buffer"}
    free = iter(i for i in range(64) if i not in taken)
    return tuple(replace(p, index=next(free)) if p.index < 0 else p for p in parameters)


def _kernels(text: str) -> tuple[list[_Kernel], list[tuple[int, int, str, str]]]:
    """The kernels defined in ``text`` and its explicit instantiations (begin, end, name, what)."""
    kernels, instances = [], []
    for m in _KERNEL.finditer(text):
        at = m.end()
        attribute = re.compile(r"[^\[\]{};]*\]\]").match(text, at)
        at = attribute.end() if attribute else at
        while more := re.compile(r"\s*\[\[[^\]]*\]\]").match(text, at):
            at = more.end()
        opening = text.index("(", at)
        head = text[at:opening].strip()
        if head == "decltype":
            begin = text.rindex("template", 0, m.start())
            host = _HOST_NAME.search(text, begin, at)
            end = text.index(";", closing(text, opening)) + 1
            function = text[opening + 1 : closing(text, opening) - 1]
            name = "".join(re.findall(r'"([^"]*)"', host.group(1))) if host else function
            instances.append((begin, end, name, function))
            continue
        end = closing(text, opening)
        brace = re.compile(r"\s*(?:noexcept\s*)?\{").match(text, end)
        if not brace:
            if "<" in head:
                begin = text.rindex("template", 0, m.start())
                host = _HOST_NAME.search(text, begin, at)
                function = head.split(None, 1)[1]
                name = "".join(re.findall(r'"([^"]*)"', host.group(1))) if host else function
                instances.append((begin, text.index(";", end) + 1, name, function))
            continue
        name = head.split()[-1]
        if head.split()[:-1] != ["void"]:
            raise CompileError(f"kernel {name} must return void, not {' '.join(head.split()[:-1])}")
        parameters = _parameters(text[opening + 1 : end - 1])
        kernels.append(_Kernel(name, parameters, (brace.end() - 1, closing(text, brace.end() - 1))))
    return kernels, instances


_SHARED = re.compile(r"(?<=[{};])(\s*(?:#[^\n]*\n\s*)*)__local\s+([^;{}]*);")


def _shared(kernel: _Kernel, body: str) -> str:
    """Replace the threadgroup variables of a kernel's body by references to storage."""

    def declare(m: re.Match[str]) -> str:
        text = m.group(2)
        declarators = split(text)
        first = re.match(r"(.*?[\s>])(\w+)\s*((?:\[.*\])?)$", declarators[0], re.S)
        if not first or re.search(r"[*&=]", re.sub(r"<.*>", "", first.group(1))):
            return m.group()
        kind, out = first.group(1).strip(), []
        for i, declarator in enumerate(declarators):
            d = re.match(r"(?:.*[\s>])?(\w+)\s*((?:\[.*\])?)$", declarator if i else text, re.S)
            d = first if i == 0 else d
            if not d:
                return m.group()
            name, extent = d.group(d.lastindex - 1), d.group(d.lastindex)  # type: ignore[operator]
            slot = len(kernel.shared)
            kernel.shared.append(name)
            out.append(
                f"typedef {kind} qk_type_{name} {extent}; "
                f"__local qk_type_{name}& {name} = qk_shared<qk_type_{name}>({slot});"
            )
        return m.group(1) + " ".join(out)

    return _SHARED.sub(declare, body)


_VALUES = {
    "thread_position_in_grid": "qk_position<{p}>(position)",
    "thread_position_in_threadgroup": "qk_position<{p}>(t->position_in_threadgroup)",
    "threadgroup_position_in_grid": "qk_position<{p}>(t->threadgroup_position)",
    "threads_per_threadgroup": "qk_position<{p}>(t->threads_per_threadgroup)",
    "dispatch_threads_per_threadgroup": "qk_position<{p}>(t->dispatch_threads_per_threadgroup)",
    "threadgroups_per_grid": "qk_position<{p}>(t->threadgroups_per_grid)",
    "threads_per_grid": "qk_position<{p}>(t->threads_per_grid)",
    "grid_size": "qk_position<{p}>(t->threads_per_grid)",
    "thread_index_in_simdgroup": "qk_scalar<{p}>(t->lane)",
    "thread_index_in_threadgroup": "qk_scalar<{p}>(t->index_in_threadgroup)",
    "simdgroup_index_in_threadgroup": "qk_scalar<{p}>(t->index_in_threadgroup / 32)",
    "thread_index_in_quadgroup": "qk_scalar<{p}>(t->lane % 4)",
    "quadgroup_index_in_threadgroup": "qk_scalar<{p}>(t->index_in_threadgroup / 4)",
    "threads_per_simdgroup": "qk_scalar<{p}>(32)",
    "thread_execution_width": "qk_scalar<{p}>(32)",
    "simdgroups_per_threadgroup": (
        "qk_scalar<{p}>((qk_product(t->threads_per_threadgroup) + 31) / 32)"
    ),
    "dispatch_simdgroups_per_threadgroup": (
        "qk_scalar<{p}>((qk_product(t->dispatch_threads_per_threadgroup) + 31) / 32)"
    ),
    "quadgroups_per_threadgroup": (
        "qk_scalar<{p}>((qk_product(t->threads_per_threadgroup) + 3) / 4)"
    ),
}


def _argument(i: int, parameter: Parameter) -> str:
    kind = f"at_{i}"
    if parameter.attribute == "buffer":
        return f"qk_buffer<{kind}>(buffers[{parameter.index}])"
    if parameter.attribute == "threadgroup":
        return f"({kind})(ulong)qk_threadgroup_memory({64 + parameter.index}, 0, 16)"
    if parameter.attribute not in _VALUES:
        raise CompileError(f"parameter {parameter.name!r}: no attribute {parameter.attribute!r}")
    return _VALUES[parameter.attribute].format(p=kind)


def _entry(signature: Signature) -> str:
    types = [
        f"  using at_{i} = typename qk_parameters<decltype({signature.expression})>::at<{i}>;\n"
        for i in range(len(signature.parameters))
    ]
    arguments = ",\n      ".join(_argument(i, p) for i, p in enumerate(signature.parameters))
    return (
        "\n#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n"
        'extern "C" void qk_entry(qk_thread* t, const ulong* buffers) {\n'
        "  uint position[3];\n"
        "  for (int i = 0; i < 3; i++) position[i] = t->position_in_threadgroup[i] +\n"
        "      t->threadgroup_position[i] * t->dispatch_threads_per_threadgroup[i];\n"
        + "".join(types).replace("typename ", "")
        + f"  {signature.expression}(\n      {arguments});\n}}\n"
    )


def translate(text: str, function: str, constants: Mapping[int, object]) -> tuple[str, Signature]:
    """Rewrite a preprocessed translation unit and add the entry point of one kernel.

    Args:
        text: the unit after the preprocessor; ``entry.h`` comes with it.
        function: the kernel: its name, its ``host_name``, or a name with template arguments.
        constants: the values of function constants by index.

    Returns:
        The source for clang and the kernel's signature.

    Raises:
        CompileError: there is no such kernel, or a parameter's attribute is unknown.
    """
    text = _constants(text, constants)
    kernels, instances = _kernels(text)
    expression = {name: what for _, _, name, what in instances}.get(function, function)
    base = expression.split("<")[0].strip().split("::")[-1]
    found = [k for k in kernels if k.name == base]
    if not found:
        known = ", ".join(sorted({k.name for k in kernels})) or "none"
        raise CompileError(f"no kernel {function!r} in the source; kernels: {known}")
    edits = [(begin, end, "") for begin, end, _, _ in instances]
    edits += [(*k.body, _shared(k, text[slice(*k.body)])) for k in kernels]
    text = _STRIDE.sub(r"\1 = \1 + \2;", _edit(text, edits))
    text = _constructors(_constant(_threads(_KERNEL.sub("", text))))
    signature = Signature(expression, found[0].parameters, tuple(found[0].shared))
    return text + _entry(signature), signature
