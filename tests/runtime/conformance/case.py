"""A conformance case: how it runs on a backend, and how its outputs are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_qlayers.runtime import Kernel, use_backend

HERE = Path(__file__).parent
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One launch and what it must write."""

    name: str  # the kernel, and what it is launched with
    kernel: Kernel
    inputs: Sequence[mx.array]
    expected: Sequence[Rows]  # of each flattened output its parts in order, by name
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: dict[str, bool | int | mx.Dtype] = field(default_factory=dict)
    # Units in the last place that a part may be off, or 0; less than 1 of 16 bits is no error.
    ulp: dict[str, float] = field(default_factory=dict)
    init_value: float | None = None

    def run(self, backend: str) -> list[np.ndarray]:
        """Launch it on a backend and return its flattened outputs; bfloat16 comes as float32."""
        shapes = [(sum(part.size for part in rows.values()),) for rows in self.expected]
        with use_backend(backend):
            outputs = self.kernel(
                self.inputs,
                template=self.template,
                grid=self.grid,
                threadgroup=self.threadgroup,
                output_shapes=shapes,
                init_value=self.init_value,
            )
            mx.eval(outputs)
        return [to_numpy(out) for out in outputs]

    def compare(self, outputs: list[np.ndarray]) -> list[Part]:
        """Hold the outputs against what was expected, part by part."""
        parts = []
        for rows, dtype, out in zip(self.expected, self._dtypes(), outputs, strict=True):
            start = 0
            for name, want in rows.items():
                got = out[start : start + want.size]
                start += want.size
                parts.append(
                    Part(
                        self.name, name, _distance(got, want.ravel(), dtype), self.ulp.get(name, 0)
                    )
                )
        return parts

    def _dtypes(self) -> list[mx.Dtype]:
        kinds = {"float": mx.float32, "int32_t": mx.int32, "uint32_t": mx.uint32}
        declared = [p.type for p in self.kernel.program.outputs]
        return [
            self.template.get(t) or kinds.get(t) or getattr(mx, _NAMES.get(t, t)) for t in declared
        ]


_NAMES = {"float16_t": "float16", "bfloat16_t": "bfloat16"}


@dataclass(frozen=True)
class Part:
    """One function's result: the largest distance from the truth in units in the last place."""

    case: str
    name: str
    distance: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.distance <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "WRONG"
        return f"{self.case} {self.name}: {self.distance:g} of {self.allowed:g} ulp, {verdict}"


_BITS = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}
_TINY = {mx.float32: -149, mx.float16: -24, mx.bfloat16: -133}


def _distance(got: np.ndarray, want: np.ndarray, dtype: mx.Dtype) -> float:
    """The largest difference in units in the last place; infinite where kinds differ."""
    if got.shape != want.shape:
        return np.inf
    if dtype not in _BITS:
        return 0.0 if np.array_equal(got.astype(object), want.astype(object)) else np.inf
    a, b = got.astype(np.float64), want.astype(np.float64)
    special = ~(np.isfinite(a) & np.isfinite(b))
    if not np.array_equal(a[special], b[special], equal_nan=True):
        return np.inf
    a, b = a[~special], b[~special]
    exponent = np.maximum(np.frexp(b)[1] - 1 - _BITS[dtype], _TINY[dtype])
    return float(np.max(np.abs(a - b) / np.ldexp(1.0, exponent), initial=0.0))


@cache
def kernel(
    file: str,
    name: str,
    inputs: str,
    outputs: str = "out",
    template: str = "",
    atomic: bool = False,
    contiguous: bool = True,
) -> Kernel:
    """A kernel of this folder; names are given in one string, separated by blanks."""
    return Kernel(
        name,
        HERE / file,
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        template=tuple(template.split()),
        atomic_outputs=atomic,
        ensure_row_contiguous=contiguous,
    )


def case(
    file: str,
    name: str,
    inputs: str,
    arrays: Sequence[mx.array],
    parts: Rows,
    size: int | tuple[int, int, int],
    group: int | tuple[int, int, int] = 32,
    *,
    atomic: bool = False,
    what: str = "",
    ulp: dict[str, float] | None = None,
    init_value: float | None = None,
    output: str = "out",
    contiguous: bool = True,
    **template: bool | int | mx.Dtype,
) -> Case:
    """A launch with one output."""
    dtypes = [dtype_name(d) for d in template.values() if isinstance(d, mx.Dtype)]
    what = what or "".join(f"[{dtype}]" for dtype in dtypes)
    made = kernel(file, name, inputs, output, " ".join(template), atomic, contiguous)
    grid, threadgroup = ((n, 1, 1) if isinstance(n, int) else n for n in (size, group))
    arrays = [*map(mx.array, arrays)]
    return Case(
        name + what, made, arrays, [parts], grid, threadgroup, template, ulp or {}, init_value
    )


def to_numpy(x: mx.array) -> np.ndarray:
    """The values of an array, flattened; NumPy has no bfloat16."""
    flat = x.reshape(-1)
    return np.array(flat.astype(mx.float32) if x.dtype == mx.bfloat16 else flat)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def to_float16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest float16, as float32; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


# How to round to each dtype: once, from float64 where the value is exact there.
ROUND: dict[mx.Dtype, Callable[[np.ndarray], np.ndarray]] = {
    mx.float32: lambda x: np.asarray(x, np.float32),
    mx.float16: to_float16,
    mx.bfloat16: lambda x: to_bfloat16(np.asarray(x).astype(np.float32)),
    mx.int32: lambda x: np.asarray(x).astype(np.int64).astype(np.int32),
    mx.uint32: lambda x: np.asarray(x).astype(np.int64).astype(np.uint32),
    mx.int16: lambda x: np.asarray(x).astype(np.int64).astype(np.int16),
    mx.uint16: lambda x: np.asarray(x).astype(np.int64).astype(np.uint16),
    mx.int8: lambda x: np.asarray(x).astype(np.int64).astype(np.int8),
    mx.uint8: lambda x: np.asarray(x).astype(np.int64).astype(np.uint8),
    mx.int64: lambda x: np.asarray(x).astype(np.int64),
    mx.uint64: lambda x: np.asarray(x).astype(np.uint64),
}


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
