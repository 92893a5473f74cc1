"""A question that operations ask and the tuner answers, and which answers can be right."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

from ..formats import Format
from ..runtime.devices.record import MAX_THREADGROUP_MEMORY
from ..runtime.kernel import Kernel

# Rows of decoding and of prompts, and keys of a cache, of which a device is calibrated. What lies
# between two of them goes by the larger.
CALIBRATED_ROWS = (1, 2, 4, 8, 16)
CALIBRATED_PROMPTS = (64, 512, 2048)
CALIBRATED_KEYS = (512, 4096, 65536)
_DEVICES = ("metal", "cuda", "host")


class Problem(ABC):
    """What a kernel is configured for; its fields are the arguments of the question.

    Attributes:
        family: the name of the kernel family.
        configs: the classes of its configurations, which differ in their fields.
        values: those that fields of configurations may have; a field that is not here, or has
            another value, has that of one of :meth:`starts`.
        dtype: of the floating-point inputs.
        sized: the field that counts its rows, tokens or keys, if a device is calibrated of it.
        sizes_measured: so many of them.
    """

    family: ClassVar[str]
    sized: ClassVar[str] = ""
    sizes_measured: ClassVar[tuple[int, ...]] = ()
    configs: ClassVar[tuple[type[Any], ...]]
    values: ClassVar[dict[str, tuple[int, ...]]]
    dtype: mx.Dtype

    @abstractmethod
    def heuristic(self, device: str) -> Any:
        """The configuration without tuning, for ``"metal"``, ``"cuda"`` or ``"host"``."""

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

    def check(self, config: Any) -> None:
        """Raise unless a configuration is one that a search could have tried.

        Raises:
            ValueError: a value that no search tries, or a combination that no kernel takes.
        """
        starts = [start for device in _DEVICES for start in self.starts(device)]
        if config in starts:
            return
        like = [asdict(start) for start in starts if type(start) is type(config)]
        for name, value in asdict(config).items():
            known = [*self.admits(name), *(each[name] for each in like)]
            if not any(type(value) is type(each) and value == each for each in known):
                raise ValueError(f"{name} is {value!r}")
        if self.completed(config) != config:
            raise ValueError(f"is {config}, not {self.completed(config)}")
        if why := self.why_not(config):
            raise ValueError(why)

    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels whose text results depend on."""

    @abstractmethod
    def bucket(self) -> tuple[tuple[int, ...], str]:
        """The shape and the rest of what matters; problems of which they agree share results."""

    def variant(self, config: Any) -> Any:
        """What tells the text and template of a configuration from those of other sizes."""
        return config

    @property
    def size(self) -> int:
        """How many rows, tokens or keys it has."""
        return int(getattr(self, self.sized, 0))

    @property
    def stage(self) -> int:
        """What is measured first: 0 is part of a token, 1 of several at once, 2 of a prompt."""
        several = {CALIBRATED_ROWS: int(self.size > 1), CALIBRATED_PROMPTS: 2}
        return several.get(self.sizes_measured, 0)

    def at(self, size: int) -> Problem:
        """The same of another size."""
        changed: Any = {self.sized: size}
        return replace(self, **changed)  # type: ignore[type-var]

    def calibrated(self) -> Iterator[Problem]:
        """Those of the sizes of which a device is calibrated."""
        return map(self.at, self.sizes_measured)

    def larger(self) -> Iterator[Problem]:
        """The same of the next larger sizes of which a device is calibrated."""
        return (self.at(size) for size in self.sizes_measured if size > self.size)

    def bytes(self) -> float:
        """What it reads at least."""
        return 0.0

    def operations(self) -> float:
        """Multiplications and additions, of a prompt."""
        return 0.0

    @property
    def key(self) -> str:
        """Where results for it are stored.

        Example:
            >>> from mlx_qlayers.dispatch.tunable import RowSumProblem
            >>> RowSumProblem(64, 1024, mx.float16).key
            'row_sum 64x1024 float16'
        """
        shape, rest = self.bucket()
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return " ".join(filter(None, (self.family, "x".join(map(str, shape)), dtype, rest)))


@cache
def source_hash(*kernels: Kernel) -> str:
    """What changes when the text of a kernel does."""
    text = "\0".join(k.program.header + k.program.source for k in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def form_of(fmt: Format, transpose: bool) -> str:
    """A quantized format as part of a key."""
    return f"{fmt.mode}-{fmt.group_size}-{fmt.bits}-{'t' if transpose else 'n'}"


def too_much(used: int) -> str | None:
    """Why no kernel takes so many bytes of threadgroup memory, if none does."""
    return f"{used} bytes of threadgroup memory" if used > MAX_THREADGROUP_MEMORY else None
