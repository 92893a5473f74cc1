"""Reads a ``.metal`` file: its declarations, and the least text that one of its functions needs.

MLX hashes a kernel's source at every launch, so a kernel is sent with only the declarations that
it uses, without comments and indentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple


class SourceError(ValueError):
    """A ``.metal`` file cannot be read; the message names the file and line."""


METAL, OPERATIONS = (Path(__file__).parents[1] / folder for folder in ("metal", "ops"))
# Both stand in front of every kernel that MLX compiles.
_IN_PREAMBLE = ("<metal_stdlib>", "<metal_atomic>", "<metal_simdgroup>", "<metal_simdgroup_matrix>")

# Metal 4's tensor operations, whose names begin with mpp; only what uses them is sent with them.
TENSOR_OPS = "<MetalPerformancePrimitives/MetalPerformancePrimitives.h>"

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<directive>^[ \t]*\#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])*)
      | (?P<newline>\n)
      | (?P<blank>[ \t\r\f\\]+)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
# How the name is found at the head of a declaration: of a type, an alias, a function or constant.
_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:struct|union|class|enum(?: class| struct)?)(?: alignas \( \w+ \))? (\w+)",
        r"using (\w+)",
        r"typedef .*?(\w+)$",
        r"(?!struct |union |class |enum |using |typedef )"
        r".*?(?!(?:alignas|decltype|__attribute__)\b)\b(\w+)(?: [(\[]|$)",
    )
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OPERATORS = frozenset("+-*/%&|^<>=!:~.?#")
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


class Token(NamedTuple):
    """A word, number, string, mark, directive or newline, and whether a blank precedes it."""

    kind: str
    text: str
    line: int = 0
    spaced: bool = False


@dataclass(frozen=True, eq=False)
class Item:
    """One declaration at the top level of a file; the same object however a file is included.

    ``names`` are those that it introduces; of an operator, which has none to look for, the words of
    its parameters, since it is needed wherever their types are.
    """

    names: frozenset[str]
    tokens: tuple[Token, ...]
    file: str
    kernel: bool = False
    operator: bool = False

    @cached_property
    def words(self) -> frozenset[str]:
        """Every identifier in it, those inside macros too."""
        return words(self.tokens)

    @cached_property
    def cited(self) -> tuple[tuple[str, str], ...]:
        """Its lines as :func:`cited` gives them."""
        return (*cited(self, self.tokens),)


def words(tokens: Iterable[Token]) -> frozenset[str]:
    """The identifiers among the tokens, those inside directives too."""
    found: set[str] = set()
    for token in tokens:
        if token.kind == "word":
            found.add(token.text)
        elif token.kind == "directive":
            found.update(re.findall(r"[A-Za-z_]\w*", token.text))
    return frozenset(found)


def tokenize(text: str) -> Iterator[Token]:
    """Split Metal source into tokens, without comments and blanks."""
    line, spaced = 1, False
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup or "", match.group()
        if kind == "directive":
            joined = _COMMENT.sub(" ", token).replace("\\\n", " ")
            yield Token(kind, " ".join(joined.split()), line)
        elif kind not in ("comment", "blank"):
            yield Token(kind, token, line, spaced)
        spaced = kind in ("comment", "blank")
        line += token.count("\n")


def lines(tokens: Iterable[Token]) -> Iterator[tuple[int, str]]:
    """The shortest text that reads the same, line for line, with the numbers of its lines."""
    number, text = 0, ""
    for token in tokens:
        if token.kind in ("newline", "directive"):
            if text:
                yield number, text
            number, text = 0, ""
            if token.kind == "directive":
                yield token.line, token.text
            continue
        number = number or token.line
        text += " " + token.text if _would_merge(text[-1:] or "\n", token) else token.text
    if text:
        yield number, text


def cited(item: Item, tokens: Iterable[Token]) -> Iterator[tuple[str, str]]:
    """Lines of a declaration, as ``"exp.metal:12"`` and as text; what was added has no line."""
    last = item.tokens[0].line
    for number, text in lines(tokens):
        last = number or last
        yield f"{item.file}:{last}", text


def minify(tokens: Iterable[Token]) -> str:
    """The shortest text that reads the same, line for line."""
    return "\n".join(text for _, text in lines(tokens)).strip()


def _would_merge(left: str, token: Token) -> bool:
    """Whether the blank before a token keeps it apart from the character on its left."""
    if not token.spaced:
        return False
    if token.kind == "mark":
        # A number may be on the left: 1 . is not 1.
        return token.text in _OPERATORS and (left in _OPERATORS or token.text == ".")
    # A number may also end with a point: 1. x is not 1.x.
    return left.isalnum() or left in "_."


def text_of(path: Path) -> str:
    """A file's text. Bytes that are not of Unicode become characters that are not ASCII."""
    return path.read_bytes().decode("utf-8", "surrogateescape")


def read(path: Path, text: str | None = None) -> tuple[Item, ...]:
    """The top-level declarations of a ``.metal`` file, those of the files it includes first.

    ``#include "name.metal"`` is looked up beside the file, then in this package.
    """
    return _items(path, text_of(path) if text is None else text)


@lru_cache(maxsize=256)
def _items(path: Path, text: str) -> tuple[Item, ...]:
    return (*_read(path.resolve(), text, frozenset()),)


def _read(path: Path, text: str, seen: frozenset[Path]) -> dict[Item, None]:
    """The declarations of a file, each once, without those of files that are being read."""
    items: dict[Item, None] = {}
    for part in _parts(path, text):
        if isinstance(part, Item):
            items[part] = None
        elif part not in seen | {path}:
            items |= _read(part, text_of(part), seen | {path})
    return items


@lru_cache(maxsize=256)
def _parts(path: Path, text: str) -> tuple[Item | Path, ...]:
    """The declarations of a file by itself, and the files that it includes, in order."""
    if odd := re.search(r"[^\x00-\x7f]", text):
        line = text.count("\n", 0, odd.start()) + 1
        raise SourceError(f"{path.name}:{line}: Metal sources must be ASCII")
    parts: list[Item | Path] = []
    for tokens in _split(tokenize(text), path):
        first = tokens[0]
        if first.kind != "directive":
            parts.append(_item(tokens, path))
        elif first.text.startswith("#define "):
            name = re.split(r"\W", first.text.removeprefix("#define "))[0]
            parts.append(Item(frozenset([name]), tuple(tokens), path.name))
        elif first.text == f"#include {TENSOR_OPS}":
            parts.append(Item(frozenset(["mpp"]), (first,), path.name))
        elif first.text.startswith("#include "):
            parts += [found] if (found := _included(first, path)) is not None else []
        elif first.text != "#pragma once":
            raise SourceError(f"{path.name}:{first.line}: {first.text!r} is not in the dialect")
    return (*parts,)


def _included(directive: Token, path: Path) -> Path | None:
    name = directive.text.removeprefix("#include ").strip()
    if name in _IN_PREAMBLE:
        return None
    for folder in (path.parent, METAL, METAL / "common"):
        if name.startswith('"') and (folder / name.strip('"')).is_file():
            return (folder / name.strip('"')).resolve()
    raise SourceError(f"{path.name}:{directive.line}: cannot include {name} at run time")


def _split(tokens: Iterable[Token], path: Path) -> Iterator[list[Token]]:
    """Cut a file into its top-level declarations."""
    item: list[Token] = []
    depth, body = 0, False
    for token in tokens:
        if not item and token.kind == "newline":
            continue
        if token.kind == "directive" and not item:
            yield [token]
            continue
        if token.kind == "directive" and depth == 0:
            raise SourceError(f"{path.name}:{token.line}: {token.text!r} inside a declaration")
        item.append(token)
        if token.text in _OPEN:
            if depth == 0 and token.text == "{":
                text = head(item)
                body = "(" in text.replace("alignas (", "") or text.startswith("namespace")
            depth += 1
        elif token.text in _CLOSE:
            depth -= 1
        if depth == 0 and (token.text == ";" or (token.text == "}" and body)):
            yield item
            item, body = [], False
    if item:
        raise SourceError(f"{path.name}:{item[0].line}: this declaration does not end")


def head(tokens: Iterable[Token]) -> str:
    """A declaration up to its body or initialiser, without template<...> and [[...]]."""
    found: list[str] = []
    in_template = angle = 0
    for token in tokens:
        text = token.text
        if token.kind in ("newline", "directive"):
            continue
        if text == "template":
            in_template = 1
        elif in_template:
            angle += (text == "<") - (text == ">")
            in_template = int(angle > 0)
        elif text in ("{", ";") or (text == "=" and "operator" not in found):
            break
        else:
            found.append(text)
    return re.sub(r"\[ \[.*?\] \] ?", "", " ".join(found))


def _item(tokens: list[Token], path: Path) -> Item:
    """Work out which names a declaration introduces."""
    text = head(tokens)
    if re.match(r"using namespace( ::)? metal$", text):
        return Item(frozenset(), (), path.name)
    if re.search(r"\bnamespace\b", text):
        raise SourceError(f"{path.name}:{tokens[0].line}: namespaces are not in the dialect")
    if " operator " in text:
        if "(" not in text:
            raise SourceError(f"{path.name}:{tokens[0].line}: this operator takes nothing")
        names = set(re.findall(r"\w+", text[text.index("(") :]))
        return Item(frozenset(names), tuple(tokens), path.name, operator=True)
    names = {match[1] for pattern in _NAMES if (match := pattern.match(text))}
    if text.startswith("enum"):
        names |= words(tokens[position(tokens, "{") :])
    kernel = "kernel" in words(tokens[: position(tokens, "(")])
    return Item(frozenset(names), tuple(tokens), path.name, kernel)


def position(tokens: Sequence[Token], text: str) -> int:
    """The index of the first token with that text, or how many tokens there are."""
    return next((i for i, token in enumerate(tokens) if token.text == text), len(tokens))


def used(items: Iterable[Item], roots: frozenset[str]) -> list[Item]:
    """The declarations that ``roots`` need, and those that these need, in file order."""
    declarations = [item for item in items if not item.kernel]
    declared = {name for item in declarations if not item.operator for name in item.names}
    chosen: set[int] = set()
    wanted = roots
    while True:
        more = {
            i
            for i, item in enumerate(declarations)
            if i not in chosen and item.names & wanted & declared
        }
        if not more:
            return [declarations[i] for i in sorted(chosen)]
        chosen |= more
        wanted = wanted.union(*(declarations[i].words for i in more))


@lru_cache(maxsize=64)
def without(header: str, files: tuple[Path, ...]) -> str:
    """A kernel's header without the declarations of files, and of those that they include.

    A backend has others of the same names.
    """
    for item in (item for path in files for item in read(path)):
        if item.tokens:
            text = "".join(f"{line}\n" for _, line in item.cited)
            header = header.replace(text, "\n" * text.count("\n"))  # later lines keep their numbers
    return header
