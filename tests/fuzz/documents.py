"""Sound files, spoilt: values of a JSON document replaced, and bytes of any file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64, -(2**40), 10**9, 10**30]),
    st.floats(),
    st.sampled_from([1e308, 0.5, -0.0]),
    st.text(max_size=8),
    st.sampled_from(["", "\x1b[31m", "a\nb", "..", "/", "x" * 5000, "\ud800", "NaN", "\x00"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@dataclass(frozen=True)
class Edit:
    """A change of one value of a document."""

    at: int  # which value, counted through the document
    kind: str  # what is done to it
    value: Any  # what it becomes, or the new name


_KINDS = st.sampled_from(["set", "set", "set", "delete", "rename", "near", "copy"])
_EDIT = st.builds(Edit, st.integers(0, 400), _KINDS, _VALUES)
EDITS = st.lists(_EDIT, min_size=1, max_size=3).map(tuple)


@dataclass(frozen=True)
class Cut:
    """A change of bytes: at a share of the file, what is there is replaced."""

    share: float  # of the file, where
    remove: int  # how many bytes
    insert: bytes  # what is put there


_BYTES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b'"', b"{", b"[" * 3000, b"\xff", b"\x00" * 9, b"1e999"]),
)
_CUT = st.builds(Cut, st.floats(0, 1), st.sampled_from([0, 1, 2, 8, 100, 10**9]), _BYTES)
CUTS = st.lists(_CUT, min_size=1, max_size=2).map(tuple)


def spoilt_bytes(data: bytes, cuts: tuple[Cut, ...]) -> bytes:
    """A file's bytes after the cuts."""
    for cut in cuts:
        at = int(cut.share * len(data))
        data = data[:at] + cut.insert + data[at + cut.remove :]
    return data


def spoilt_document(document: Any, edits: tuple[Edit, ...]) -> Any:
    """A document after the edits; the original stays."""
    document = json.loads(json.dumps(document))
    for edit in edits:
        places = list(_places(document))
        if not places:
            return edit.value
        owner, key = places[edit.at % len(places)]
        _apply(owner, key, edit, places)
    return document


def _apply(owner: Any, key: Any, edit: Edit, places: list[tuple[Any, Any]]) -> None:
    if edit.kind == "delete":
        del owner[key]
    elif edit.kind == "rename" and isinstance(owner, dict):
        owner[str(edit.value)[:100]] = owner.pop(key)
    elif edit.kind == "copy":
        other, name = places[len(repr(edit.value)) % len(places)]
        owner[key] = json.loads(json.dumps(other[name]))
    elif edit.kind == "near" and isinstance(owner[key], (int, float)):
        owner[key] = owner[key] + (len(repr(edit.value)) % 5 - 2)
    else:
        owner[key] = edit.value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside a document, as its owner and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


@dataclass(frozen=True)
class Damage:
    """A damaged file: edits of its values, or changes of its bytes."""

    name: str
    edits: tuple[Edit, ...]
    cuts: tuple[Cut, ...]

    def of_json(self, data: bytes) -> bytes:
        """A JSON file's new bytes."""
        if self.edits:
            data = json.dumps(spoilt_document(json.loads(data), self.edits)).encode()
        return spoilt_bytes(data, self.cuts)

    def of_weights(self, data: bytes) -> bytes:
        """A safetensors file's new bytes; the edits are of its header."""
        if self.edits:
            end = 8 + int.from_bytes(data[:8], "little")
            text = json.dumps(spoilt_document(json.loads(data[8:end]), self.edits)).encode()
            data = len(text).to_bytes(8, "little") + text + data[end:]
        return spoilt_bytes(data, self.cuts)


def damaged(
    *names: str, cuts: st.SearchStrategy[tuple[Cut, ...]] = CUTS
) -> st.SearchStrategy[Damage]:
    """One of these files with edits, or with changes of its bytes."""
    named = st.sampled_from(names)
    return st.builds(Damage, named, EDITS, st.just(())) | st.builds(
        Damage, named, st.just(()), cuts
    )
