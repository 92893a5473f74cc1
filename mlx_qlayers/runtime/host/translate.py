"""From preprocessed Metal source to a translation unit for clang.

``threadgroup`` variables of kernels become references to the runtime's storage, function constants
get their values, and the entry point that fills one kernel's parameters is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .cpp_text import closing, edit, split
from .errors import CompileError
from .opencl_spelling import respell

_KERNEL = re.compile(r"\b__qk_kernel__\b")
_FUNCTION_CONSTANT = re.compile(
    r"__constant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\s*(\d+)\s*\)\s*\]\]\s*;"
)
_DEFINED = re.compile(r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)")
_HOST_NAME = re.compile(r"host_name\s*\(\s*((?:\"[^\"]*\"\s*)+)\)")


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter: its name and what its attribute asks for."""

    name: str
    attribute: str
    index: int = 0
    optional: bool = False  # only there where a function constant asks for it


@dataclass(frozen=True)
class Signature:
    """The facts of a kernel that its entry point needs."""

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


@dataclass
class Declared:
    """The declarations of a part of a translation unit, for the parts behind it."""

    kernels: dict[str, _Kernel] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    # Function constants by name, and whether they have a value.
    constants: dict[str, bool] = field(default_factory=dict)


def _constants(text: str, constants: Mapping[int, object], defined: dict[str, bool]) -> str:
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
        end = closing(text, opening)
        brace = re.compile(r"\s*(?:noexcept\s*)?\{").match(text, end)
        of_type = head == "decltype"
        if of_type or not brace:
            if of_type or "<" in head:
                begin = text.rindex("template", 0, m.start())
                host = _HOST_NAME.search(text, begin, at)
                function = text[opening + 1 : end - 1] if of_type else head.split(None, 1)[1]
                name = "".join(re.findall(r'"([^"]*)"', host.group(1))) if host else function
                instances.append((begin, text.index(";", end) + 1, name, function))
            continue
        name = head.split()[-1]
        if head.split()[:-1] != ["void"]:
            raise CompileError(f"kernel {name} must return void, not {' '.join(head.split()[:-1])}")
        parameters = _parameters(text[opening + 1 : end - 1])
        kernels.append(_Kernel(name, parameters, (brace.end() - 1, closing(text, brace.end() - 1))))
    return kernels, instances


# A declaration's first declarator, with the type; those that follow it; a type that points.
_FIRST = re.compile(r"(.*?[\s>])(\w+)\s*((?:\[.*\])?)$", re.S)
_NEXT = re.compile(r"(\w+)\s*((?:\[.*\])?)$", re.S)
_POINTER = re.compile(r"[*&=](?![^<]*>)")
_SHARED = re.compile(r"(?<=[{};])(\s*(?:#[^\n]*\n\s*)*)__local\s+([^;{}]*);")


def _shared(kernel: _Kernel, body: str) -> str:
    """Replace the threadgroup variables of a kernel's body by references to storage."""

    def declare(m: re.Match[str]) -> str:
        text = m.group(2)
        first, *rest = split(text)
        if not (m_first := _FIRST.match(first)) or _POINTER.search(m_first.group(1)):
            return m.group()
        kind, out = m_first.group(1).strip(), []
        for found in (m_first.groups()[1:], *(d.groups() for d in map(_NEXT.match, rest) if d)):
            name, extent = found
            slot = len(kernel.shared)
            kernel.shared.append(name)
            out.append(
                f"typedef {kind} qk_type_{name} {extent}; "
                f"__local qk_type_{name}& {name} = qk_shared<qk_type_{name}>({slot});"
            )
        return m.group(1) + " ".join(out)

    return _SHARED.sub(declare, body)


# The values of attributes: vectors of three, and scalars.
_POSITIONS = {
    "thread_position_in_grid": "position",
    "thread_position_in_threadgroup": "t->position_in_threadgroup",
    "threadgroup_position_in_grid": "t->threadgroup_position",
    "threads_per_threadgroup": "t->threads_per_threadgroup",
    "dispatch_threads_per_threadgroup": "t->dispatch_threads_per_threadgroup",
    "threadgroups_per_grid": "t->threadgroups_per_grid",
    "threads_per_grid": "t->threads_per_grid",
    "grid_size": "t->threads_per_grid",
}
_SCALARS = {
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "simdgroup_index_in_threadgroup": "t->index_in_threadgroup / 32",
    "thread_index_in_quadgroup": "t->lane % 4",
    "quadgroup_index_in_threadgroup": "t->index_in_threadgroup / 4",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "simdgroups_per_threadgroup": "(qk_product(t->threads_per_threadgroup) + 31) / 32",
    "dispatch_simdgroups_per_threadgroup": (
        "(qk_product(t->dispatch_threads_per_threadgroup) + 31) / 32"
    ),
    "quadgroups_per_threadgroup": "(qk_product(t->threads_per_threadgroup) + 3) / 4",
}


def _argument(i: int, parameter: Parameter) -> str:
    kind, attribute = f"at_{i}", parameter.attribute
    if attribute == "buffer":
        return f"qk_buffer<{kind}>(buffers[{parameter.index}])"
    if attribute == "threadgroup":
        return f"({kind})(ulong)qk_threadgroup_memory({64 + parameter.index}, 0, 16)"
    if attribute in _POSITIONS:
        return f"qk_position<{kind}>({_POSITIONS[attribute]})"
    if attribute in _SCALARS:
        return f"qk_scalar<{kind}>({_SCALARS[attribute]})"
    raise CompileError(f"parameter {parameter.name!r}: no attribute {attribute!r}")


def _entry(signature: Signature) -> str:
    types = [
        f"  using at_{i} = qk_parameters<decltype({signature.expression})>::at<{i}>;\n"
        for i in range(len(signature.parameters))
    ]
    arguments = ",\n      ".join(_argument(i, p) for i, p in enumerate(signature.parameters))
    return (
        "\n#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable\n"
        'extern "C" void qk_entry(qk_thread* t, const ulong* buffers) {\n'
        "  uint position[3];\n"
        "  for (int i = 0; i < 3; i++) position[i] = t->position_in_threadgroup[i] +\n"
        "      t->threadgroup_position[i] * t->dispatch_threads_per_threadgroup[i];\n"
        + "".join(types)
        + f"  {signature.expression}(\n      {arguments});\n}}\n"
    )


def rewrite(
    text: str, constants: Mapping[int, object], before: Declared | None = None
) -> tuple[str, Declared]:
    """Rewrite a part of a preprocessed translation unit for clang, and say what it declares.

    ``constants`` are the function constants' values; ``before`` is what earlier parts declare.
    """
    known = before or Declared()
    known = Declared({**known.kernels}, {**known.instances}, {**known.constants})
    text = _constants(text, constants, known.constants)
    kernels, instances = _kernels(text)
    edits = [(begin, end, "") for begin, end, _, _ in instances]
    edits += [(*k.body, _shared(k, text[slice(*k.body)])) for k in kernels]
    # Of two kernels of one name the first gives the signature.
    known.kernels = {k.name: k for k in reversed(kernels)} | known.kernels
    known.instances |= {name: what for _, _, name, what in instances}
    return respell(_KERNEL.sub("", edit(text, edits))), known


def translate(
    text: str, function: str, constants: Mapping[int, object], before: Declared | None = None
) -> tuple[str, Signature]:
    """Rewrite a preprocessed translation unit and add the entry point of one kernel."""
    text, declared = rewrite(text, constants, before)
    expression = declared.instances.get(function, function)
    base = expression.split("<")[0].strip().split("::")[-1]
    if base not in declared.kernels:
        known = ", ".join(sorted(declared.kernels)) or "none"
        raise CompileError(f"no kernel {function!r} in the source; kernels: {known}")
    kernel = declared.kernels[base]
    signature = Signature(expression, kernel.parameters, tuple(kernel.shared))
    return text + _entry(signature), signature
