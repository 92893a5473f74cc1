"""The records of attention: of few queries, of many, and of latent rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import mlx.core as mx

from ...measurements.thresholds import row_of, tabled
from ...options import AttentionCall, Scores
from ...reference import attention as reference
from ...reference.latent_attention import latent_attention
from ...runtime import tensor_ops
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..record import (
    CALIBRATED_KEYS,
    CALIBRATED_PROMPTS,
    LARGEST,
    CallRecord,
    Fixed,
    Inputs,
    Path,
    Record,
    in_parts,
    normal,
    rounded,
    too_much,
)
from . import decode, forward, latent
from .forward import Launcher
from .layout import Layout, layout, memory, registers
from .tensor import attention_tensor, why_no_tensors

# Beyond these a thread's operands, sums and weights leave no room for addresses.
_MOST_REGISTERS = 160
# Elements of a group of packed keys and values.
GROUP = 64
# Keys of a call that are not split among threadgroups.
_WHOLE_KEYS = 256
# Batches of decoding of which a device is calibrated, and of all sequences the most keys.
BATCHES, _MOST_KEYS = (1, 8, 32), 1 << 17


class CacheRecord(Record):
    """Attention of decoding to the keys of caches."""

    batch: int
    keys: int
    v_width: int
    sized, stock_waits = "keys", False

    def admits(self, name: str) -> Sequence[int]:
        if name == "simds":  # a SIMD group takes each slice of the values
            return [-(-self.v_width // width) for width in self.values["slice"]]
        return super().admits(name)

    def in_batches(self, batches: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """In each of some batches with each number of keys; none that is too large."""
        this: Any = self
        pairs = product(batches, sizes)
        every = (replace(this, batch=b, keys=n) for b, n in pairs if b * n <= _MOST_KEYS)
        return [each for each in every if each.bytes() <= LARGEST]

    @abstractmethod
    def measured(self) -> list[Any]:
        """In all batches and sizes of which a device is calibrated."""

    def larger(self) -> Iterator[Record]:
        """Those of the next larger batch and number of keys, within what can be measured."""
        every = [each for each in self.measured() if each != self]
        batch = min(self.batch, max((each.batch for each in every), default=0))
        above = [each for each in every if each.batch >= batch and each.keys >= self.keys]
        below = [each for each in every if each.batch <= batch and each.keys <= self.keys]
        yield from above or sorted(below, key=lambda each: -each.batch * each.keys)


@dataclass(frozen=True)
class AttentionDecodeRecord(CacheRecord):
    """One query for each of so many rows over the keys of each head and sequence."""

    dtype: mx.Dtype
    rows: int  # queries of one key head
    # Of keys and of values.
    width: int
    v_width: int
    bits: int  # of packed keys and values; 0 for plain ones
    # Key heads, keys of each, and sequences.
    kv_heads: int
    keys: int
    batch: int = 1
    family, sizes_measured = "attention_decode", (_WHOLE_KEYS, *CALIBRATED_KEYS)
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
        """It does not depend on the batch."""
        widths = self.width, self.v_width
        if not device_of(device).gpu:
            # A power of two, so that one kernel serves many shapes, in a stack of 128 KB.
            rows = 1 << (self.rows - 1).bit_length()
            return decode.Serial(min(rows, 16))
        kind = "packed" if self.bits else "plain"
        most = row_of(tabled("attention_decode_splits", kind, device=device), self.keys)
        unsplit = decode.unsplit(device, self.dtype, self.rows, *widths, self.bits)
        return replace(unsplit, max_splits=most)

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
        return too_much(decode._memory(T=self.dtype, D=self.width, **asdict(config)))

    def kernels(self) -> tuple[Kernel, ...]:
        kinds = product((False, True), repeat=2)  # for GPUs and CPUs, of plain and packed keys
        return *(decode._kernel(*kind, False, False) for kind in kinds), decode.COMBINE

    @property
    def stage(self) -> int:
        return int(self.batch > 1)

    def measured(self) -> list[Any]:
        """In a batch, too, where nothing was measured; larger ones go by that."""
        batches = (self.batch,) if device_of().measured else BATCHES[:2]
        return self.in_batches(batches, self.sizes_measured)

    def calibrated(self) -> Iterator[Record]:
        yield from self.measured()

    def bucket(self) -> tuple[tuple[int, ...], str]:
        caches = self.batch * self.kv_heads
        shape = caches, self.rows, rounded(self.keys), self.width, self.v_width
        return shape, f"bits-{self.bits}"

    def variant(self, config: decode.Decode | decode.Serial) -> Any:
        if isinstance(config, decode.Serial):
            return config
        return replace(config, min_keys=1, max_splits=1), config.splits(self.keys) > 1

    def bytes(self) -> float:
        bits = self.bits or 8 * self.dtype.size
        rows = self.batch * self.kv_heads * self.keys
        return rows * (self.width + self.v_width) * bits / 8

    def inputs(self) -> Inputs:
        heads, keys = (self.kv_heads * self.rows, 1), (self.kv_heads, self.keys)
        each = (*heads, self.width), (*keys, self.width), (*keys, self.v_width)
        shapes = ((self.batch, *shape) for shape in each)
        return _packed(normal(self.dtype, *shapes), self.bits)

    def bind(self, inputs: Inputs, config: decode.Decode) -> Path:
        launch = decode.attention_decode(_call(inputs, Scores(self.width**-0.5)), config)
        return lambda inputs: launch(*inputs, None, None)

    def stock(self, inputs: Inputs) -> Inputs:
        return stock(inputs, Scores(self.width**-0.5))


@dataclass(frozen=True)
class AttentionForwardRecord(Record):
    """Attention of many queries, without a mask but the causal one."""

    shape: tuple[int, ...]  # (B, H, Hkv, L, S, D, Dv)
    dtype: mx.Dtype
    causal: bool
    bits: int = 0  # of packed keys and values; 0 for plain ones
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

    def at(self, size: int) -> AttentionForwardRecord:
        return replace(self, shape=(*self.shape[:3], size, size, *self.shape[5:]))

    def bytes(self) -> float:
        batch, _, kv_heads, _, keys, width, v_width = self.shape
        return batch * kv_heads * keys * (width + v_width) * self.dtype.size

    def operations(self) -> float:
        batch, heads, _, queries, keys, width, v_width = self.shape
        pairs = queries * (keys - queries / 2 if self.causal else keys)
        return 2.0 * batch * heads * pairs * (width + v_width)

    def larger(self) -> Iterator[Record]:
        *heads, queries, keys, width, v_width = self.shape
        longer = (n for n in CALIBRATED_PROMPTS if n >= keys and n > queries)
        return (replace(self, shape=(*heads, n, n, width, v_width)) for n in longer)

    def inputs(self) -> Inputs:
        batch, heads, kv_heads, queries, keys, width, v_width = self.shape
        shapes = (heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, v_width)
        return _packed(normal(self.dtype, *((batch, *shape) for shape in shapes)), self.bits)

    def bind(self, inputs: Inputs, config: Layout) -> Path:
        call = _call(inputs, Scores(self.shape[5] ** -0.5, self.causal))
        launch = forward.attention_forward(Launcher(call), config)
        return lambda inputs: launch(*inputs, None, None)[:1]

    def stock(self, inputs: Inputs) -> Inputs:
        q, *caches = inputs
        if self.bits:  # no operator of MLX takes them without all scores in memory
            dequantize: Any = partial(mx.dequantize, group_size=GROUP, bits=self.bits)
            caches = [dequantize(*parts) for parts in (caches[:3], caches[3:])]
        return stock([q, *caches], Scores(self.shape[5] ** -0.5, self.causal))

    def paths(self, inputs: Inputs) -> dict[str, Path]:
        found = super().paths(inputs)
        if tensor_ops.missing() is None and not self.bits:
            call = _call(inputs, Scores(self.shape[5] ** -0.5, self.causal))
            if why_no_tensors(Launcher(call)) is None:
                found["tensor"], found["tensor_memory"] = (
                    partial(_by_tensors, attention_tensor(Launcher(call, handed)))
                    for handed in (True, False)
                )
        return found


class LatentRecord(CallRecord):
    """Attention to latent rows: of rows, batch, heads and both widths; nothing else."""

    family = "latent_attention"
    sizes_measured = CALIBRATED_KEYS

    @property
    def stage(self) -> int:
        return int(self.sizes[1] > 1)

    def variant(self, config: Fixed) -> Any:
        return latent.splits_of(self.sizes[0]) > 1

    def kernels(self) -> tuple[Kernel, ...]:
        return (latent.KERNEL,)

    def bytes(self) -> float:
        rows, batch, _, width, rotated = self.sizes
        return float(rows * batch * (width + rotated) * self.dtype.size)

    def inputs(self) -> Inputs:
        rows, batch, heads, *widths = self.sizes
        shapes = [(batch, heads, 1, n) for n in widths] + [(batch, 1, rows, n) for n in widths]
        return [*normal(self.dtype, *shapes), mx.array(rows - 1)]

    def bind(self, inputs: Inputs, config: Fixed) -> Path:
        q, r, c, *_ = map(Spec.of, inputs)
        launch = latent.latent_step(q, r, c, None, sum(self.sizes[3:]) ** -0.5)
        return lambda inputs: launch(*inputs)

    def stock(self, inputs: Inputs) -> Inputs:
        return latent_attention(sum(self.sizes[3:]) ** -0.5)(*inputs, None)


def _by_tensors(launch: Callable[..., Inputs], inputs: Inputs) -> Inputs:
    return launch(*inputs, None, None)[:1]


def _packed(inputs: Inputs, bits: int) -> Inputs:
    """Queries, keys and values, the latter packed if there are bits."""
    q, *caches = inputs
    return [q, *(a for x in caches for a in (mx.quantize(x, GROUP, bits) if bits else (x,)))]


def _call(inputs: Inputs, scores: Scores) -> AttentionCall:
    """Queries, keys and values, the latter of one array or of three."""
    q, *caches = map(Spec.of, inputs)
    half = len(caches) // 2
    return AttentionCall(q, tuple(caches[:half]), tuple(caches[half:]), scores)


def stock(inputs: Inputs, scores: Scores) -> Inputs:
    """As ``auto`` computes attention without a kernel."""
    q, *caches = inputs
    queries, keys, found = q.shape[2], caches[0].shape[2], list[mx.array]()
    for at in in_parts(queries):
        # The last of fewer queries sees fewer keys.
        last = keys - max(queries - at.stop, 0) if scores.causal else keys
        given = [q[:, :, at], *(a[:, :, :last] for a in caches)]
        call = _call(given, scores)
        found += (reference.stock(call) or reference.attention(call))(*given, None, None)
    return [mx.concatenate(found, axis=2)]
