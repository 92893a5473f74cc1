"""Launches the product of many rows with a quantized matrix by Metal 4's tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...options import MatmulCall, PackedMatrix
from ...runtime.kernel import Kernel
from .qmv import GATES, Gate
from .qmv_config import packed_template

# Columns of the result that a SIMD group computes.
COLUMNS = 32
TENSOR_TILING = ("rows", "tile_k", "simds_m", "simds_n", "ragged")


@dataclass(frozen=True)
class TensorConfig:
    """How a product by tensor operations is cut.

    Attributes:
        rows: of the result that a SIMD group computes; a multiple of 16.
        tile_k: depth of a step; 16 or 32.
        simds_m: SIMD groups along the rows.
        simds_n: SIMD groups along the columns, 32 each.
        ragged: whether ``tile_k`` does not divide the depth.
    """

    rows: int
    tile_k: int
    simds_m: int
    simds_n: int
    ragged: bool

    @property
    def tile_m(self) -> int:
        """Rows of the result that a threadgroup computes."""
        return self.rows * self.simds_m

    @property
    def tile_n(self) -> int:
        """Columns of the result that it computes."""
        return COLUMNS * self.simds_n

    def threads(self, dtype: mx.Dtype) -> int:
        """The threads of a threadgroup."""
        return 32 * self.simds_m * self.simds_n


def tensor_config(
    m: int, k: int, dtype: mx.Dtype, fmt: Format, transpose: bool, gated: bool = False
) -> TensorConfig:
    """The configuration for so many rows, of a matrix or of all experts' share of them."""
    # A destination of 64 x 32, or a gate's two of half of that, leave room for inputs in 128 words.
    most = (32 if dtype == mx.float32 else 64) // (1 + gated)
    rows = next(size for size in (16, 32, 64) if size >= min(m, most))
    narrow = transpose and k % 32 and fmt.group_size == 16
    tile_k = 16 if narrow else 32
    return TensorConfig(rows, tile_k, *((2, 2) if m > rows else (1, 4)), bool(k % tile_k))


def _part(
    bits: int, group: int, transposed: bool, tile_k: int, simds_n: int
) -> tuple[int, int, int]:
    """Rows, words and groups of the packed part of a step."""
    width = COLUMNS * simds_n
    rows, columns = (width, tile_k) if transposed else (tile_k, width)
    return rows, columns * bits // 32, max(columns // group, 1)


def threadgroup_memory(
    mode: int, group: int, bits: int, transposed: bool, tile_k: int, simds_n: int, **_: object
) -> int:
    """The bytes of packed words, scales and biases of two steps."""
    rows, words, groups = _part(bits, group, transposed, tile_k, simds_n)
    affine = mode == 0
    return 8 * rows * (words + groups * (1 + affine)) + (0 if affine else 4)


def registers(T: mx.Dtype, rows: int, tile_k: int, ragged: bool, gate: int = 0, **_: object) -> int:
    """Words of the tensors of a thread: the sums and the inputs."""
    sums = rows * (1 + bool(gate))
    return sums + (COLUMNS + rows * ragged) * tile_k * T.size // 128


_INPUTS = (
    *("x", "w", "scales", "biases", "bias"),
    *("residual", "w1", "scales1", "biases1", "bias1"),
)


@cache
def _kernel(omitted: tuple[str, ...]) -> Kernel:
    """The kernel without some of its inputs."""
    letters = "".join("01"[name in omitted] for name in _INPUTS)
    return Kernel(
        f"qmm_tensor_{int(letters, 2):x}",
        "quantized_matmul/qmm_tensor.metal",
        function="qmm_tensor",
        inputs=(*(name for name in _INPUTS if name not in omitted), "shape"),
        outputs=("y",),
        omitted=omitted,
        template=("T", "S", "mode", "group", "bits", "transposed", *TENSOR_TILING, "gate"),
        threadgroup_memory=threadgroup_memory,
        registers=registers,
        large=True,
    )


def qmm_tensor(
    call: MatmulCall,
    config: TensorConfig,
    residual: Any = None,
    other: PackedMatrix | None = None,
    gate: Gate | None = None,
) -> Callable[..., mx.array]:
    """The launch of a product of many rows.

    Args:
        call: the product.
        config: how it is cut.
        residual: the spec of what is added to it, (..., N) in the dtype of ``x``, or None.
        other: with a gate, the specs of another matrix of the same shape.
        gate: give ``activation(product) * product with the other``.

    Returns:
        A function of x, w, scales, biases, bias, the residual, and the four arrays of the other
        matrix, that gives (..., N) in the dtype of ``x``; weights rounded to it, float32 sums
        rounded once. What has no spec may be None; further arguments are not looked at.
    """
    (x, matrix, transpose, fmt), (m, n, k) = call, call.shape
    sizes, threads = mx.array([m, n, k], mx.int32), config.threads(x.dtype)
    specs = [x, *matrix, residual, *(other or PackedMatrix(None, None))]
    omitted = (name for name, spec in zip(_INPUTS, specs, strict=True) if spec is None)
    launch = _kernel(tuple(omitted)).bind(
        [*(spec for spec in specs if spec is not None), sizes],
        template=packed_template(fmt, x.dtype, matrix.scales.dtype)
        | {"transposed": transpose, **asdict(config), "gate": GATES.index(gate)},
        grid=(-(-m // config.tile_m) * threads, -(-n // config.tile_n), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], n)],
    )
    given = itemgetter(*(i for i, spec in enumerate(specs) if spec is not None))
    return lambda *arrays: launch([*given(arrays), sizes])[0]
