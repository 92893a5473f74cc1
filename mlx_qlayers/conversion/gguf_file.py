"""The header of a GGUF file, checked against the file, since MLX's reader trusts what it says.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

# Values of metadata by their number in a file: struct's letter, or what follows.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Tensors by their number in a file: name, weights in a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 20: "IQ4_NL", 23: "IQ4_XS",
}  # fmt: skip
_MOST_DIMS = 4


class Tensor(NamedTuple):
    """A tensor as the header describes it."""

    shape: tuple[int, ...]  # rows first
    kind: str  # `Q4_0`, `Q4_1` and `Q8_0` stay packed, the others of `_TYPES` do not


class Header(NamedTuple):
    """The part of a file in front of its weights."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """The metadata and the tensors of a GGUF file, each checked against the file's size.

    A ``FileNotFoundError`` or ``ValueError`` names the file, and the entry where it is cut short,
    contradicts itself, or has tensors that MLX does not read as they are.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path}: the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data, size)
        magic, version = reader.raw(4), reader.scalar("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path}: not GGUF of version 2 or 3: {magic!r}, {version}")
        tensors, keys = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.text("a key")
            if key in metadata:
                raise ValueError(f"{path}: {key!r} appears twice")
            metadata[key] = reader.value(key, reader.scalar("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise ValueError(f"{path}: general.alignment must be a multiple of 8: {alignment!r}")
        return Header(metadata, reader.tensors(tensors, alignment))


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def take(self, count: int, what: str = "the header") -> int:
        """Where the next ``count`` bytes begin."""
        if count > self.size - self.at:
            raise ValueError(
                f"{self.path}: {what} ends behind the file's {self.size} bytes: it is cut short"
            )
        self.at += count
        return self.at - count

    def raw(self, count: int, what: str = "the header") -> bytes:
        begin = self.take(count, what)
        return self.data[begin : begin + count]

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.raw(struct.calcsize("<" + letter)))[0]

    def text(self, what: str) -> str:
        try:
            return self.raw(self.scalar("Q"), what).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not text in UTF-8: {error}") from error

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind == _STRING:
                if count > (self.size - self.at) // 8:
                    self.take(8 * count, key)
                return [self.text(key) for _ in range(count)]
            letter = self._letter(key, kind)
            data = self.raw(count * struct.calcsize("<" + letter), key)
            return list(struct.unpack(f"<{count}{letter}", data))
        return self.scalar(self._letter(key, kind))

    def _letter(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: {key} has values of the unknown type {kind}")
        return _SCALARS[kind]

    def tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        """The descriptions of the tensors, and that each of them lies inside the file."""
        found: dict[str, Tensor] = {}
        ends: dict[str, int] = {}
        for _ in range(count):
            name = self.text("a tensor's name")
            where = f"{self.path}: tensor {name!r}"
            if name in found:
                raise ValueError(f"{where} appears twice")
            if not 1 <= (dims := self.scalar("I")) <= _MOST_DIMS:
                raise ValueError(f"{where} has {dims} dimensions")
            shape = struct.unpack(f"<{dims}Q", self.raw(8 * dims))[::-1]
            kind, offset = self.scalar("I"), self.scalar("Q")
            if kind not in _TYPES:
                raise ValueError(
                    f"{where} is {_OTHERS.get(kind, f'of the unknown type {kind}')}; "
                    f"what can be read is {', '.join(name for name, _, _ in _TYPES.values())}"
                )
            kind_name, block, width = _TYPES[kind]
            if not all(0 < n < 2**31 for n in shape) or shape[-1] % block or offset % alignment:
                raise ValueError(f"{where}: {kind_name} of shape {shape} at {offset} cannot be")
            if block == 32 and not name.endswith(".weight"):
                raise ValueError(f"{where} is {kind_name} and no weight")
            found[name] = Tensor(shape, kind_name)
            ends[name] = offset + math.prod(shape) // block * width
        begin = -(-self.at // alignment) * alignment
        for name, end in ends.items():
            if begin + end > self.size:
                raise ValueError(
                    f"{self.path}: tensor {name!r} ends at byte {begin + end} of {self.size}: "
                    "the file is cut short (an incomplete download?) or its header is wrong"
                )
        return found
