"""What can be tuned: for each kernel family the question that operations ask, and its heuristic.

A problem is such a question. Its class says which configurations answer it, which kernels they
belong to, and under which key a result is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, ClassVar

import mlx.core as mx

from ..metal.attention import decode, forward, step
from ..metal.attention.layout import Layout, layout, memory, registers, rounded
from ..metal.common import row_sum
from ..metal.common.row_sum import RowSum
from ..metal.grid_sample import launch as grid_sample
from ..runtime.kernel import Kernel
from .calls import ExpertsProblem, GatherProblem, LatentProblem, RouterProblem
from .problem import CALIBRATED_KEYS, CALIBRATED_PROMPTS, Problem, too_much
from .products import QmmProblem, QmvProblem
from .thresholds import threshold

# Beyond these a thread's operands, sums and weights leave no room for addresses.
_MOST_REGISTERS = 160
# Batches of decoding of which a device is calibrated, of all sequences the most keys, and how
# packed caches are packed.
_BATCHES, _MOST_KEYS, _GROUP, _BITS = (1, 8, 32), 1 << 17, 64, (8, 4)
_DECODE = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class RowSumProblem(Problem):
    """Sums of the rows of x (M, K)."""

    m: int
    k: int
    dtype: mx.Dtype
    family, configs = "row_sum", (RowSum,)
    values: ClassVar = {
        "upcast": (1, 2, 4),
        "unroll": (1, 2, 4, 8),
        "local": (1, 2, 4, 8),
        "group": (1, 2, 4, 8),
        "blocked": (False, True),
        "padded": (False, True),
    }

    def heuristic(self, device: str) -> RowSum:
        return RowSum(local=4)

    def why_not(self, config: RowSum) -> str | None:
        if 32 * config.local * config.group > 256:
            return "more than 256 threads"
        if config.blocked and config.group == 1:
            return "one SIMD group has nothing to split"
        if not config.padded and self.k % (32 * config.unroll):
            return f"rows of {self.k} are not whole turns"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        return (row_sum.KERNEL,)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.m, self.k), ""


def _slices(problem: AttentionDecodeProblem | AttentionStepProblem) -> list[int]:
    """Into how many slices the values may be cut: a SIMD group takes each."""
    return [-(-problem.v_width // width) for width in problem.values["slice"]]


@dataclass(frozen=True)
class AttentionDecodeProblem(Problem):
    """One query for each of so many rows over the keys of so many caches.

    Attributes:
        rows: queries of one key head.
        width, v_width: of keys and of values.
        bits: of packed keys and values; 0 for plain ones.
        caches: those of the batch and of all key heads.
        keys: of each.
    """

    dtype: mx.Dtype
    rows: int
    width: int
    v_width: int
    bits: int
    caches: int
    keys: int
    family, sized, sizes_measured = "attention_decode", "keys", CALIBRATED_KEYS
    configs = (decode.Decode, decode.Serial)
    values: ClassVar = {
        "min_keys": (16, 32, 64, 128, 256, 512),
        "max_splits": (16, 32, 64, 128, 256),
        "slice": (16, 32, 64),
        "blocks": (1, 2, 4),
        "columns": (1, 2, 4, 8),
        "combine": (4, 8, 16),
    }

    def heuristic(self, device: str) -> decode.Decode | decode.Serial:
        splits = threshold("attention_decode_splits", device=device)
        size = self.rows, (self.width, self.v_width), self.bits, self.keys
        return decode.configure(device, self.dtype, *size, splits)

    def admits(self, name: str) -> Sequence[int]:
        return _slices(self) if name == "simds" else super().admits(name)

    def completed(self, config: decode.Decode | decode.Serial) -> decode.Decode | decode.Serial:
        if isinstance(config, decode.Serial):
            return config
        return replace(config, simds=-(-self.v_width // config.slice))

    def why_not(self, config: decode.Decode | decode.Serial) -> str | None:
        if isinstance(config, decode.Serial):
            return None
        if config.columns > max(1, -(-self.rows // 8)):
            return f"{config.columns} columns of 8 rows for {self.rows}"
        if config.columns * config.slice > 256:
            return f"{config.columns * config.slice} sums a lane"
        if config.min_keys < config.tile and config.min_keys != 16:
            return f"splits of {config.min_keys} keys are those of {config.tile}"
        sizes: Any = {n: getattr(config, n) for n in ("columns", "simds", "blocks", "run")}
        return too_much(decode._memory(T=self.dtype, D=self.width, **sizes))

    def kernels(self) -> tuple[Kernel, ...]:
        return (
            # For GPUs and for CPUs, plain and packed keys.
            *(decode._kernel(serial, packed, False, False) for serial, packed in _DECODE),
            decode._combine(False),
        )

    def bucket(self) -> tuple[tuple[int, ...], str]:
        shape = self.caches, self.rows, rounded(self.keys), self.width, self.v_width
        return shape, f"bits-{self.bits}"

    def variant(self, config: decode.Decode | decode.Serial) -> Any:
        if isinstance(config, decode.Serial):
            return config
        return replace(config, min_keys=1, max_splits=1), config.splits(self.keys) > 1

    def bytes(self) -> float:
        bits = self.bits or 8 * self.dtype.size
        return self.caches * self.keys * (self.width + self.v_width) * bits / 8


@dataclass(frozen=True)
class AttentionStepProblem(Problem):
    """One token of each sequence, which attends to a cache of so many rows, and its tail.

    Attributes:
        batch, heads, kv_heads, width, v_width: the shape.
        keys: rows of the cache.
        group_size, bits: of packed keys and values; 0 for plain ones.
    """

    dtype: mx.Dtype
    batch: int
    heads: int
    kv_heads: int
    keys: int
    width: int
    v_width: int
    group_size: int = 0
    bits: int = 0
    family, sized, sizes_measured = "attention_step", "keys", CALIBRATED_KEYS
    configs = (step.Step,)
    values: ClassVar = {
        "splits": (0, 4, 8, 16, 24, 32, 64),
        "tail_splits": (1, 2, 4),
        "slice": (16, 32, 64),
        "blocks": (1, 2),
        "columns": (1, 2, 4),
        "teams": (1, 2, 4),
    }

    def heuristic(self, device: str) -> step.Step:
        names = ("attention_step_packed_splits",) * (self.bits > 0) + ("attention_step_splits",)
        splits = next(filter(None, (threshold(name, device=device) for name in names)))
        size = self.heads // self.kv_heads, self.keys, (self.width, self.v_width)
        return step.configure(device, self.dtype, *size, splits, self.bits)

    def admits(self, name: str) -> Sequence[int]:
        return _slices(self) if name == "simds" else super().admits(name)

    def completed(self, config: step.Step) -> step.Step:
        return replace(config, simds=-(-self.v_width // config.slice))

    def why_not(self, config: step.Step) -> str | None:
        if config.columns > max(1, -(-self.heads // self.kv_heads // 8)):
            return f"{config.columns} columns of 8 rows for {self.heads} heads"
        if config.columns * config.slice > 128:
            return f"{config.columns * config.slice} sums a lane"
        if config.splits * config.tile > max(self.keys, config.tile):
            return f"{config.splits} splits of {self.keys} keys"
        if config.splits == 0 and config.tail_splits > 1:
            return "one threadgroup takes the tail with the cache"
        if config.threads > 1024:
            return f"{config.threads} threads"
        sizes: dict[str, Any] = {"T": self.dtype, "D": self.width, "Dv": self.v_width}
        return too_much(step._memory(**sizes, bits=self.bits, joined=True, **asdict(config)))

    def kernels(self) -> tuple[Kernel, ...]:
        return step._kernel(self.bits > 0, False, False), decode._combine(False)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        heads = self.batch, self.heads, self.kv_heads
        form = f"packed-{self.group_size}-{self.bits}" if self.bits else ""
        return (*heads, rounded(self.keys), self.width, self.v_width), form

    def variant(self, config: step.Step) -> step.Step:
        return replace(config, splits=min(config.splits, 1), tail_splits=1)

    @property
    def stage(self) -> int:
        return int(self.batch > 1 or self.bits > 0)

    def calibrated(self) -> Iterator[Problem]:
        """In batches, too, up to so many keys, and with packed keys as mlx-lm packs them."""
        whole = self.width % _GROUP == self.v_width % _GROUP == 0
        kinds = [(0, 0), *((_GROUP, bits) for bits in _BITS if whole)]
        for (group, bits), batch in product(kinds, _BATCHES):
            rest = replace(self, batch=self.batch * batch, group_size=group, bits=bits)
            yield from (rest.at(n) for n in self.sizes_measured if batch * n <= _MOST_KEYS)

    def larger(self) -> Iterator[Problem]:
        """In the next larger batch, too: the kernel is the same."""
        for batch in (n for n in _BATCHES if n >= self.batch):
            rest = replace(self, batch=batch)
            keys = (n for n in self.sizes_measured if n >= self.keys)
            yield from (rest.at(n) for n in keys if (batch, n) != (self.batch, self.keys))

    def bytes(self) -> float:
        bits = self.bits + 32 / self.group_size if self.bits else 8 * self.dtype.size
        return self.batch * self.kv_heads * self.keys * (self.width + self.v_width) * bits / 8


@dataclass(frozen=True)
class AttentionForwardProblem(Problem):
    """Attention of many queries, without a mask but the causal one.

    Attributes:
        shape: (B, H, Hkv, L, S, D, Dv).
        bits: of packed keys and values; 0 for plain ones.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    causal: bool
    bits: int = 0
    family, sizes_measured, configs = "attention_forward", CALIBRATED_PROMPTS, (Layout,)
    values: ClassVar = {
        "blocks": (1, 2),
        "simds": (2, 4, 8),
        "slices": (1, 2, 4),
        "tile": (16, 32, 64, 128),
        "alternate": (False, True),
        "ahead": (False, True),
    }

    def heuristic(self, device: str) -> Layout:
        kernel = "packed" if self.bits else "forward"
        return layout(kernel, device, self.dtype, max(self.shape[5:]))

    def why_not(self, config: Layout) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        *_, width, v_width = self.shape
        values = {"T": self.dtype, "D": width, "DV": v_width, **config.template()}
        if (found := registers("forward", values)) > _MOST_REGISTERS:
            return f"{found} registers"
        return too_much(memory("forward", values))

    def kernels(self) -> tuple[Kernel, ...]:
        return (forward._PACKED if self.bits else forward._FORWARD,)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        lengths, packed = map(rounded, self.shape[3:5]), f"-bits-{self.bits}" if self.bits else ""
        kind = "causal" if self.causal else "full"
        return (*self.shape[:3], *lengths, *self.shape[5:]), kind + packed

    @property
    def size(self) -> int:
        return self.shape[3]

    def at(self, size: int) -> AttentionForwardProblem:
        return replace(self, shape=(*self.shape[:3], size, size, *self.shape[5:]))

    def bytes(self) -> float:
        batch, _, kv_heads, _, keys, width, v_width = self.shape
        return batch * kv_heads * keys * (width + v_width) * self.dtype.size

    def operations(self) -> float:
        batch, heads, _, queries, keys, width, v_width = self.shape
        pairs = queries * (keys - queries / 2 if self.causal else keys)
        return 2.0 * batch * heads * pairs * (width + v_width)

    def larger(self) -> Iterator[Problem]:
        *heads, queries, keys, width, v_width = self.shape
        longer = (n for n in CALIBRATED_PROMPTS if n >= keys and n > queries)
        return (replace(self, shape=(*heads, n, n, width, v_width)) for n in longer)


@dataclass(frozen=True)
class GridSampleProblem(Problem):
    """Samples of images of so many channels and dimensions at points without order."""

    channels: int
    dtype: mx.Dtype
    deterministic: bool
    dims: int
    family, configs = "grid_sample", (grid_sample.GridSampleConfig,)
    values: ClassVar = {
        "lanes": (1, 2, 4, 8, 16, 32),
        "pack": (1, 2, 4, 8),
        "run": (1, 2, 4),
        "threads": (64, 128, 256, 512),
    }

    def heuristic(self, device: str) -> grid_sample.GridSampleConfig:
        return grid_sample.heuristic(self.channels, self.dtype, device, self.deterministic)

    def completed(self, config: grid_sample.GridSampleConfig) -> grid_sample.GridSampleConfig:
        if config.threads == 1:  # where threads run one by one
            return config
        return replace(config, align=self.dtype.size * (config.pack & -config.pack))

    def why_not(self, config: grid_sample.GridSampleConfig) -> str | None:
        if self.channels % config.pack or config.align > 16:
            return f"packs of {config.pack} of {self.channels} channels"
        packs = self.channels // config.pack
        return f"{config.lanes} threads for {packs} packs" if config.lanes > max(1, packs) else None

    def kernels(self) -> tuple[Kernel, ...]:
        return grid_sample._FORWARD, grid_sample._GRADIENT_GRID

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.channels, self.dims), "deterministic" if self.deterministic else "any"


PROBLEMS: dict[str, type[Problem]] = {
    kind.family: kind
    for kind in (
        RowSumProblem,
        QmvProblem,
        QmmProblem,
        AttentionDecodeProblem,
        AttentionStepProblem,
        AttentionForwardProblem,
        GridSampleProblem,
        ExpertsProblem,
        GatherProblem,
        RouterProblem,
        LatentProblem,
    )
}
