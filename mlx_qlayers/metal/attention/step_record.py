"""The record of a step of decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx

from ...measurements.thresholds import tabled
from ...options import Rotation, Scores, StepCall
from ...reference.attention_step import packed_rows, parts_of_rows
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..record import (
    CALIBRATED_KEYS,
    Inputs,
    Path,
    Record,
    exactly,
    in_float32,
    normal,
    rounded,
    too_much,
)
from . import decode, step
from .records import BATCHES, GROUP, AttentionDecodeRecord, CacheRecord, stock

# How packed caches of which a device is calibrated are packed.
_BITS = 8, 4
# Positions that a step takes at least, and rows of its append buffer.
_POSITIONS, _TAIL = 8, 256
# Threadgroups among which the keys of all sequences and heads are split at most.
_THREADGROUPS = 512


@dataclass(frozen=True)
class AttentionStepRecord(CacheRecord):
    """Tokens of each sequence, which attend to a cache's rows and half an append buffer.

    Where it is measured the cache has room for the rows of the append buffer and holds them: MLX,
    which has no append buffer, writes the tokens behind them and attends to the cache.
    """

    dtype: mx.Dtype
    # The shape.
    batch: int
    heads: int
    kv_heads: int
    keys: int  # rows of the cache
    width: int
    v_width: int
    # Of packed keys and values; 0 for plain ones.
    group_size: int = 0
    bits: int = 0
    tokens: int = 1  # of each sequence
    family, sizes_measured = "attention_step", CALIBRATED_KEYS
    configs = (step.Split,)
    values: ClassVar = {
        "splits": (0, 4, 8, 16, 24, 32, 64),
        "append_splits": (1, 2, 4),
        "slice": (16, 32, 64),
        "blocks": (1, 2),
        "columns": (1, 2, 4),
        "teams": (1, 2, 4),
    }

    @property
    def _heads(self) -> step.Heads:
        return step.Heads(self.dtype, self.width, self.v_width, self.bits, self.tokens)

    def heuristic(self, device: str) -> step.Split:
        names = ("attention_step_packed_splits",) * (self.bits > 0) + ("attention_step_splits",)
        measured = next(filter(None, (tabled(name, device=device) for name in names)))
        size, heads = self.keys, self._heads
        # Several tokens take more threadgroups of the same size, which few keys leave idle.
        share = self.heads // self.kv_heads
        config = step.unsplit(device, share, heads)
        if size <= measured["unsplit_keys"]:
            return config
        # Splits write, and later read, less than a hundredth of a 7B's weights.
        most = measured["most" if size <= measured["long_keys"] else "most_long"]
        # Of many sequences fewer are faster, as each split writes sums that another has to read.
        blocks = -(-share * self.tokens // (8 * config.columns))
        most = min(most, max(1, _THREADGROUPS // (self.batch * self.kv_heads * blocks)))
        splits = min(max(size // measured["split_keys"], measured["least"]), most)
        config = replace(config, splits=splits)
        # So few splits fill an H200 with threads only where each reads two blocks at once.
        teams = measured["long_teams"] if config.simds <= 4 else 1
        long = replace(config, blocks=measured["long_blocks"], teams=teams)
        if self.tokens > 1:  # 16 queries at once: many keys are read less often
            long = replace(long, columns=max(config.columns, min(2, -(-share * self.tokens // 8))))
        is_long = size >= measured["long_keys"] and heads.words(long) <= step._MOST_WORDS
        return long if is_long and heads.fit(long, device) else config

    def completed(self, config: step.Split) -> step.Split:
        return replace(config, simds=-(-self.v_width // config.slice))

    def why_not(self, config: step.Split) -> str | None:
        if config.columns > max(1, -(-self.heads * self.tokens // self.kv_heads // 8)):
            return f"{config.columns} columns of 8 rows for {self.heads * self.tokens} queries"
        if config.columns * config.slice > 128:
            return f"{config.columns * config.slice} sums a lane"
        if config.splits * config.tile > max(self.keys, config.tile):
            return f"{config.splits} splits of {self.keys} keys"
        if config.splits == 0 and config.append_splits > 1:
            return "one threadgroup takes the append buffer with the cache"
        if config.threads > 1024:
            return f"{config.threads} threads"
        return too_much(self._heads.memory(config))

    def kernels(self) -> tuple[Kernel, ...]:
        return step._kernel(self.bits > 0, False, False), decode.COMBINE

    def bucket(self) -> tuple[tuple[int, ...], str]:
        heads = self.batch, self.heads, self.kv_heads
        packed = f"packed-{self.group_size}-{self.bits}" if self.bits else ""
        several = f"tokens-{self.tokens}" if self.tokens > 1 else ""
        shape = *heads, rounded(self.keys), self.width, self.v_width
        return shape, " ".join(filter(None, (packed, several)))

    def variant(self, config: step.Split) -> step.Split:
        return replace(config, splits=min(config.splits, 1), append_splits=1)

    @property
    def stage(self) -> int:
        return int(self.batch > 1 or self.bits > 0)

    def calibrated(self) -> Iterator[Record]:
        """Also in batches, and with packed keys as mlx-lm packs them.

        Without measurements also attention alone: what a step asks for whose own is no faster.
        """
        whole = self.width % GROUP == self.v_width % GROUP == 0
        kinds = [(0, 0), *((GROUP, bits) for bits in _BITS if whole)]
        for group, bits in kinds:
            yield from replace(self, group_size=group, bits=bits).measured()
        if not device_of().measured:
            of_head = self.heads // self.kv_heads, self.width, self.v_width, self.bits
            alone = AttentionDecodeRecord(self.dtype, *of_head, self.kv_heads, self.keys)
            yield from alone.calibrated()

    def measured(self) -> list[Any]:
        """Of packed caches fewer, which go by others of the same kernel."""
        packed = self.bits > 0
        sizes = self.sizes_measured[: -1 if packed else None]
        return self.in_batches(BATCHES[:: 1 + packed], sizes)

    def bytes(self) -> float:
        bits = self.bits + 32 / self.group_size if self.bits else 8 * self.dtype.size
        return self.batch * self.kv_heads * self.keys * (self.width + self.v_width) * bits / 8

    def inputs(self) -> Inputs:
        batch, kv_heads, (first, held) = self.batch, self.kv_heads, self._ranges()
        widths = self.width, self.v_width
        rows = self.heads * self.width, *(kv_heads * n for n in widths)
        token = normal(self.dtype, *((batch, self.tokens, n) for n in rows))
        caches, appended = list[mx.array](), list[mx.array]()
        for n in widths:
            shapes = [(batch, kv_heads, rows, n) for rows in (self.keys, _TAIL - held)]
            cache, more = (self._parts(a) for a in normal(self.dtype, *shapes))
            pairs = zip((a[:, :, first : first + held] for a in cache), more, strict=True)
            beside = [mx.concatenate([*pair], axis=2) for pair in pairs]
            caches += cache
            appended += [packed_rows(beside)] if self.bits else beside
        positions = [first, held, *[first + held] * max(_POSITIONS, batch)]
        return [*token, *caches, *appended, mx.array(positions, mx.int32)]

    def bind(self, inputs: Inputs, config: step.Split) -> Path:
        optional: list[Any] = [None] * 5
        if device_of().orders_threadgroups:
            optional.append(
                mx.zeros(max(_POSITIONS, self.batch * self.tokens * self.heads), mx.int32)
            )
        specs = (*map(Spec.of, inputs), *[None] * 5, *map(Spec.of, optional[5:]))
        launch = step.attention_step(specs, self.width**-0.5, Rotation(self.width), config)
        return lambda inputs: launch(*inputs, *optional)

    def stock(self, inputs: Inputs) -> Inputs:
        """Attention, and the caches with the tokens' rows."""
        call, (first, held) = StepCall.of(inputs), self._ranges()
        widths = self.width, self.width, self.v_width
        q, k, v = (
            a.reshape(*a.shape[:2], -1, n).transpose(0, 2, 1, 3)
            for a, n in zip(inputs[:3], widths, strict=True)
        )
        at = first + held
        q, k, start = _turned(q, at), _turned(k, at), mx.array([at])
        new = [*self._parts(k), *self._parts(v)]
        pairs = zip((*call.k_cache, *call.v_cache), new, strict=True)
        written = [mx.slice_update(a, row.astype(a.dtype), start, (2,)) for a, row in pairs]
        seen = [a[:, :, : at + self.tokens] for a in written]
        out = stock([q, *seen], Scores(self.width**-0.5, self.tokens > 1))[0]
        return [out.transpose(0, 2, 1, 3).reshape(len(out), self.tokens, -1), *written]

    def replaced(self, path: str) -> range:
        caches = 6 if self.bits else 2
        return range(3, 3 + caches) if path == "stock" else range(3 + caches, 5 + caches)

    def reference(self, inputs: Inputs) -> Inputs:
        out, *caches = super().reference(inputs)
        first, held = self._ranges()
        half = len(caches) // 2
        appended = (self._numbers(parts) for parts in (caches[:half], caches[half:]))
        held += self.tokens
        behind = [(0, 0), (0, 0), (0, _TAIL - held), (0, 0)]
        return [out, *(mx.pad(a[:, :, first : first + held], behind) for a in appended)]

    def numbers(self, outputs: Inputs) -> Inputs:
        out, *appended = outputs
        if self.bits:
            for i, n in enumerate((self.width, self.v_width)):
                sizes = n * self.bits // 32, n // self.group_size
                like = [Spec((size,), self.dtype) for size in (*sizes, sizes[1])]
                appended[i] = self._numbers(parts_of_rows(appended[i], like))
        return [out, *appended]

    def tolerances(self, outputs: int) -> list[float]:
        first, *others = super().tolerances(outputs)
        if not self.bits:
            return [first, *others]
        # A row that was rounded before it was packed may have another code, and its group's scale
        # and bias, of which the largest numbers make three of the row's largest, are rounded too.
        packed = 2 / (2**self.bits - 1) + 1.5 * float(mx.finfo(self.dtype).eps)
        return [first, *[packed] * len(others)]

    def _ranges(self) -> tuple[int, int]:
        """The keys of the cache that count, and those of the append buffer."""
        held = min(_TAIL, self.keys - self.tokens + 1) // 2
        return self.keys - held - self.tokens, held

    def _parts(self, x: mx.array) -> Inputs:
        """Keys or values, packed if there are bits."""
        return list(mx.quantize(x, self.group_size, self.bits)) if self.bits else [x]

    def _numbers(self, parts: Sequence[mx.array]) -> mx.array:
        """Keys or values in float32."""
        first, *groups = map(in_float32, parts)
        dequantize: Any = partial(mx.dequantize, group_size=self.group_size, bits=self.bits)
        return dequantize(first, *groups) if groups else first


def _turned(x: mx.array, at: int) -> mx.array:
    """Heads from a position on; exactly by exact angles: MLX's are products in float32."""
    half, base = x.shape[-1] // 2, 10000.0
    if not exactly.get():
        return mx.fast.rope(x, 2 * half, traditional=False, base=base, scale=1.0, offset=at)
    angles = [
        [row * base ** (-i / half) for i in range(half)] for row in range(at, at + x.shape[2])
    ]
    cos, sin = (mx.array([[*map(f, row)] for row in angles], x.dtype) for f in (math.cos, math.sin))
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
