"""Quantized caches of batches and of windows, which mlx-lm lacks.

Each is mlx-lm's cache of the plain class, whose keys and values are ``(packed, scales, biases)`` as
``mx.quantize`` gives them. mlx-lm's own code runs once for each of the three arrays, so rows are
merged, trimmed and overwritten as in plain caches, and nothing is quantized twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as stock

_PARTS = 3


class _Quantized:
    """What the classes below add to the one of mlx-lm's that each is made of."""

    plain: Any
    keys: Any
    values: Any
    group_size: int
    bits: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        new = zip(
            *(mx.quantize(x, self.group_size, self.bits) for x in (keys, values)), strict=True
        )
        parts = self._parts()
        found = [part.update_and_fetch(*each) for part, each in zip(parts, new, strict=True)]
        self._take(parts)
        return tuple(zip(*found, strict=True))

    def keys_and_values(self) -> Any:
        return tuple(zip(*(part.keys_and_values() for part in self._parts()), strict=True))

    def filter(self, batch_indices: Any) -> None:
        """Keep these sequences alone."""
        self._each(lambda part: part.filter(batch_indices))

    def finalize(self) -> None:
        """Move the rows of prompts that were padded on their right."""
        self._each(lambda part: part.finalize())

    def extend(self, other: Any) -> None:
        """Add the sequences of another cache."""
        others = iter(other._parts())
        self._each(lambda part: part.extend(next(others)))

    def extract(self, idx: int) -> Any:
        """The cache of one sequence."""
        return _joined([part.extract(idx) for part in self._parts()], self.group_size, self.bits)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """A batch of caches of one sequence each, packed alike."""
        first = caches[0]
        if any((c.group_size, c.bits) != (first.group_size, first.bits) for c in caches):
            raise ValueError("caches that are packed in other ways cannot be merged")
        each = [_parts_of(c, cls.plain) for c in caches]
        parts = [cls.plain.merge([*some]) for some in zip(*each, strict=True)]
        return _joined(parts, first.group_size, first.bits)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The cache itself, as mlx-lm asks for it before each token."""
        return self

    @property
    def state(self) -> Any:
        """mlx-lm's of the plain class, and the format."""
        own = self.plain.state.fget(self)
        return *own, self.group_size, self.bits

    @state.setter
    def state(self, v: Any) -> None:
        *own, self.group_size, self.bits = v
        own[:2] = [None if each is None else tuple(each) for each in own[:2]]
        self.plain.state.fset(self, own)

    @property
    def nbytes(self) -> int:
        """Of packed numbers, scales and biases."""
        return sum(a.nbytes for buffer in (self.keys, self.values) for a in buffer or ())

    def _parts(self) -> list[Any]:
        return _parts_of(self, self.plain)

    def _take(self, parts: list[Any]) -> None:
        """Hold what the parts hold."""
        vars(self).update(vars(parts[0]))
        for name in ("keys", "values"):
            arrays = tuple(getattr(part, name) for part in parts)
            setattr(self, name, None if arrays[0] is None else arrays)

    def _each(self, change: Callable[[Any], None]) -> None:
        parts = self._parts()
        for part in parts:
            change(part)
        self._take(parts)


def _parts_of(c: Any, plain: Any) -> list[Any]:
    """Three plain caches, which share no array: mlx-lm's code changes some in place."""
    buffers = c.keys, c.values
    found = []
    for i in range(_PARTS):
        part = plain.__new__(plain)
        own = {n: mx.array(v) if isinstance(v, mx.array) else v for n, v in vars(c).items()}
        keys, values = (None if each is None else each[i] for each in buffers)
        vars(part).update(own | {"keys": keys, "values": values})
        found.append(part)
    return found


def _joined(parts: list[Any], group_size: int, bits: int) -> Any:
    kind = _KINDS[type(parts[0]).__name__]
    c: Any = kind.__new__(kind)
    c.group_size, c.bits = group_size, bits
    _Quantized._take(c, parts)
    return c


class QuantizedKVCache(stock.QuantizedKVCache):
    """mlx-lm's, which can be merged into a batch."""

    plain = stock.KVCache
    merge: Any = classmethod(_Quantized.merge.__func__)  # type: ignore[attr-defined]

    def size(self) -> int:
        """The tokens that it holds."""
        return int(self.offset)


class RotatingQuantizedKVCache(_Quantized, stock.RotatingKVCache):
    """A quantized window of one sequence, as mlx-lm's ``RotatingKVCache``."""

    plain = stock.RotatingKVCache

    def __init__(self, max_size: int, keep: int = 0, group_size: int = 64, bits: int = 8) -> None:
        super().__init__(max_size, keep)
        self.group_size, self.bits = group_size, bits


class BatchQuantizedKVCache(_Quantized, stock.BatchKVCache):
    """A quantized cache of several lengths, as mlx-lm's ``BatchKVCache``."""

    plain = stock.BatchKVCache

    def __init__(self, left_padding: list[int], group_size: int = 64, bits: int = 8) -> None:
        super().__init__(left_padding)
        self.group_size, self.bits = group_size, bits


class BatchRotatingQuantizedKVCache(_Quantized, stock.BatchRotatingKVCache):
    """Quantized windows of several lengths, as mlx-lm's ``BatchRotatingKVCache``."""

    plain = stock.BatchRotatingKVCache

    def __init__(
        self, max_size: int, left_padding: list[int], group_size: int = 64, bits: int = 8
    ) -> None:
        super().__init__(max_size, left_padding)
        self.group_size, self.bits = group_size, bits


# By the name of mlx-lm's class.
_KINDS: dict[str, Any] = {
    "KVCache": QuantizedKVCache,
    "RotatingKVCache": RotatingQuantizedKVCache,
    "BatchKVCache": BatchQuantizedKVCache,
    "BatchRotatingKVCache": BatchRotatingQuantizedKVCache,
}
# mlx-lm reads prompt caches by the names of classes in its module.
for _kind in _KINDS.values():
    vars(stock).setdefault(_kind.__name__, _kind)


def quantized(c: Any, group_size: int = 64, bits: int = 8) -> Any:
    """A cache of mlx-lm's with its keys and values packed.

    Args:
        c: plain, full or empty; mlx-lm's quantized one becomes one that can be merged into a
            batch, others are given back as they are.
        group_size: 32, 64 or 128 numbers.
        bits: 2, 3, 4, 5, 6 or 8.
    """
    kind = _KINDS.get(type(c).__name__)
    if isinstance(c, stock.CacheList):
        return stock.CacheList(*(quantized(each, group_size, bits) for each in c.caches))
    if type(c) is stock.QuantizedKVCache:
        found: Any = QuantizedKVCache(c.group_size, c.bits)
        vars(found).update(vars(c))
        return found
    if kind is None:
        return c
    found = kind.__new__(kind)
    buffers = c.keys, c.values
    packed = [None if x is None else tuple(mx.quantize(x, group_size, bits)) for x in buffers]
    vars(found).update(vars(c), group_size=group_size, bits=bits, keys=packed[0], values=packed[1])
    return found


def make_prompt_cache(
    model: Any, max_kv_size: int | None = None, *, group_size: int = 64, bits: int = 8
) -> list[Any]:
    """``mlx_lm.models.cache.make_prompt_cache`` with quantized caches from the first token on."""
    return [quantized(c, group_size, bits) for c in stock.make_prompt_cache(model, max_kv_size)]


def maybe_quantize_kv_cache(
    prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: int | None
) -> None:
    """``mlx_lm.generate.maybe_quantize_kv_cache``, of windows too."""
    for i, c in enumerate(prompt_cache if kv_bits is not None else ()):
        if type(c).__name__ in _KINDS and c.offset >= quantized_kv_start:
            prompt_cache[i] = quantized(c, kv_group_size, cast(int, kv_bits))
