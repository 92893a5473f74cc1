"""Launches the kernels that multiply few rows with quantized matrices.

There are two. One takes any dtype and any processor: the threads of a SIMD group, or one thread,
share some columns of the result. The other takes rows in half precision to the matrix units, and
several matrices, a norm, a gate or a residual into the same launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import MODES, Format
from ..runtime.kernel import MAX_THREADGROUP_MEMORY, Kernel

MAX_FEW_ROWS = 16
MAX_MATRICES = 3

Gate = Literal["silu", "gelu", "gelu_approx"]


class PackedMatrix(NamedTuple):
    """A quantized matrix that rows are multiplied with, and what is added to the product.

    Attributes:
        w: (N, K * bits / 32) uint32.
        scales: (N, K / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        bias: (N,) in the dtype of the rows, or None.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array | None = None
    bias: mx.array | None = None


@dataclass(frozen=True)
class FewRows:
    """How a product of few rows is spread over threads.

    Attributes:
        rows: rows that the kernel is compiled for; a product may have fewer.
        outputs: columns of the result that one SIMD group, or one thread, computes.
        run: neighbouring elements of a row of the matrix that a thread takes at once; a multiple
            of 16, or of 32 where ``bits`` is odd, that divides the group size.
        lanes: threads that share the columns: 32, or 1 where threads do not run side by side.
        ways: float32 sums that a thread keeps for each output; divides ``run``.
        threads: threads of a threadgroup; a multiple of ``lanes``.
    """

    rows: int
    outputs: int
    run: int
    lanes: int
    ways: int
    threads: int


@dataclass(frozen=True)
class MatrixUnits:
    """How a product of few rows is spread over SIMD groups that use the matrix units.

    Attributes:
        fragments: operands of 8 columns, which hold the rows times the groups that the four lanes
            of a row of the matrix take side by side (4 * run / group_size, in NVFP4 one).
        run: neighbouring elements of a row of the matrix that a lane takes at once; it divides K.
        tiles: tiles of 16 rows of the matrix that a threadgroup computes.
        simds: SIMD groups of a threadgroup, which share K.
        ahead: runs that a lane has under way for each row.
    """

    fragments: int
    run: int
    tiles: int
    simds: int
    ahead: int = 1


@cache
def few_rows(
    device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format
) -> FewRows | MatrixUnits:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        rows: rows of the product, 1 to 16.
        n: outputs of a row, those of all matrices.
        k: elements of a row.
        dtype: of the rows.
        fmt: the format of the matrix.
    """
    if device == "host":
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        # Its loops over rows are not unrolled, so that one kernel does for all but the single row.
        rows = 1 if rows == 1 else MAX_FEW_ROWS
        return FewRows(rows, outputs=4, run=fmt.group_size, lanes=1, ways=16, threads=8)
    # Apple's matrix units multiply no faster than its other units: an estimate.
    if dtype != mx.float32 and (device == "cuda" or rows > 3):
        return _matrix_units(rows, n, k, fmt)
    # The sums and unpacked weights must stay within some 100 registers.
    run = 32 if fmt.bits % 2 else 16
    rows = next(n for n in (1, 2, 4, 8, MAX_FEW_ROWS) if n >= rows)
    outputs = 4 if rows * run <= 64 else 2
    return FewRows(rows, outputs, run, lanes=32, ways=1, threads=64)


def _matrix_units(rows: int, n: int, k: int, fmt: Format) -> MatrixUnits:
    group, bits, mode = fmt
    if mode == "nvfp4":
        run, slots = 16 if k % 32 else 32, 1
    else:
        # Loads of 16 bytes, but no more columns than rows of x fill, down to one group at a time
        # and to the words that begin and end with a code.
        run = max(group // 4, 16 if bits == 8 else 32)
        least = max(group // 4, {2: 16, 4: 8, 6: 16, 8: 4}.get(bits, 32))
        while run > least and 4 * run // group * rows > 8:
            run //= 2
        slots = 4 * run // group
    fragments = -(-rows * slots // 8)
    config = MatrixUnits(fragments, run, tiles=1 if n <= 4096 else 2, simds=8)
    while _threadgroup_memory(**asdict(config)) > MAX_THREADGROUP_MEMORY:
        config = replace(config, simds=config.simds // 2)
    return config


def products_of_few_rows(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    config: FewRows | MatrixUnits,
    *,
    norm: tuple[mx.array | None, float] | None = None,
    gate: Gate | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """``x @ w.T + bias`` for up to three matrices of one format, each read once for all rows.

    Args:
        x: (..., K) in float32, float16 or bfloat16; M rows, 1 to 16.
        matrices: of K columns each, biases all or none, bias each as it likes.
        fmt: group_size, bits and mode of the matrices.
        config: how to spread the work.
        norm: weight (K,) in the dtype of ``x`` or None, and epsilon, of the RMS norm that ``x``
            goes through first; None for no norm.
        gate: with two matrices of one shape, give ``activation(first) * second`` alone.
        residual: added to the product of a single matrix; in its shape and dtype.

    Returns:
        A (..., N) in the dtype of ``x`` for each matrix, or the gated one; float32 inside, rounded
        once.
    """
    if isinstance(config, MatrixUnits):
        if norm is not None and x.dtype == mx.float16:
            # Before it is divided by its norm, x times the weight may exceed float16.
            x, norm = mx.fast.rms_norm(x, *norm), None
        return _on_matrix_units(x, matrices, fmt, config, norm, gate, residual)
    if norm is None and gate is None and residual is None:
        return [_product(x, matrix, fmt, config) for matrix in matrices]
    return _in_float32(x, matrices, fmt, config, norm, gate, residual)


_INPUTS = (
    "x",
    "norm_weight",
    "epsilon",
    "residual",
    *(name + number for number in ("", "1", "2") for name in PackedMatrix._fields),
    "shape",
)
_OUTPUTS = ("y", "y1", "y2")
_GATES = (None, "silu", "gelu", "gelu_approx")


@cache
def _matrix_kernel(omitted: tuple[str, ...]) -> Kernel:
    """The kernel without some of its inputs and outputs."""
    letters = "".join("01"[name in omitted] for name in _INPUTS + _OUTPUTS)
    return Kernel(
        f"quantized_matmul_matrix_{int(letters, 2):x}",
        "quantized_matmul_matrix.metal",
        function="quantized_matmul_matrix",
        inputs=tuple(name for name in _INPUTS if name not in omitted),
        outputs=tuple(name for name in _OUTPUTS if name not in omitted),
        omitted=omitted,
        template=(
            "T",
            "S",
            "mode",
            "group",
            "bits",
            "gate",
            "fragments",
            "run",
            "tiles",
            "simds",
            "ahead",
        ),
        threadgroup_memory=_threadgroup_memory,
        large=True,
    )


def _threadgroup_memory(*, simds: int, tiles: int, fragments: int, **_: object) -> int:
    return 4 * simds * (tiles * 16 * 8 * fragments + 16)


@cache
def _omitted(
    count: int, outputs: int, normed: int, added: bool, affine: bool, biased: tuple[bool, ...]
) -> tuple[str, ...]:
    """What of the kernel's inputs and outputs a launch does without."""
    without = [*_OUTPUTS[outputs:]]
    without += ["norm_weight"] * (normed < 2) + ["epsilon"] * (normed < 1)
    without += ["residual"] * (not added)
    for i, number in enumerate(("", "1", "2")):
        if i >= count:
            without += [name + number for name in PackedMatrix._fields]
        else:
            without += ["biases" + number] * (not affine) + ["bias" + number] * (not biased[i])
    return tuple(without)


def _on_matrix_units(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    config: MatrixUnits,
    norm: tuple[mx.array | None, float] | None,
    gate: Gate | None,
    residual: mx.array | None,
) -> list[mx.array]:
    if gate is not None and config.tiles % 2:
        config = replace(config, tiles=config.tiles + 1)
    (*leading, k) = x.shape
    sizes = [matrix.w.shape[0] for matrix in matrices]
    normed = 0 if norm is None else 1 if norm[0] is None else 2
    extra = [x]
    if norm is not None:
        extra += [_epsilon(norm[1])] if norm[0] is None else [norm[0], _epsilon(norm[1])]
    if residual is not None:
        extra.append(residual)
    given = [array for matrix in matrices for array in matrix if array is not None]
    kernel = _matrix_kernel(
        _omitted(
            len(matrices),
            1 if gate else len(matrices),
            normed,
            residual is not None,
            matrices[0].biases is not None,
            tuple(matrix.bias is not None for matrix in matrices),
        )
    )
    tiles = sum(-(-n // 16) for n in sizes)
    threads = 32 * config.simds
    return kernel(
        [*extra, *given, _shape(x.size // k, k, *sizes)],
        template=_matrix_template(x.dtype, matrices[0].scales.dtype, fmt, gate, config),
        grid=(-(-tiles // config.tiles) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*leading, n) for n in (sizes[:1] if gate else sizes)],
    )


@cache
def _matrix_template(
    dtype: mx.Dtype, scale: mx.Dtype, fmt: Format, gate: Gate | None, config: MatrixUnits
) -> dict[str, mx.Dtype | int | bool]:
    return {
        "T": dtype,
        "S": scale,
        "mode": list(MODES).index(fmt.mode),
        "group": fmt.group_size,
        "bits": fmt.bits,
        "gate": _GATES.index(gate),
        **asdict(config),
    }


@cache
def _epsilon(value: float) -> mx.array:
    return mx.array([value], mx.float32)


_ACTIVATIONS = {"silu": nn.silu, "gelu": nn.gelu, "gelu_approx": nn.gelu_approx}


def _in_float32(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    config: FewRows,
    norm: tuple[mx.array | None, float] | None,
    gate: Gate | None,
    residual: mx.array | None,
) -> list[mx.array]:
    """The same with a launch for each step."""
    wide = x.astype(mx.float32)
    if norm is not None:
        weight, epsilon = norm
        weight = None if weight is None else weight.astype(mx.float32)
        wide = mx.fast.rms_norm(wide, weight, epsilon)
    products = []
    for matrix in matrices:
        y = _product(wide, matrix._replace(bias=None), fmt, config)
        products.append(y if matrix.bias is None else y + matrix.bias)
    if gate is not None:
        first, second = products
        products = [_ACTIVATIONS[gate](first) * second]
    if residual is not None:
        products = [products[0] + residual]
    return [y.astype(x.dtype) for y in products]


_FEW_ROWS = Kernel(
    "quantized_matmul_few_rows",
    "quantized_matmul.metal",
    inputs=("x", "w", "scales", "biases", "bias", "shape"),
    outputs=("y",),
    template=(
        "T",
        "S",
        "mode",
        "group",
        "bits",
        "rows",
        "outputs",
        "run",
        "lanes",
        "ways",
        "biased",
    ),
    large=True,
)


def _product(x: mx.array, matrix: PackedMatrix, fmt: Format, config: FewRows) -> mx.array:
    w, scales, biases, bias = matrix
    (*leading, k), n = x.shape, w.shape[0]
    m = prod(leading)
    tiles = -(-n // config.outputs)
    groups = -(-tiles * config.lanes // config.threads)
    (y,) = _FEW_ROWS(
        [
            x,
            w,
            scales,
            scales if biases is None else biases,
            x if bias is None else bias,
            _shape(m, n, k),
        ],
        template=_template(x.dtype, scales.dtype, fmt, config, bias is not None),
        grid=(groups * config.threads, 1, 1),
        threadgroup=(config.threads, 1, 1),
        output_shapes=[(*leading, n)],
    )
    return y


@cache
def _template(
    dtype: mx.Dtype, scale: mx.Dtype, fmt: Format, config: FewRows, biased: bool
) -> dict[str, mx.Dtype | int | bool]:
    return {
        "T": dtype,
        "S": scale,
        "mode": list(MODES).index(fmt.mode),
        "group": fmt.group_size,
        "bits": fmt.bits,
        "rows": config.rows,
        "outputs": config.outputs,
        "run": config.run,
        "lanes": config.lanes,
        "ways": config.ways,
        "biased": biased,
    }


@cache
def _shape(*sizes: int) -> mx.array:
    return mx.array(sizes, mx.int32)
