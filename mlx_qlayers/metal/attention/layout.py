"""How the attention kernels spread their work, by device family and head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...measurements.thresholds import row_of, tabled
from ...runtime.backend import backend
from ...runtime.devices import device_of
from ...runtime.launch import Size

# The largest head that the kernels take, and that of the forward kernel alone, in 16 bits.
WIDEST, WIDEST_FORWARD = 256, 576


@dataclass(frozen=True)
class Layout:
    """How one kernel spreads its work; the heads of the sources say what the words mean."""

    blocks: int = 1  # blocks of 16 rows that a SIMD group owns
    simds: int = 4  # SIMD groups of a threadgroup, a multiple of `slices * roles`
    slices: int = 1  # SIMD groups that share their rows, each with its part of the columns
    # SIMD groups that share keys in the gradient of keys and values: one for both, or 2.
    roles: int = 1
    alternate: bool = False  # whether both tiles share one place, one after the other
    tile: int = 32  # rows of a tile in threadgroup memory, a multiple of 16
    # Whether the next tile is read from device memory while the last one is used. Where GPUs copy
    # beside registers the forward kernel always does, and those of the gradients have a second
    # place for each tile.
    ahead: bool = False
    # Threadgroups that a core should hold at once. NVIDIA's compiler then keeps to as many
    # registers; elsewhere it means nothing.
    resident: int = 1

    def __post_init__(self) -> None:
        if self.tile % 16 or self.simds % (self.slices * self.roles):
            raise ValueError(f"tile and simds must be multiples, not those of {self}")
        if self.alternate and (self.ahead or self.roles == 2):
            raise ValueError(f"alternate leaves no place to read ahead or for roles: {self}")

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds

    @property
    def rows(self) -> int:
        """Rows that a threadgroup owns."""
        return 16 * self.blocks * self.simds // (self.slices * self.roles)

    def grid(self, rows: int, heads: int, batch: int) -> tuple[Size, Size]:
        """The grid of as many threadgroups as own so many rows, and their threads."""
        return (self.threads * -(-rows // self.rows), heads, batch), (self.threads, 1, 1)

    def template(self) -> dict[str, Any]:
        """The values of the template parameters; ``ROLES`` is of keys and values alone."""
        return {name.upper(): value for name, value in vars(self).items() if name != "roles"}


def layout(kernel: str, device: str, dtype: mx.Dtype, width: int) -> Layout:
    """The layout of ``"forward"``, ``"packed"`` (keys), ``"queries"`` or ``"keys"`` (gradients).

    ``width`` is the larger of the head sizes of keys and values.
    """
    name, size = "attention_layout", dtype.size
    at = "cuda" if device_of(device).tensor_cores else "metal"
    table = tabled(name, kernel, size, device=at) or tabled(name, "forward", size, device=at)
    return Layout(**row_of(table, width))


def _stride(width: int, size: int) -> int:
    """Elements from row to row of a tile, as ``tile_stride`` has it."""
    return (width * size // 16 | 1) * 16 // size


def tile_bytes(rows: int, width: int, size: int) -> int:
    """Bytes of a tile of so many rows."""
    return size * rows * _stride(width, size)


def _rounded_widths(kernel: str, values: Mapping[str, Any]) -> list[int]:
    """The head sizes of keys and values, in whole steps of every slice."""
    widths = [values["D"], values["DV"]]
    if kernel == "keys":
        widths = [max(widths)] * 2
    rounding = [16 * values["SLICES"], (8 if kernel == "forward" else 16) * values["SLICES"]]
    return [-(-width // to) * to for width, to in zip(widths, rounding, strict=True)]


def registers(kernel: str, values: Mapping[str, Any], device: str | None = None) -> int:
    """32-bit registers that operands, sums and products take in a thread, as :func:`memory`."""
    size = device_of(device).operand_bytes(values["T"])
    slices, roles = values["SLICES"], values.get("ROLES", 1)
    width, width_v = _rounded_widths(kernel, values)
    operands = {"forward": width, "queries": width + width_v, "keys": 2 // roles * width}[kernel]
    sums = {"forward": width_v, "queries": width, "keys": 2 // roles * width}[kernel]
    products = {"forward": 1, "queries": 2, "keys": 2 // roles}[kernel] * values["TILE"]
    # Of 16 rows, a lane of 32 has half an element each.
    per_block = (operands * size / 4 + sums) / slices / 2 + products / 2
    return round(values["BLOCKS"] * per_block)


def _uses_warpgroup(values: Mapping[str, Any], device: str) -> bool:
    """Whether four SIMD groups multiply at once, as ``uses_warpgroup`` has it."""
    slices = values["SLICES"]
    owners = values["SIMDS"] // (slices * values.get("ROLES", 1))
    widths = (values["D"], values["DV"])
    whole = owners % 4 == 0 and all(width % (64 * slices) == 0 for width in widths)
    return device_of(device).tensor_cores and values["T"].size == 2 and whole


def memory(kernel: str, values: Mapping[str, Any], device: str | None = None) -> int:
    """Bytes of threadgroup memory by the values of the template."""
    device = device or backend()
    size, slices, tile = values["T"].size, values["SLICES"], values["TILE"]
    roles, warpgroup = values.get("ROLES", 1), _uses_warpgroup(values, device)
    wide = _rounded_widths(kernel, values)
    rows = [size * (width if warpgroup else _stride(width, size)) for width in wide]
    used = tile * (max(rows) if values["ALTERNATE"] else sum(rows))
    statistics = (12 if size == 4 else 8) * tile if kernel == "keys" else 0
    # The next tiles have buffers of their own.
    buffers = 2 if kernel != "forward" and warpgroup and values["AHEAD"] else 1
    used = buffers * (used + statistics)
    # Products of 16 rows with a tile that a SIMD group adds up with others.
    products = {"forward": 1, "queries": 2, "keys": 2 // roles}[kernel] * values["BLOCKS"]
    simds = values["SIMDS"]
    # Where there is nothing to exchange one element stands for it; NVIDIA's compiler drops it.
    unused = 0 if device_of(device).tensor_cores else 8
    used += unused if slices == 1 else simds * products * tile * 64
    if kernel == "keys":
        used += unused if roles == 1 else simds * values["BLOCKS"] // (slices * roles) * tile * 64
    return used
