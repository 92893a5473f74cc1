"""The route of a product with a quantized matrix: which kernel, or the reference, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..dispatch import Choice, choose
from ..dispatch.choice import UNMEASURED, unmeasured
from ..dispatch.measurements import Measurement, configure, decided, found
from ..formats import Format
from ..measurements.thresholds import Measured, gain, threshold
from ..metal.quantized_matmul.dequantize import dense_product
from ..metal.quantized_matmul.qmm import qmm, qvm
from ..metal.quantized_matmul.qmm_skinny import MAX_SKINNY_ROWS, fixed_order, skinny_config
from ..metal.quantized_matmul.qmm_tensor import tensor_product
from ..metal.quantized_matmul.qmv import single_qmv
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS, invariant_config, qmv_config
from ..metal.quantized_matmul.tile import Tile
from ..options import MatmulCall, PackedMatrix
from ..reference import quantized_matmul as reference
from ..runtime.backend import backend, current
from ..runtime.devices import device_of
from ..runtime.program import CONSTANT_BELOW
from ..runtime.proof import first_proven
from ..runtime.spec import Spec
from .tensor_choice import CODES, PATHS, as_it_runs, in_turn, without_tensors

# Rows from which MLX compiles its own product for NVIDIA GPUs when it is first asked for, for 10 to
# 50 seconds: no choice that is made by default may wait for that.
STOCK_COMPILES = 8

QMV, QVM, QMM, SKINNY, DENSE = "qmv", "qvm", "qmm", "qmm_skinny", "dequantize and matmul"
# The kernels that are measured beside a family's own, by the paths' names.
_MEASURED = {"dequantized": DENSE, **PATHS}

_HALVES = (mx.float16, mx.bfloat16)
# A product of x, w, scales, biases and bias; the last two may be None.
Product = Callable[..., mx.array]


class Route(NamedTuple):
    """How one product is computed."""

    choice: Choice  # the backend of the kernels or `"reference"`, and why
    kernel: str = ""  # which of them
    # Those that were no slower than the stock operator, where it fails its proof.
    others: Sequence[str] = ()


def is_qmv(x: Spec | mx.array) -> bool:
    """Whether qmv takes an input: 1 to 16 rows."""
    return x.ndim > 1 and 0 < x.size <= MAX_QMV_ROWS * x.shape[-1]


def in_one_launch(x: Spec | mx.array) -> bool:
    """Whether products of an input take one launch, of qmv, or of qmm_skinny with tensor cores."""
    if is_qmv(x):
        return True
    few = x.ndim > 1 and 0 < x.size <= MAX_SKINNY_ROWS * x.shape[-1]
    return few and x.dtype in _HALVES and device_of().tensor_cores


def is_skinny(x: Spec, matrices: Sequence[PackedMatrix]) -> bool:
    """Whether qmm_skinny takes the rows of x, times these matrices as they are."""
    rows = x.size // x.shape[-1]
    least, most = threshold("qmm_skinny_rows") or (MAX_QMV_ROWS + 1, MAX_SKINNY_ROWS)
    fits = least <= rows <= most and x.dtype in _HALVES
    # It reads their shapes, which tiny ones do not come with.
    return fits and all(m.w.size >= CONSTANT_BELOW for m in matrices)


def skinny_spread(path: str, rows: int, n: int, k: int, fmt: Format, single: bool = True) -> Tile:
    """The configuration of qmm_skinny that was measured to be fastest, or that of its rule."""
    asked = "qmm_skinny", rows, n, k, mx.bfloat16, fmt
    best = found(*asked) if device_of(path).tensor_cores else None
    if best is not None and best.config.runs and (single or best.config.parts(k) == 1):
        return best.config
    return skinny_config(path, rows, n, k, fmt, single)


def is_dense(x: Spec | mx.array) -> bool:
    """Whether an input has so many rows that several matrices are dequantized for it at once."""
    if x.dtype == mx.float32 or not device_of().tensor_cores:
        return False
    return x.ndim > 1 and x.size > threshold("qmm_max_rows", "whole") * x.shape[-1] > 0


def route(op: str, call: MatmulCall, single: bool = False) -> Route:
    """Choose how to compute a product.

    ``single`` says that Python calls the product each time, which may take longer than it runs.
    """
    (x, (w, *_), transpose, fmt), (rows, n, k) = call, call.shape
    if current.get().invariant and device_of().gpu:
        return _invariant(op, call)
    if w.ndim > 2 or 0 in (rows, *w.shape):
        return Route(choose(op, False, reason="the kernels take one matrix, and nothing empty"))
    kernel, reason = _by_rule(call)
    wins, others = "kernel", list[str]()
    best: Measurement | None = None
    at = device_of()
    if transpose and (rows <= MAX_QMV_ROWS or not at.gpu):
        # There more rows are as sixteen.
        best = found("qmv", min(rows, MAX_QMV_ROWS), n, k, x.dtype, fmt)
    elif at.gpu:
        best = found("qmm", rows, n, k, x.dtype, fmt, transpose)
    best = as_it_runs(best)
    if best is not None and best.path in _MEASURED:
        kernel, *others = in_turn(best, {"kernel": kernel, **_MEASURED})
        wins = best.path
    elif best is not None and kernel == SKINNY and rows <= MAX_QMV_ROWS:
        kernel = QMV  # which was measured
    lacks_tensors = wins == "kernel" and kernel == QMM and not at.measured
    by = kernel + (f"; {without_tensors(best)}" if lacks_tensors else "")
    few = transpose and rows <= MAX_QMV_ROWS
    most = None if fmt.bits < at.stock_least_bits else threshold("qmv_call")
    short = single and few and most is not None and rows < STOCK_COMPILES
    short = short and threshold("qmv_stock")[rows - 1] * n * k <= most
    if short and not decided(best, reason, wins):
        why = Measured("the stock operator takes less time than Python to call the kernel")
        return Route(choose(op, reason=why, by=by), kernel, others)
    gain = host_gain(rows, fmt, transpose)
    choice = choose(op, reason=reason, host_gain=gain, by=by, best=best, wins=wins)
    return Route(choice, kernel, others)


def _invariant(op: str, call: MatmulCall) -> Route:
    """The kernel of few rows for any number of them, some after the others, on a GPU."""
    choice = choose(op, by=QMV)
    if choice.path == "reference" or call.matrix.w.ndim > 2 or not call.transpose:
        what = "" if call.transpose else ", not transposed"
        raise ValueError(
            f"batch-invariant products take no matrices {call.matrix.w.shape}{what} on "
            f"{choice.path} ({choice.reason})"
        )
    return Route(choice, QMV)


def _by_rule(call: MatmulCall) -> tuple[str, str | None]:
    """The kernel, and why ``auto`` leaves it for the stock operator."""
    device, vector = device_of(), QMV if call.transpose else QVM
    if not device.gpu:
        # Where threads do not run side by side, sixteen rows after sixteen are fastest.
        return vector, None
    if vector == QMV and call.shape[0] <= MAX_QMV_ROWS:
        if device.tensor_cores and is_skinny(call.x, [call.matrix]):
            return SKINNY, Measured("")
        compiles = device.stock_compiles and call.shape[0] >= STOCK_COMPILES
        if compiles and call.x.dtype == mx.float32:
            return QMM, None
        return QMV, stock_is_better(call.x.dtype, call.fmt)
    return _many_rows(call) if device.tensor_cores else (QMM, UNMEASURED)


def stock_is_better(dtype: mx.Dtype, fmt: Format, skinny: bool = False) -> str | None:
    """Why ``auto`` leaves qmv, or qmm_skinny, for the stock operator on a GPU."""
    device = device_of()
    if fmt.bits < device.stock_least_bits:
        return None
    if device.tensor_cores and dtype == mx.float32:
        return "the stock operator is faster in float32, which the matrix units do not take"
    return unmeasured() or (Measured("") if skinny else None)


def host_gain(rows: int, fmt: Format, transpose: bool = True) -> float | None:
    """How many times as fast as the reference qmv and qvm are on a CPU."""
    if not transpose:
        return float(threshold("qvm_gain", device="host"))
    return gain("qmv_gain", rows, fmt.mode, fmt.bits)


def _many_rows(call: MatmulCall) -> tuple[str, str | None]:
    """The kernel, by measured rows. Stock is none of the choices: MLX compiles it for 40 s."""
    (x, _, transpose, fmt), (rows, n, k) = call, call.shape
    if x.dtype == mx.float32:  # dense matrices of which MLX multiplies in TF32
        return QMM, None
    if transpose and is_skinny(x, [call.matrix]):
        return SKINNY, Measured("")
    cut = configure("qmm", backend(), rows, n, k, x.dtype, fmt, transpose)
    # Where tiles share the depth and another launch adds them up, a dense product wins sooner.
    until = threshold("qmm_max_rows", "whole" if cut.fills(rows, n) else "split")
    return QMM if rows <= until else DENSE, Measured("")


def dense_is_worse(rows: int, n: int, x: Spec, fmt: Format) -> str | None:
    """Why ``auto`` does not dequantize matrices for one dense product."""
    best = found("qmm", rows, n, x.shape[-1], x.dtype, fmt, True)
    if best is not None and best.path != "uncompared":
        return Measured("" if best.path == "dequantized" else best.evidence)
    if not device_of().tensor_cores:
        return "a dense product of many rows was measured on NVIDIA GPUs only"
    few = rows <= threshold("qmm_max_rows", "whole")
    return Measured("qmm is faster for so few rows" if few else "")


def product(to: Route, call: MatmulCall) -> Product:
    """The launch of a product on a route: a function of x, w, scales, biases, bias and others."""
    kernels = to.kernel, *to.others
    return first_proven(
        {each: partial(_product, to._replace(kernel=each), call) for each in kernels}
    )


def _product(to: Route, call: MatmulCall) -> Product:
    (x, _, transpose, fmt), path, kernel = call, to.choice.path, to.kernel
    if path == "reference":
        return by_reference(transpose, fmt)
    (rows, n, k), dtype = call.shape, x.dtype
    by_rows = device_of(path).gpu and current.get().invariant
    tile = in_fixed_order(path, x, [call.matrix], fmt) if by_rows else None
    most = MAX_QMV_ROWS if tile is None else MAX_SKINNY_ROWS
    if rows > most and (kernel == QVM or by_rows):
        return _in_blocks(to, call, most)
    if by_rows:
        return single_qmv(call, tile or invariant_config(path, rows, n, k, dtype, fmt))
    if kernel == QMV:
        # Only on a CPU there are more rows: as sixteen where a row's bits may not depend on others.
        if rows <= MAX_QMV_ROWS or current.get().invariant:
            few = min(rows, MAX_QMV_ROWS)
            return single_qmv(call, configure("qmv", path, few, n, k, dtype, fmt))
        return single_qmv(call, qmv_config(path, rows, n, k, dtype, fmt))
    if kernel == SKINNY:
        return single_qmv(call, skinny_spread(path, rows, n, k, fmt))
    if kernel == QVM:
        return qvm(call)
    if kernel == QMM:
        return qmm(call, configure("qmm", path, rows, n, k, dtype, fmt, transpose))
    if kernel in PATHS.values():
        return tensor_product(kernel == CODES, call)
    return dense_product(call)


def in_fixed_order(
    path: str, x: Spec, matrices: Sequence[PackedMatrix], fmt: Format
) -> Tile | None:
    """Of qmm_skinny, which adds up each of 1 to 128 rows as it does sixteen; None without it."""
    (rows, k), sizes = (x.size // x.shape[-1], x.shape[-1]), [m.w.shape[0] for m in matrices]
    halves = device_of(path).tensor_cores and x.dtype in _HALVES
    if not halves or any(m.w.size < CONSTANT_BELOW for m in matrices):
        return None
    return fixed_order(path, rows, sizes, k, fmt)


def by_reference(transpose: bool, fmt: Format) -> Product:
    """The product in MLX's operators."""

    order = "transposed" if transpose else "plain"
    dense_rows = threshold("reference_dense_rows", fmt.mode, fmt.bits, order, device="host")

    def run(x: mx.array, w: mx.array, scales: mx.array, *rest: Any) -> mx.array:
        biases, bias, *_ = *rest, None
        y = reference.quantized_matmul(x, w, scales, biases, transpose, fmt, dense_rows)
        if bias is None:
            return y
        # Of one row nothing is broadcast: NVIDIA GPUs have that compiled, for seconds.
        return y + (bias.reshape(y.shape) if y.size == bias.size else bias)

    return run


def _in_blocks(to: Route, call: MatmulCall, most: int) -> Product:
    """The product of as many rows at a time as the kernel takes."""
    rows, _, k = call.shape
    starts = range(0, rows, most)
    launches = {
        size: product(to, call._replace(x=Spec((size, k), call.x.dtype)))
        for size in {min(most, rows - i) for i in starts}
    }

    def run(x: mx.array, *matrix: mx.array | None) -> mx.array:
        flat = x.reshape(-1, k)
        blocks = [flat[i : i + most] for i in starts]
        products = [launches[len(block)](block, *matrix) for block in blocks]
        return mx.concatenate(products).reshape(*x.shape[:-1], -1)

    return run
