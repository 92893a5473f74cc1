"""Reads a ``.metal`` file: its declarations, and the least text that one of its functions needs.

MLX hashes a kernel's source at every launch, so a kernel is sent with only the declarations that
it uses, without comments and indentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class SourceError(ValueError):
    """A ``.metal`` file cannot be read; the message names the file and line."""


METAL = Path(__file__).parent.parent / "metal"
# Both stand in front of every kernel that MLX compiles.
_IN_PREAMBLE = ("<metal_stdlib>", "<metal_atomic>", "<metal_simdgroup>", "<metal_simdgroup_matrix>")

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
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OPERATORS = frozenset("+-*/%&|^<>=!:~.?#")
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")


@dataclass(frozen=True)
class Token:
    """A word, number, string, mark, directive or newline, and whether a blank precedes it."""

    kind: str
    text: str
    line: int = 0
    spaced: bool = False


@dataclass(frozen=True)
class Item:
    """One declaration at the top level of a file: the names it introduces and its tokens."""

    names: frozenset[str]
    tokens: tuple[Token, ...]
    kernel: bool = False

    @property
    def words(self) -> frozenset[str]:
        """Every identifier in it, those inside macros too."""
        return words(self.tokens)


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


def minify(tokens: Iterable[Token]) -> str:
    """The shortest text that reads the same, line for line, as compilers cite it."""
    out: list[str] = []
    last = "\n"
    for token in tokens:
        if token.kind == "newline":
            text = "" if last == "\n" else "\n"
        elif token.kind == "directive":
            text = token.text + "\n" if last == "\n" else f"\n{token.text}\n"
        else:
            text = " " + token.text if _would_merge(last, token) else token.text
        out.append(text)
        last = text[-1] if text else last
    return "".join(out).strip()


def _would_merge(left: str, token: Token) -> bool:
    """Whether the blank before a token keeps it apart from the character on its left."""
    if not token.spaced:
        return False
    if token.kind == "mark":
        return left in _OPERATORS and token.text in _OPERATORS
    return left.isalnum() or left == "_" or (left == "." and token.kind == "number")


@cache
def read(path: Path) -> tuple[Item, ...]:
    """The top-level declarations of a ``.metal`` file, those of the files it includes first.

    Args:
        path: the file; ``#include "name.metal"`` is looked up beside it, then in this package.

    Raises:
        SourceError: it is not ASCII, or holds what the kernel dialect does not have.
    """
    return tuple(_read(path, frozenset()))


def _read(path: Path, seen: frozenset[Path]) -> list[Item]:
    try:
        text = path.read_bytes().decode("ascii")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise SourceError(f"{path.name}:{line}: Metal sources must be ASCII") from error
    items: list[Item] = []
    for tokens in _split(list(tokenize(text)), path):
        head = tokens[0]
        if head.kind != "directive":
            items.append(_item(tokens, path))
        elif head.text.startswith("#define "):
            items.append(Item(frozenset([_macro(head.text)]), tuple(tokens)))
        elif head.text.startswith("#include "):
            found = _included(head, path)
            if found is not None and found not in seen | {path}:
                included = _read(found, seen | {path})
                items += [item for item in included if item not in items]
        elif head.text != "#pragma once":
            raise SourceError(f"{path.name}:{head.line}: {head.text!r} is not in the dialect")
    return items


def _macro(directive: str) -> str:
    match = re.match(r"#define (\w+)", directive)
    return match.group(1) if match else ""


def _included(directive: Token, path: Path) -> Path | None:
    name = directive.text.removeprefix("#include ").strip()
    if name in _IN_PREAMBLE:
        return None
    for folder in (path.parent, METAL):
        if name.startswith('"') and (folder / name.strip('"')).is_file():
            return (folder / name.strip('"')).resolve()
    raise SourceError(f"{path.name}:{directive.line}: cannot include {name} at run time")


def _split(tokens: list[Token], path: Path) -> Iterator[list[Token]]:
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
                body = _opens_body(item)
            depth += 1
        elif token.text in _CLOSE:
            depth -= 1
        if depth == 0 and (token.text == ";" or (token.text == "}" and body)):
            yield item
            item, body = [], False
    if item:
        raise SourceError(f"{path.name}:{item[0].line}: this declaration does not end")


def _opens_body(tokens: list[Token]) -> bool:
    text = head(tokens)
    return "(" in text.replace("alignas (", "") or text.startswith("namespace")


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
    before = tokens[: next((i for i, t in enumerate(tokens) if t.text == "("), 0)]
    if re.match(r"using namespace( ::)? metal$", text):
        return Item(frozenset(), ())
    if re.search(r"\bnamespace\b", text):
        raise SourceError(f"{path.name}:{tokens[0].line}: namespaces are not in the dialect")
    names = frozenset(_names(text))
    if text.startswith("enum"):
        names |= words(tokens[tokens.index(next(t for t in tokens if t.text == "{")) :])
    return Item(names, tuple(tokens), kernel="kernel" in words(before))


def _names(text: str) -> list[str]:
    for pattern in (
        r"(?:struct|union|class|enum(?: class| struct)?)(?: alignas \( \w+ \))? (\w+)",
        r"using (\w+)",
        r"typedef .*?(\w+)$",
    ):
        if match := re.match(pattern, text):
            return [match.group(1)]
    if " operator " in text:
        # An operator has no name to look for: it comes with the types that it takes.
        return re.findall(r"\w+", text[text.index("(") :])
    calls = r"(?!(?:alignas|decltype|__attribute__)\b)\b(\w+)(?: [(\[]|$)"
    match = re.search(calls, text)
    return [match.group(1)] if match else []


def used(items: Iterable[Item], roots: frozenset[str]) -> list[Item]:
    """The declarations that ``roots`` need, and those that these need, in file order."""
    declarations = [item for item in items if not item.kernel]
    operators = {id(item) for item in declarations if " operator " in head(item.tokens)}
    known = {name for item in declarations if id(item) not in operators for name in item.names}
    chosen: set[int] = set()
    wanted = roots
    while True:
        more = {
            i
            for i, item in enumerate(declarations)
            if i not in chosen and item.names & wanted & known
        }
        if not more:
            return [declarations[i] for i in sorted(chosen)]
        chosen |= more
        wanted = wanted.union(*(declarations[i].words for i in more))
