"""Launches dequantize, of whole matrices or rows of one, and what follows a dense product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import tabled
from ...options import MatmulCall, PackedMatrix
from ...runtime.devices import device_of
from ...runtime.launch import Launching
from ...runtime.spec import Spec
from ..common.kernels import constants, large_kernel, without
from .qmv import GATES, MAX_MATRICES, Gate
from .tile import packed_template

# Rows of a thread: enough to have several words on their way from memory.
_COUNT = 4


_KERNEL = large_kernel(
    "dequantize",
    "quantized_matmul/dequantize.metal",
    function="dequantize_matrices",
    # Packed words with their scales and biases, and what a run of them unpacks to.
    registers=lambda bits, run, count, **_: count * (run * bits // 32 + 2) + run,
)


def dequantize(
    matrices: Sequence[PackedMatrix], fmt: Format, dtype: mx.Dtype
) -> Callable[..., mx.array]:
    """Binds the dequantization of one to three matrices of one format, one below the other.

    The launch takes their w, scales and (affine) biases; it computes in float32 and rounds once.
    """
    arrays = [a for m in matrices for a in m[:3] if a is not None]
    affine = matrices[0].biases is not None
    rows = [m.w.shape[0] for m in matrices]
    run, columns = _run(fmt.bits), fmt.dims(matrices[0].w)
    threads = _threads(columns // run)
    blocks = -(-columns // (threads * run)) * -(-sum(rows) // _COUNT)
    begins = [sum(rows[:i]) for i in range(1, MAX_MATRICES)]
    shape = mx.array([columns, sum(rows), *begins], mx.int32)
    names = _KERNEL.program.input_names[:-1]
    given = [name for name in names[: 3 * len(matrices)] if affine or "biases" not in name]
    omitted = tuple(name for name in names if name not in given)
    name = f"dequantize_{len(matrices)}{'_affine' * affine}"
    launch = without(_KERNEL, omitted, name).bind(
        [*arrays, shape],
        template=packed_template(fmt, dtype, matrices[0].scales.dtype)
        | {"run": run, "count": _COUNT, "threads": threads},
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(sum(rows), columns)],
    )
    return lambda *arrays: launch([*arrays, shape])[0]


def dense_product(call: MatmulCall) -> Callable[..., mx.array]:
    """Binds a product with a matrix that is unpacked first; of x, w, scales, biases and bias."""
    unpack, transpose = dequantize([call.matrix], call.fmt, call.x.dtype), call.transpose

    def run(x: mx.array, w: mx.array, *given: mx.array | None) -> mx.array:
        *others, bias = given[:3]
        # Not before x is there: else matrices of layers that come later are dense all along.
        dense = unpack(mx.depends(w, x), *(a for a in others if a is not None))
        dense = dense.T if transpose else dense
        return x @ dense if bias is None else mx.addmm(bias, x, dense)

    return run


_AFFINE_ROWS = large_kernel(
    "dequantize_rows_affine",
    "quantized_matmul/dequantize.metal",
    function="dequantize_rows",
    registers=lambda bits, run, **_: run * bits // 32 + 2 + run,
)
_ROWS = without(_AFFINE_ROWS, ("biases",), "dequantize_rows")


def dequantize_rows(
    numbers: Spec, matrix: PackedMatrix, fmt: Format, dtype: mx.Dtype
) -> Callable[..., list[mx.array]]:
    """Binds the dequantization of rows (..., K) by their numbers (...).

    On GPUs other than NVIDIA's there have to be 8 numbers or more.
    """
    affine, count = matrix.biases is not None, prod(numbers.shape)
    run, columns = _run(fmt.bits), fmt.dims(matrix.w)
    threads = _threads(columns // run)
    shape = constants([columns, matrix.w.shape[0]])
    launch = (_AFFINE_ROWS if affine else _ROWS).bind(
        [Spec((count,), mx.int32), *(a for a in matrix[:3] if a is not None), Spec.of(shape)],
        template=packed_template(fmt, dtype, matrix.scales.dtype)
        | {"run": run, "threads": threads},
        grid=(-(-columns // (threads * run)) * threads, count, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*numbers.shape, columns)],
    )

    if not device_of().gpu:  # which takes addresses
        return Launching(launch, range(3 + affine), (shape,))

    def rows(numbers: mx.array, *arrays: mx.array | None) -> list[mx.array]:
        given = (a for a in arrays if a is not None)
        return launch([numbers.reshape(-1).view(mx.int32), *given, shape])

    return rows


def _run(bits: int) -> int:
    """The fewest elements, of at least 8, that whole words hold."""
    return next(n for n in (8, 16, 32) if n * bits % 32 == 0)


def _threads(across: int) -> int:
    """Threads for so many runs side by side: whole SIMD groups, and few without a run."""
    sizes = range(tabled("dequantize_threads"), 257, 32)
    return min(sizes, key=lambda size: -(-across // size) * size)


# Neighbours of a thread.
RUN = 8

_GATED = large_kernel("gated_rows", "quantized_matmul/gated.metal", registers=3 * RUN)


def gated_rows(x: Spec, gate: Gate) -> Callable[[mx.array], mx.array]:
    """Binds x (M, 2 N) to ``activation(first) * second``, N a multiple of :data:`RUN`.

    MLX compiles a kernel for that, on NVIDIA GPUs for seconds, which takes twice as long as this.
    """
    rows, columns = x.shape[0], x.shape[1] // 2
    count = rows * columns // RUN
    shape = constants([columns // RUN, count])
    launch = _GATED.bind(
        [x, shape],
        template={"T": x.dtype, "gate": GATES.index(gate)},
        grid=(count, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(rows, columns)],
    )
    return lambda x: launch([x, shape])[0]
