"""The records of the products with packed matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import threshold
from ...options import MatmulCall, PackedMatrix
from ...reference import quantized_matmul as reference
from ...runtime import tensor_ops
from ...runtime.backend import backend
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..record import (
    CALIBRATED_PROMPTS,
    CALIBRATED_ROWS,
    Inputs,
    Path,
    Record,
    form_of,
    in_parts,
    normal,
    rounded,
    too_much,
)
from . import qmm, qmv
from .dequantize import dense_product
from .qmm_tensor import codes_config, tensor_config, tensor_product, why_no_codes
from .qmv_config import matrix_config, qmv_config
from .tile import PARAMETERS, Tile

_EPSILON = 1e-6
# Rows up to which MLX has a kernel of its own on NVIDIA GPUs, which it compiles at once.
_STOCK_ROWS = 4
# Elements of the part of a matrix that is measured on a CPU.
_PART = 1 << 20

# Beyond these a thread's sums and weights cannot stay in registers.
_MOST_SUMS, _MOST_PRODUCTS = 32, 128


def matrix_bytes(n: int, k: int, fmt: Format) -> float:
    """The bytes of a packed matrix of so many rows and columns."""
    return n * k * (fmt.bits + 32 / fmt.group_size) / 8


class QmvKind(NamedTuple):
    """The work of a launch: so many matrices, an RMS norm first, silu(first) * second, a sum."""

    matrices: int
    norm: bool
    gate: bool
    residual: bool

    @classmethod
    def of(cls, kind: str) -> QmvKind:
        """Parse a key's kind, such as ``"norm-3"``."""
        words = kind.split("-")
        count = next((int(word) for word in words if word.isdecimal()), 1)
        return cls(2 if "gate" in words else count, *(w in words for w in cls._fields[1:]))


@dataclass(frozen=True)
class QmvRecord(Record):
    """1 to 16 rows times packed matrices, transposed."""

    # The shape; n counts the columns of all matrices.
    rows: int
    n: int
    k: int
    dtype: mx.Dtype  # of the rows
    fmt: Format  # of the matrices
    # Its other parts: `norm`, `gate`, `residual`, the number of matrices, joined by `-`.
    kind: str = ""
    family, sized = "qmv", "rows"
    sizes_measured: ClassVar[tuple[int, ...]] = CALIBRATED_ROWS
    configs = (Tile,)
    values: ClassVar = {
        "simds_k": (1, 2, 4, 8, 16),
        "tiles": (1, 2, 4),
        "outputs": (1, 2, 4, 8),
        "run": (8, 16, 32, 64),
        "ahead": (1, 2, 4),
        "simds_n": (1, 2),
        "local": (32, 64, 128, 256),
    }

    def fields(self, config: Tile) -> set[str]:
        """Those of its kernel."""
        own = "occupancy" if config.units else "local"
        return {"kernel", own, *PARAMETERS[config.kernel].values()}

    def heuristic(self, device: str) -> Any:
        shape = self.rows, self.n, self.k
        return qmv_config(device, *shape, self.dtype, self.fmt, self.kind)

    def starts(self, device: str) -> tuple[Any, ...]:
        # Which kernel is faster depends on what the matrix units of a GPU are worth: ten times the
        # other ones with tensor cores.
        first = self.heuristic(device)
        if first.kernel == "qmv_persistent":
            shape = self.rows, self.n, self.k
            return first, matrix_config(device, *shape, self.fmt, QmvKind.of(self.kind).norm)
        if device_of(device).tensor_cores or not device_of(device).gpu:
            return (first,)
        threads = replace(self, dtype=mx.float32, kind="").heuristic("metal")
        if self.dtype == mx.float32:
            return first, threads
        return first, replace(self, dtype=mx.bfloat16, kind="").heuristic("cuda"), threads

    def completed(self, config: Any) -> Any:
        if not config.units:
            return config
        fragments = -(-self.rows * self._slots(config) // 8)
        # A gate joins tiles in pairs.
        tiles = config.tiles + config.tiles % 2 * QmvKind.of(self.kind).gate
        return replace(config, fragments=fragments, tiles=tiles)

    def why_not(self, config: Any) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        if config.units:
            return self._why_not_units(config)
        if QmvKind.of(self.kind).gate and config.outputs % 2:
            return "a gate joins outputs in pairs"
        group, bits, _ = self.fmt
        if config.run % (32 if bits % 2 else 16) or group % config.run or config.run % config.ways:
            return f"runs of {config.run} in groups of {group}"
        products = config.run * max(config.rows, config.outputs)
        sums = config.rows * config.outputs
        if config.lanes > 1 and max(products / 2, sums) > _MOST_PRODUCTS:
            return f"{sums} sums, {products} products"
        return None

    def calibrated(self) -> Iterator[Record]:
        """Three rows too, where they have a kernel that four have not: on Apple GPUs."""
        every, both = self.sizes_measured, (self.at(3), self.at(4))
        three, four = (each.variant(each.heuristic(backend())) for each in both)
        yield from (self.at(n) for n in (*every, *[3] * (three != four and 4 in every)))

    def _slots(self, config: Tile) -> int:
        return 1 if self.fmt.mode == "nvfp4" else 4 * config.run // self.fmt.group_size

    def _why_not_units(self, config: Tile) -> str | None:
        group, bits, mode = self.fmt
        if mode == "nvfp4":
            if config.run != (16 if self.k % 32 else 32) or config.ahead > 1:
                return f"{config} in nvfp4"
        else:
            if not max(group // 4, 8) <= config.run <= group or self._slots(config) > 8:
                return f"runs of {config.run} in groups of {group}"
        if not config.takes(self.k):
            return f"rows of {self.k}"
        if why := too_much(config.memory(self.fmt)):
            return why
        # Of tiles whose threadgroup stays one at a time has sums in registers.
        tiles = config.tiles if config.kernel == "qmv_matrix" else 1
        sums = tiles * config.fragments
        words = tiles * config.ahead * config.run * bits // 16
        if sums > _MOST_SUMS or words > _MOST_PRODUCTS:
            return f"{sums} fragments and {words} words under way"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(map(qmv.kernel_of, ("qmv_matrix", "qmv_persistent", "qmv")))

    def bucket(self) -> tuple[tuple[int, ...], str]:
        form = form_of(self.fmt, True) + ("-" + self.kind if self.kind else "")
        return (self.rows, self.n, self.k), form

    @property
    def matrix(self) -> tuple[int, int] | None:
        return None if self.kind else (self.n, self.k)

    @property
    def stock_waits(self) -> bool:
        return self.rows > _STOCK_ROWS or self.dtype == mx.float32

    def part(self) -> QmvRecord:
        """So few columns: all take the same."""
        n = max(1, _PART // self.k // 48) * 48
        return self if self.n * self.k <= _PART else replace(self, n=n)

    def bytes(self) -> float:
        return matrix_bytes(self.n, self.k, self.fmt)

    def inputs(self) -> Inputs:
        """The rows, the norm's weight and the residual if there are any, and each matrix."""
        kind, k = QmvKind.of(self.kind), self.k
        n = self.n // kind.matrices
        residual, weight = [(self.rows, n)] * kind.residual, [(k,)] * kind.norm
        found = normal(self.dtype, (self.rows, k), *weight, *residual)
        for _ in range(kind.matrices):
            found += packed((n, k), self.dtype, self.fmt)
        return found

    def bind(self, inputs: Inputs, config: Any) -> Path:
        """One launch."""
        kind = QmvKind.of(self.kind)
        launch = qmv.qmv(
            _arrays([*map(Spec.of, inputs)], kind),
            self.fmt,
            config,
            epsilon=_EPSILON if kind.norm else None,
            gate="silu" if kind.gate else None,
        )
        return lambda inputs: list(launch(*_arrays(inputs, kind).flat))

    def stock(self, inputs: Inputs) -> Inputs:
        kind = QmvKind.of(self.kind)
        given = _arrays(inputs, kind)
        x: mx.array = given.x
        if kind.norm:
            x = mx.fast.rms_norm(x, given.norm_weight, _EPSILON)
        found = [_product(x, matrix, True, self.fmt) for matrix in given.matrices]
        if kind.gate:
            return [found[0] * mx.sigmoid(found[0]) * found[1]]
        return [found[0] + given.residual] if kind.residual else found

    def paths(self, inputs: Inputs) -> dict[str, Path]:
        found = super().paths(inputs)
        if not self.kind:
            x, *matrix = map(Spec.of, inputs)
            call = MatmulCall(x, PackedMatrix(*matrix), True, self.fmt)
            found["dequantized"] = partial(_launched, dense_product(call))
        return found

    def tolerances(self, outputs: int) -> list[float]:
        # Rounded rows make an error of each product, and a gate multiplies two of those.
        factor = 2 if QmvKind.of(self.kind).norm else 1
        return [factor * each for each in super().tolerances(outputs)]


@dataclass(frozen=True)
class QmmRecord(Record):
    """17 rows and more times a packed matrix."""

    m: int
    n: int
    k: int
    dtype: mx.Dtype
    fmt: Format
    transpose: bool
    family, sized, sizes_measured = "qmm", "m", CALIBRATED_PROMPTS
    configs = (qmm.QmmConfig,)
    values: ClassVar = {
        "tile_m": (16, 32, 48, 64, 96, 128),
        "tile_n": (32, 64, 96, 128, 256),
        "tile_k": (32, 64, 128),
        "simds_m": (1, 2, 4),
        "simds_n": (1, 2, 4),
        "stages": (1, 2),
        "ahead": (False, True),
        "parts": (1, 2, 4, 8),
    }

    def heuristic(self, device: str) -> qmm.QmmConfig:
        shape = self.m, self.n, self.k
        return qmm.qmm_config(device, *shape, self.dtype, self.fmt, self.transpose)

    def admits(self, name: str) -> Sequence[int]:
        # The heuristic's depends on the number of rows, of which a bucket has several.
        return range(1, max(8, self.k // 512) + 1) if name == "parts" else super().admits(name)

    def why_not(self, config: qmm.QmmConfig) -> str | None:
        try:
            threads = config.threads(self.dtype)
        except ValueError as error:
            return str(error)
        if threads > 256:
            return f"{threads} threads"
        tile = config.tile_m, config.tile_n, config.tile_k, config.stages
        if why := too_much(qmm.threadgroup_memory(self.dtype, self.transpose, *tile)):
            return why
        # A SIMD group keeps its part of the tile in registers, 32 floats to a row of 8 fragments.
        sums = config.tile_m * config.tile_n // threads
        return f"{sums} sums a thread" if sums > 128 else None

    def kernels(self) -> tuple[Kernel, ...]:
        return qmm.QMM, qmm.QMM_SUM

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (rounded(self.m), self.n, self.k), form_of(self.fmt, self.transpose)

    def variant(self, config: qmm.QmmConfig) -> Any:
        """With those of the kernels that run on tensor operations."""
        rest = self.k, self.dtype, self.fmt, self.transpose
        return config, tensor_config(self.m, *rest), codes_config(self.m)

    def bytes(self) -> float:
        return matrix_bytes(self.n, self.k, self.fmt)

    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def inputs(self) -> Inputs:
        shape = (self.n, self.k) if self.transpose else (self.k, self.n)
        return [*normal(self.dtype, (self.m, self.k)), *packed(shape, self.dtype, self.fmt)]

    @property
    def matrix(self) -> tuple[int, int]:
        return self.n, self.k

    def _call(self, inputs: Inputs) -> MatmulCall:
        x, *matrix = map(Spec.of, inputs)
        return MatmulCall(x, PackedMatrix(*matrix), self.transpose, self.fmt)

    def bind(self, inputs: Inputs, config: qmm.QmmConfig) -> Path:
        return partial(_launched, qmm.qmm(self._call(inputs), config))

    def stock(self, inputs: Inputs) -> Inputs:
        return [_product(inputs[0], PackedMatrix(*inputs[1:]), self.transpose, self.fmt)]

    def paths(self, inputs: Inputs) -> dict[str, Path]:
        found = super().paths(inputs)
        call = self._call(inputs)
        found["dequantized"] = partial(_launched, dense_product(call))
        if tensor_ops.missing() is None:
            codes = tensor_ops.missing_codes() is None and why_no_codes(call) is None
            for path in ("tensor", "codes") if codes else ("tensor",):
                found[path] = partial(_launched, tensor_product(path == "codes", call))
        return found


def _arrays(inputs: Sequence[Any], kind: QmvKind) -> qmv.QmvArrays:
    x, *rest = inputs
    weight = rest.pop(0) if kind.norm else None
    residual = rest.pop(0) if kind.residual else None
    each = len(rest) // kind.matrices
    packed = [PackedMatrix(*rest[i : i + each]) for i in range(0, len(rest), each)]
    return qmv.QmvArrays(x, weight, None, residual, None, packed)


def packed(shape: tuple[int, int], dtype: mx.Dtype, fmt: Format) -> Inputs:
    """A random matrix: w, scales and, in mode affine, biases."""
    (n, k), (group, bits, mode) = shape, fmt
    w = mx.random.randint(0, 2**32 - 1, (n, k * bits // 32), mx.uint32)
    groups = n, k // group
    if mode == "affine":
        scales = (mx.random.uniform(0.5, 1, groups) * 2**-bits * k**-0.5).astype(dtype)
        return [w, scales, -(2 ** (bits - 1)) * scales]
    # Exponents around 2^-6, in NVFP4 numbers around 2^-4; no codes that are not numbers.
    low, high = (16, 32) if mode == "nvfp4" else (119, 123)
    return [w & 0xBFBFBFBF if bits == 8 else w, mx.random.randint(low, high, groups, mx.uint8)]


def _product(x: mx.array, matrix: PackedMatrix, transpose: bool, fmt: Format) -> mx.array:
    order = "transposed" if transpose else "plain"
    dense_rows = threshold("reference_dense_rows", fmt.mode, fmt.bits, order, device="host")
    product: Any = partial(reference.quantized_matmul, transpose=transpose, fmt=fmt)
    parts = (product(x[at], *matrix[:3], dense_rows=dense_rows) for at in in_parts(len(x)))
    return mx.concatenate(list(parts))


def _launched(launch: Any, inputs: Inputs) -> Inputs:
    """The product of x with one matrix."""
    return [launch(inputs[0], *PackedMatrix(*inputs[1:]))]
