"""Quantized caches of batches and of windows, which mlx-lm lacks, in formats that it lacks.

Each is mlx-lm's cache of the plain class, whose keys and values are ``(packed, scales, biases)`` as
``mx.quantize`` gives them. mlx-lm's own code runs once for each of the three arrays, so rows are
merged, trimmed and overwritten as in plain caches, and nothing is quantized twice. Keys and values
may have other bits, and go through a Hadamard transform of their heads before they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock

from ..options import RotatedRows
from ..reference.hadamard import rotated_heads

_PARTS = 3


class CacheFormat(NamedTuple):
    """How a cache packs keys and values.

    Attributes:
        group_size: numbers that share a scale: 32, 64 or 128.
        bits: of keys: 2, 3, 4, 5, 6 or 8.
        v_bits: of values; None for those of keys.
        hadamard: whether heads go through a Hadamard transform first, in blocks of the largest
            power of two that divides their size. It spreads what few channels hold.
    """

    group_size: int = 64
    bits: int = 8
    v_bits: int | None = None
    hadamard: bool = False

    def packed(self, keys: mx.array, values: mx.array) -> list[Any]:
        """Keys and values as a cache holds them."""
        found = []
        for x, bits in ((keys, self.bits), (values, self.v_bits or self.bits)):
            if x.shape[-1] % self.group_size:
                text = f"groups of {self.group_size} numbers for heads of {x.shape[-1]}"
                raise ValueError(f"a cache cannot have {text}")
            rows = rotated_heads(x) if self.hadamard else x
            found.append(mx.quantize(rows, self.group_size, bits))
        return found


EIGHT_BITS = CacheFormat()
# The attributes of a cache in turn, as in CacheFormat.
_NAMES = CacheFormat._fields


def format_of(c: Any) -> CacheFormat:
    """The format of a quantized cache, mlx-lm's or one of these."""
    own = vars(c)
    return CacheFormat(*(own.get(n, d) for n, d in zip(_NAMES, EIGHT_BITS, strict=True)))


class _Quantized:
    """The additions of the classes below to those of mlx-lm's that they extend."""

    plain: Any
    keys: Any
    values: Any
    hadamard: bool
    unsaved = ""  # an attribute that mlx-lm's states lack, and so its caches that are made of them

    def __init__(self, *settings: Any, form: CacheFormat = EIGHT_BITS) -> None:
        super().__init__(*settings)
        _set_format(self, form)

    @property
    def bits(self) -> int:
        """Those of keys and values, by which mlx-lm's own attention takes them."""
        _, bits, v_bits, hadamard = format_of(self)
        if hadamard or v_bits not in (None, bits):
            raise ValueError("attention of a stock model takes no such cache: convert_model first")
        return bits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        new, parts = zip(*format_of(self).packed(keys, values), strict=True), self._parts()
        found = [part.update_and_fetch(*each) for part, each in zip(parts, new, strict=True)]
        self._take(parts)
        return self._given(found)

    def keys_and_values(self) -> Any:
        return self._given([part.keys_and_values() for part in self._parts()])

    def _given(self, parts: Any) -> Any:
        kind = RotatedRows if self.hadamard else tuple
        return tuple(map(kind, zip(*parts, strict=True)))

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
        return _joined([part.extract(idx) for part in self._parts()], format_of(self))

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """A batch of caches of one sequence each, packed alike."""
        form = format_of(caches[0])
        if any(format_of(c) != form for c in caches):
            raise ValueError("caches that are packed in other ways cannot be merged")
        each = [_parts_of(c, cls.plain) for c in caches]
        return _joined([cls.plain.merge([*some]) for some in zip(*each, strict=True)], form)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The cache itself, as mlx-lm asks for it before each token."""
        return self

    @property
    def state(self) -> Any:
        """mlx-lm's of the plain class, and the format."""
        return *self.plain.state.fget(self), *format_of(self)

    @state.setter
    def state(self, v: Any) -> None:
        own, form = [*v[: -len(_NAMES)]], v[-len(_NAMES) :]
        _set_format(self, CacheFormat(*form))
        own[:2] = [None if each is None else tuple(each) for each in own[:2]]
        self.plain.state.fset(self, own)
        if self.unsaved:
            setattr(self, self.unsaved, None)

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


def _set_format(c: Any, form: CacheFormat) -> None:
    vars(c).update(form._asdict() | {"v_bits": form.v_bits or form.bits})


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


def _joined(parts: list[Any], form: CacheFormat) -> Any:
    c = _new(type(parts[0]).__name__, form)
    _Quantized._take(c, parts)
    return c


class QuantizedKVCache(stock.QuantizedKVCache):
    """mlx-lm's, which can be merged into a batch."""

    plain = stock.KVCache
    merge: Any = classmethod(_Quantized.merge.__func__)  # type: ignore[attr-defined]

    def size(self) -> int:
        """The tokens that it holds."""
        return int(self.offset)


class PackedKVCache(_Quantized, stock.KVCache):
    """A cache of one sequence in a format that mlx-lm's ``QuantizedKVCache`` does not have."""

    plain = stock.KVCache


class RotatingQuantizedKVCache(_Quantized, stock.RotatingKVCache):
    """A quantized window of one sequence, as mlx-lm's ``RotatingKVCache``."""

    plain = stock.RotatingKVCache


class BatchQuantizedKVCache(_Quantized, stock.BatchKVCache):
    """A quantized cache of several lengths, as mlx-lm's ``BatchKVCache``."""

    plain = stock.BatchKVCache
    unsaved = "_right_padding"


class BatchRotatingQuantizedKVCache(_Quantized, stock.BatchRotatingKVCache):
    """Quantized windows of several lengths, as mlx-lm's ``BatchRotatingKVCache``."""

    plain = stock.BatchRotatingKVCache
    unsaved = "_lengths"


# By the name of mlx-lm's class.
_KINDS: dict[str, Any] = {
    "KVCache": PackedKVCache,
    "RotatingKVCache": RotatingQuantizedKVCache,
    "BatchKVCache": BatchQuantizedKVCache,
    "BatchRotatingKVCache": BatchRotatingQuantizedKVCache,
}
# mlx-lm reads prompt caches by the names of classes in its module.
for _each in (QuantizedKVCache, *_KINDS.values()):
    vars(stock).setdefault(_each.__name__, _each)


def _new(plain: str, form: CacheFormat) -> Any:
    """A cache in a format, mlx-lm's where it has it: of 3, 5 and 6 bits its rows do not fit."""
    own = form.v_bits in (None, form.bits) and not form.hadamard and form.bits in (2, 4, 8)
    kind: Any = QuantizedKVCache if plain == "KVCache" and own else _KINDS[plain]
    c = kind.__new__(kind)
    _set_format(c, form)
    return c


def quantized(
    c: Any, group_size: int = 64, bits: int = 8, v_bits: int | None = None, hadamard: bool = False
) -> Any:
    """A cache of mlx-lm's with its keys and values packed: see :class:`CacheFormat`.

    It may be full or empty. mlx-lm's quantized one becomes one that can be merged into a batch;
    others are given back.
    """
    form = CacheFormat(group_size, bits, v_bits or bits, hadamard)
    if isinstance(c, stock.CacheList):
        return stock.CacheList(*(quantized(each, *form) for each in c.caches))
    if type(c) is stock.QuantizedKVCache:
        found: Any = QuantizedKVCache(c.group_size, c.bits)
        vars(found).update(vars(c))
        return found
    if type(c).__name__ not in _KINDS:
        return c
    found = _new(type(c).__name__, form)
    vars(found).update(vars(c))
    if c.keys is not None:
        found.keys, found.values = map(tuple, form.packed(c.keys, c.values))
    return found


Formats = CacheFormat | Sequence[CacheFormat]


def _in_turn(formats: Formats, count: int) -> Sequence[CacheFormat]:
    """A format for each cache of a model."""
    if isinstance(formats, CacheFormat):
        return [formats] * count
    if len(formats) != count:
        raise ValueError(f"there are formats of {len(formats)} caches, and the model has {count}")
    return formats


def make_prompt_cache(
    model: Any, max_kv_size: int | None = None, *, formats: Formats = EIGHT_BITS
) -> list[Any]:
    """``mlx_lm.models.cache.make_prompt_cache`` with quantized caches from the first token on.

    ``formats`` is one for all caches, or one for each of them in turn.
    """
    plain = stock.make_prompt_cache(model, max_kv_size)
    each = _in_turn(formats, len(plain))
    return [quantized(c, *form) for c, form in zip(plain, each, strict=True)]


def maybe_quantize_kv_cache(
    prompt_cache: list[Any],
    quantized_kv_start: int,
    kv_group_size: int = 64,
    kv_bits: int | None = None,
    formats: Formats | None = None,
) -> None:
    """``mlx_lm.generate.maybe_quantize_kv_cache``, of windows too, and in any formats."""
    if formats is None and kv_bits is not None:
        formats = CacheFormat(kv_group_size, kv_bits)
    if formats is None:
        return
    for i, form in enumerate(_in_turn(formats, len(prompt_cache))):
        c = prompt_cache[i]
        if type(c).__name__ in _KINDS and c.offset >= quantized_kv_start:
            prompt_cache[i] = quantized(c, *form)
