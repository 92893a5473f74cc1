"""A kernel function of a ``.metal`` file as ``mx.fast.metal_kernel`` takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import source
from .generated_source import ATTRIBUTES, SHAPE_WORDS, shape_words
from .health_source import with_health, without_health
from .program import Parameter, Program
from .source import METAL, Item, SourceError, Token

# Spellings of one type in Metal, by the one that MLX uses.
_ALIASES = {
    f"{sign}{name}": f"{sign}int{bits}_t"
    for sign in ("", "u")
    for name, bits in (("char", 8), ("short", 16), ("int", 32), ("long", 64))
} | {"half": "float16_t", "bfloat": "bfloat16_t", "float32_t": "float"}
_PARAMETER = re.compile(
    r"(?P<qualifiers>(?:(?:const|device|constant|threadgroup|thread|volatile) )*)"
    r"(?P<type>(?:atomic < \w+ >|(?:metal :: )?\w+))(?: const)? "
    r"(?P<mark>[*&] )?(?P<name>\w+)(?: \[ \[ (?P<attribute>\w+)(?: \( (?P<index>\d+) \))? \] \])?$"
)
# How an attribute of one type becomes what the file declares.
_PARTS = {
    ("uint3", "uint3"): "{0}",
    ("uint2", "uint3"): "uint2({0}.x,{0}.y)",
    ("uint", "uint3"): "{0}.x",
    ("ushort", "uint3"): "{0}.x",
    ("uint", "uint"): "{0}",
    ("ushort", "uint"): "{0}",
}


def parse(
    path: Path,
    function: str,
    name: str,
    *,
    text: str | None = None,
    ensure_row_contiguous: bool = True,
    health: bool = False,
    omitted: Sequence[str] = (),
) -> Program:
    """Read one kernel function and the declarations that it uses.

    ``omitted`` pointers are null in the body; ``health`` adds the buffer of the debug mode.

    Raises:
        SourceError: the file has no such kernel, or its signature is not one that MLX can generate.
    """
    items = source.read(path, source.text_of(path) if text is None else text)
    where = f"{path.name}: kernel {function}"
    item = _find(items, function, path)
    if health:
        items = tuple(dict.fromkeys((*items, *source.read(METAL / "common" / "health.metal"))))
        tokens = with_health(item.tokens)
    else:
        tokens = without_health(item.tokens)
    opening = source.position(tokens, "{")
    body = tokens[opening + 1 : -1]
    parameters = _parameters(tokens[:opening], function, where)
    added = [
        f"{'' if p.writable else 'const '}{p.space} {p.type}* {p.name}=nullptr;"
        for p in parameters
        if p.name in omitted
    ]
    parameters = [p for p in parameters if p.name not in omitted]
    inputs, outputs, attributes, atomic = _sort(parameters, source.words(body), where)
    added += [alias for p in attributes if (alias := _alias(p, where))]
    begin = item.tokens[0].line
    header = [x for d in source.used(items, source.words(tokens)) for x in d.cited]
    lines = [*((f"{item.file}:{begin}", line) for line in added), *source.cited(item, body)]
    text = "\n".join(line for _, line in lines)
    _check_words(text, parameters, inputs, where)
    return Program(
        name=name,
        header="".join(f"{line}\n" for _, line in header),
        source=text,
        input_names=tuple(p.name for p in inputs),
        output_names=tuple(p.name for p in outputs),
        inputs=tuple(
            replace(p, padded=p.space == "device" and not shape_words(text, p.name)) for p in inputs
        ),
        outputs=tuple(outputs),
        template=_template(item, where),
        atomic_outputs=atomic,
        ensure_row_contiguous=ensure_row_contiguous,
        file_lines=(tuple(line for line, _ in header), tuple(line for line, _ in lines)),
    )


def _find(items: Sequence[Item], function: str, path: Path) -> Item:
    kernels = {name: item for item in items if item.kernel for name in item.names}
    if function not in kernels:
        found = ", ".join(sorted(kernels)) or "none"
        raise SourceError(f"{path.name} has no kernel {function!r}, only {found}")
    return kernels[function]


def _template(item: Item, where: str) -> tuple[tuple[str, str], ...]:
    """The names and kinds of the template's parameters."""
    texts = [token.text for token in item.tokens if token.kind != "newline"]
    if texts[0] != "template":
        return ()
    if ">" not in texts:
        raise SourceError(f"{where}: its template has no end")
    found = []
    for part in " ".join(texts[2 : texts.index(">")]).split(" , "):
        kind, _, name = part.partition(" ")
        if kind not in ("typename", "int", "bool") or not name.isidentifier():
            raise SourceError(
                f"{where}: MLX has template parameters typename, int, bool, not {part}"
            )
        found.append((name, kind))
    return tuple(found)


def _parameters(tokens: tuple[Token, ...], function: str, where: str) -> list[Parameter]:
    """The parameters between the function's parentheses."""
    texts = [token.text for token in tokens if token.kind != "newline"]
    if function not in texts:
        raise SourceError(f"{where}: cannot read its parameters")
    start = texts.index(function) + 2
    parts: list[list[str]] = [[]]
    depth = 0
    for text in texts[start:-1]:
        depth += (text in "([<") - (text in ")]>")
        if text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(text)
    found = [_parameter(" ".join(part), where) for part in parts]
    for i, parameter in enumerate(p for p in found if p.space):
        if parameter.buffer not in (None, i):
            raise SourceError(f"{where}: {parameter.name} is [[buffer({i})]], MLX counts in order")
    return found


def _parameter(text: str, where: str) -> Parameter:
    match = _PARAMETER.match(text)
    if match is None:
        raise SourceError(f"{where}: cannot read the parameter '{text}'")
    qualifiers = match["qualifiers"].split()
    kind = match["type"].removeprefix("metal :: ")
    atomic = re.match(r"atomic(?: < (\w+) >|_(int|uint|float))$", kind)
    element = (atomic[1] or atomic[2]) if atomic else kind
    if "threadgroup" in qualifiers:
        raise SourceError(
            f"{where}: declare threadgroup memory in the body, not as {match['name']}"
        )
    if match["attribute"] == "buffer" and not match["index"]:
        raise SourceError(f"{where}: [[buffer]] of {match['name']} lacks its number")
    space = next((s for s in ("device", "constant") if s in qualifiers), "")
    is_input = space == "constant" or "const" in qualifiers
    return Parameter(
        name=match["name"],
        type=_ALIASES.get(element, element),
        space=space,
        reference=match["mark"] == "& ",
        attribute=(match["attribute"] or "") if not space else "",
        buffer=int(match["index"]) if match["attribute"] == "buffer" else None,
        writable=bool(space) and not is_input,
        atomic=atomic is not None,
    )


def _sort(
    parameters: list[Parameter], used: frozenset[str], where: str
) -> tuple[list[Parameter], list[Parameter], list[Parameter], bool]:
    """Tell inputs, outputs and attributes apart and hold them against what MLX can generate."""
    inputs: list[Parameter] = []
    outputs: list[Parameter] = []
    attributes: list[Parameter] = []
    shapes = {
        suffix: (_ALIASES.get(kind[:-1], kind[:-1]), kind[-1]) for suffix, kind in SHAPE_WORDS
    }
    for p in parameters:
        owner = next((i for i in inputs for s in shapes if p.name == i.name + s), None)
        if owner is not None:
            kind = shapes[p.name.removeprefix(owner.name)]
            if (p.type, "&" if p.reference else "*") != kind or p.space != "constant":
                raise SourceError(f"{where}: MLX passes {p.name} as constant {kind[0]}{kind[1]}")
        elif p.attribute:
            attributes.append(p)
        elif not p.space:
            raise SourceError(f"{where}: {p.name} needs device, constant or an attribute")
        elif p.writable:
            outputs.append(p)
        elif outputs:
            raise SourceError(f"{where}: input {p.name} stands behind an output")
        else:
            inputs.append(p)
    if not outputs:
        raise SourceError(f"{where} has no output (device T* without const)")
    if len({p.atomic for p in outputs}) > 1:
        raise SourceError(f"{where}: MLX makes all outputs atomic or none")
    return inputs, outputs, [p for p in attributes if p.name in used], outputs[0].atomic


def _check_words(
    text: str, parameters: list[Parameter], inputs: list[Parameter], where: str
) -> None:
    """MLX adds parameters for words that it finds in the body: they must be those declared."""
    declared = {p.name for p in parameters} | {p.attribute for p in parameters}
    for p in inputs:
        for word in (p.name + suffix for suffix, _ in SHAPE_WORDS):
            if word in text and (p.reference or word not in declared):
                raise SourceError(f"{where}: MLX would pass {word}, which is not in the signature")
    found = set(re.findall(r"\w+", text)) & set(ATTRIBUTES)
    if not found:
        raise SourceError(f"{where} uses no thread attribute, so that all its threads do the same")
    if found - declared:
        raise SourceError(f"{where}: {', '.join(sorted(found - declared))} is not in the signature")


def _alias(parameter: Parameter, where: str) -> str:
    """The statement that gives an attribute the name and type of the file, where MLX's differ."""
    name, kind, attribute = parameter.name, parameter.type, parameter.attribute
    if attribute not in ATTRIBUTES:
        raise SourceError(f"{where}: MLX has no attribute [[{attribute}]]")
    full = ATTRIBUTES[attribute]
    declared = kind.replace("int32_t", "int").replace("uint16_t", "ushort")
    if (name, declared) == (attribute, full):
        return ""
    part = _PARTS.get((declared, full))
    if name == attribute or part is None:
        raise SourceError(
            f"{where}: [[{attribute}]] is {full} {attribute}; rename {declared} {name}"
        )
    return f"{declared} {name}={part.format(attribute)};"
