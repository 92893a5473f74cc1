"""MLX's own record of a custom kernel: the text that ours must equal."""

import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True)
class Recorded:
    """One kernel call in a file that ``mx.export_function`` wrote."""

    function: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shape_words: list[tuple[bool, bool, bool]]
    ensure_row_contiguous: bool
    init_value: float | None


def record(call: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array]) -> Recorded:
    """Export a function that launches one custom kernel, and read the kernel back from the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), call, *inputs)
        data = path.read_bytes()
    marker = b"CustomKernel"
    reader = _Reader(data, data.index(struct.pack("<Q", len(marker)) + marker) + 8 + len(marker))
    function, text = reader.string(), reader.string()
    grid, threadgroup = reader.take("<3i"), reader.take("<3i")
    words = [reader.take("<3?") for _ in range(reader.take("<Q")[0])]
    contiguous, has_value = reader.take("<2?")
    value = reader.take("<f")[0] if has_value else None
    return Recorded(function, text, grid, threadgroup, words, contiguous, value)


class _Reader:
    """MLX writes numbers little-endian and strings behind their length."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, layout: str) -> tuple:
        found = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return found

    def string(self) -> str:
        (size,) = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()
