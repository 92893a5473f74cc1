"""The record of a kernel family, which stands beside its launcher.

The rules of operations, calibration and the tuner read it. An instance is a key, that is all that
identifies what a kernel is asked for.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

from ..formats import Format
from ..runtime import tensor_ops
from ..runtime.backend import within
from ..runtime.devices import KERNELS
from ..runtime.devices.record import MAX_THREADGROUP_MEMORY
from ..runtime.kernel import Kernel

# Rows of decoding and of prompts, and keys of a cache, of which a device is calibrated. Sizes
# between two of them go by the larger.
CALIBRATED_ROWS = (1, 2, 4, 8, 16)
CALIBRATED_PROMPTS = (64, 512, 2048)
CALIBRATED_KEYS = (512, 4096, 65536)
# Bytes of what is measured: a conversion has little more memory than the model.
LARGEST = 1 << 30
# Rows that no GPU multiplies by matrix units of TF32.
_FEW = 8

Inputs = list[mx.array]
# Gives all outputs.
Path = Callable[[Inputs], Inputs]
# Whether operators are asked for the right result, and not for how long they take.
exactly: ContextVar[bool] = ContextVar("exactly", default=False)


class Record(ABC):
    """A kernel family, and as an instance a key of it: its fields are what operations ask."""

    family: ClassVar[str]  # the name of the kernel family
    sized: ClassVar[str] = ""  # the field that counts its rows, tokens or keys, if it is calibrated
    sizes_measured: ClassVar[tuple[int, ...]] = ()  # so many of them
    stock_waits: ClassVar[Any] = True  # whether MLX may compile stock first, for half a minute
    of_backend: ClassVar[bool] = False  # what ships for a backend's first device holds on others
    matrix: ClassVar[Any] = None  # N and K of a product with one matrix, which a model has often
    configs: ClassVar[tuple[type[Any], ...]]  # of its configurations, which differ in their fields
    # Those that fields of candidates may have; a field that is not here, or has another value, has
    # that of one of `starts`.
    values: ClassVar[dict[str, tuple[int, ...]]]
    dtype: mx.Dtype  # of the floating-point inputs

    # Where results are stored.

    @abstractmethod
    def bucket(self) -> tuple[tuple[int, ...], str]:
        """The shape and the rest of what matters; keys of which they agree share results."""

    @property
    def key(self) -> str:
        """Where results are stored, as ``"qmv 1x3584x3584 bfloat16 affine-64-4-t"``."""
        shape, rest = self.bucket()
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return " ".join(filter(None, (self.family, "x".join(map(str, shape)), dtype, rest)))

    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels whose text results depend on."""

    @property
    def source(self) -> str:
        """A digest of the kernel's text."""
        return _hash(self.kernels())

    # Configurations.

    @abstractmethod
    def heuristic(self, device: str) -> Any:
        """The configuration without tuning, on the device of a backend."""

    def starts(self, device: str) -> tuple[Any, ...]:
        """Configurations that a search starts from: the heuristic's, and those of other kernels."""
        return (self.heuristic(device),)

    def admits(self, name: str) -> Sequence[int]:
        """Values that a field of configurations may have, besides those of :meth:`starts`."""
        return self.values.get(name, ())

    def completed(self, config: Any) -> Any:
        """A configuration of which a field was changed, with what follows from that."""
        return config

    def why_not(self, config: Any) -> str | None:
        """Why a configuration that :meth:`admits` its values may not be launched, if it may not."""
        return None

    def variant(self, config: Any) -> Any:
        """The facts that tell a configuration's text and template from those of other sizes."""
        return config

    def fields(self, config: Any) -> set[str]:
        """The names of the fields that count in a configuration."""
        return {field.name for field in fields(config)}

    def near(self, config: Any) -> list[Any]:
        """The legal configurations that differ in one field."""
        unique = dict.fromkeys(map(self.completed, self._changed(config)))
        return [config for config in unique if self.why_not(config) is None]

    def _changed(self, config: Any) -> Iterator[Any]:
        there = self.fields(config)
        for name in (name for name in self.values if name in there):
            for value in self.values[name]:
                if value != getattr(config, name):
                    with suppress(ValueError):  # which its class does not take
                        yield replace(config, **{name: value})

    def check(self, config: Any) -> None:
        """Raise a ValueError for what no search tries, or no kernel takes."""
        starts = [start for device in KERNELS for start in self.starts(device)]
        if config in starts:
            return
        counting = self.fields(config)
        like = [asdict(start) for start in starts if self.fields(start) == counting]
        for name, value in asdict(config).items():
            known = [*self.admits(name), *(each[name] for each in like)]
            if not any(type(value) is type(each) and value == each for each in known):
                raise ValueError(f"{name} is {value!r}")
        if self.completed(config) != config:
            raise ValueError(f"is {config}, not {self.completed(config)}")
        if why := self.why_not(config):
            raise ValueError(why)

    # Sizes of which a device is calibrated.

    @property
    def size(self) -> int:
        """How many rows, tokens or keys it has."""
        return int(getattr(self, self.sized, 0))

    @property
    def stage(self) -> int:
        """The order of measuring: 0 for a token, 1 for several at once, 2 for a prompt."""
        several = {CALIBRATED_ROWS: int(self.size > 1), CALIBRATED_PROMPTS: 2}
        return several.get(self.sizes_measured, 0)

    def at(self, size: int) -> Record:
        """The same of another size."""
        changed: Any = {self.sized: size}
        return replace(self, **changed)  # type: ignore[type-var]

    def calibrated(self) -> Iterator[Record]:
        """Those of the sizes of which a device is calibrated."""
        return map(self.at, self.sizes_measured)

    def larger(self) -> Iterator[Record]:
        """The same of the next larger sizes of which a device is calibrated, or of the largest."""
        measured = self.sizes_measured
        return (self.at(n) for n in measured if n > self.size or self.size > n == measured[-1])

    def part(self) -> Record:
        """The smaller key that a CPU measures instead, for a time in proportion."""
        return self

    def bytes(self) -> float:
        """The bytes that it reads at least."""
        return 1.0

    def operations(self) -> float:
        """Multiplications and additions, of a prompt."""
        return 0.0

    # The measurement and its comparison.

    @abstractmethod
    def inputs(self) -> Inputs:
        """Fresh random inputs."""

    @abstractmethod
    def bind(self, inputs: Inputs, config: Any) -> Path:
        """The launch of the kernel for inputs like these."""

    @abstractmethod
    def stock(self, inputs: Inputs) -> Inputs:
        """The outputs by operators of MLX, as fast as those are."""

    def paths(self, inputs: Inputs) -> dict[str, Path]:
        """The other paths that ``auto`` could take; ``"stock"`` is the operator of MLX."""
        return {"stock": self.stock}

    def replaced(self, path: str) -> Sequence[int]:
        """The inputs that outputs replace in the next launch, so that MLX writes in place."""
        return ()

    def reference(self, inputs: Inputs) -> Inputs:
        """The right outputs, as :meth:`numbers` gives them: those of operators in float32."""
        with within(exactly, True):
            return self.stock(list(map(in_float32, inputs)))

    def numbers(self, outputs: Inputs) -> Inputs:
        """Of the outputs of a kernel what is compared."""
        return outputs

    def tolerances(self, outputs: int) -> list[float]:
        """The largest error of each output that passes, over its largest number."""
        return [4 * float(mx.finfo(self.dtype).eps) + 1e-4] * outputs


@dataclass(frozen=True)
class Fixed:
    """A configuration without a choice."""


@dataclass(frozen=True)
class CallRecord(Record):
    """A family whose launcher chooses by itself: a device is calibrated by it, nothing is tuned."""

    sizes: tuple[int, ...]  # of its arrays; the first is that of its rows or keys
    dtype: mx.Dtype  # of its input
    form: tuple[Any, ...]  # all else that matters
    configs, values = (Fixed,), {}
    sizes_measured: ClassVar[tuple[int, ...]] = CALIBRATED_ROWS

    @property
    def fmt(self) -> Format:
        """That of matrices, with which a form begins: mode, group size and bits."""
        mode, group_size, bits, *_ = self.form
        return Format(group_size, bits, mode)

    def heuristic(self, device: str) -> Fixed:
        return Fixed()

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return self.sizes, "-".join(map(str, self.form))

    @property
    def size(self) -> int:
        return self.sizes[0]

    def at(self, size: int) -> CallRecord:
        return replace(self, sizes=(size, *self.sizes[1:]))


@cache
def _hash(kernels: tuple[Kernel, ...]) -> str:
    text = "\0".join(k.program.header + k.program.source for k in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(size: int) -> int:
    """The next power of two: lengths up to there share a configuration."""
    return 1 << (size - 1).bit_length()


def form_of(fmt: Format, transpose: bool) -> str:
    """A quantized format as part of a key."""
    return f"{fmt.mode}-{fmt.group_size}-{fmt.bits}-{'t' if transpose else 'n'}"


def too_much(used: int) -> str | None:
    """Why no kernel takes so many bytes of threadgroup memory, if none does."""
    return f"{used} bytes of threadgroup memory" if used > MAX_THREADGROUP_MEMORY else None


def in_float32(x: Any) -> Any:
    """Numbers in float32, and all else as it is."""
    return x.astype(mx.float32) if getattr(x, "dtype", None) in (mx.float16, mx.bfloat16) else x


def in_parts(rows: int) -> list[slice]:
    """Rows that operators take at once: few where the right result is asked of TF32 units."""
    each = _FEW if exactly.get() and tensor_ops.stock_rounds() else max(rows, 1)
    return [slice(start, start + each) for start in range(0, max(rows, 1), each)]


def normal(dtype: mx.Dtype, *shapes: tuple[int, ...]) -> Inputs:
    """Random arrays."""
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]
