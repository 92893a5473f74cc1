"""Products with quantized matrices that each row chooses: checks, path and gradient."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import mlx.core as mx

from ..formats import GLOBAL_UNIT, Format
from ..metal.gather_qmm import Choice, configuration, gathered_products
from ..metal.gather_tiles import gathered_tiles, products_in_tiles
from ..metal.quantized_gradients import gradient_of_scales_and_biases
from ..reference.gather_qmm import gather_qmm as reference
from ..runtime.backend import backend, choose
from .quantized_gradients import one_by_one
from .separate import separate_gradients

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# How many times as fast as the reference the host kernels are, for 8, 64 and 512 rows among 32
# matrices; transposed, then plain. Measured by `benchmarks/bench_gather_qmm.py --host`.
_HOST_GAIN = {
    ("affine", 1): ((3.7, 15.2, 26.3), (3.0, 4.5, 9.0)),
    ("affine", 2): ((4.8, 7.0, 18.0), (1.8, 3.2, 8.3)),
    ("affine", 3): ((2.5, 5.3, 18.2), (2.8, 8.2, 32.0)),
    ("affine", 4): ((3.5, 10.6, 22.5), (1.0, 1.5, 3.8)),
    ("affine", 5): ((3.4, 4.1, 23.0), (2.2, 14.1, 32.5)),
    ("affine", 6): ((3.2, 3.7, 19.1), (1.5, 2.3, 5.8)),
    ("affine", 8): ((2.6, 3.8, 16.6), (0.7, 1.1, 2.6)),
    ("mxfp4", 4): ((1.1, 1.8, 3.7), (1.1, 2.8, 9.1)),
    ("mxfp8", 8): ((5.0, 8.9, 29.1), (2.3, 4.6, 30.6)),
    ("nvfp4", 4): ((0.5, 1.6, 4.4), (0.5, 1.2, 5.8)),
}
_GAIN_FROM_ROWS = (512, 64, 0)


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    sorted_indices: bool = False,
) -> mx.array:
    """Multiply blocks of rows with the quantized matrices that indices choose for them.

    Takes the arguments and gives the results of ``mx.gather_qmm``, rounded once from float32
    sums. A mixture of experts is this product: the matrices are the experts.

    Args:
        x: (..., M, K) in float32, float16 or bfloat16.
        w: (..., N, K * bits / 32) uint32, or (..., K, N * bits / 32) if not ``transpose``.
        scales: one a group along the last axis of the matrices; floating point (affine), or uint8
            holding E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4).
        biases: one a group (affine), else None.
        lhs_indices: integers, which block of rows of ``x`` each product takes, counted through
            its leading dimensions. None stands for every block once, in their shape.
        rhs_indices: integers, which matrix each product takes, counted likewise. None stands
            for every matrix once. The two are broadcast. No index may be out of range.
        transpose: multiply with the transposes of the matrices.
        group_size: elements that share a scale; None stands for the mode's default (affine: 64).
        bits: bits an element; None stands for the mode's default (affine: 4).
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        global_scale: one number for each matrix in mode nvfp4, as ``mx.quantize`` takes it.
        sorted_indices: says that ``rhs_indices`` are sorted, so that products with the same
            matrix can share what they read of it. What is said has to be true.

    Returns:
        (..., M, N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted), with
        the leading dimensions of the indices.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w, scales, biases = mx.quantize(mx.random.normal((8, 128, 256)))
        >>> chosen = mx.array([[0, 5], [2, 7], [5, 6]])
        >>> gather_qmm(mx.ones((3, 1, 1, 256)), w, scales, biases, rhs_indices=chosen).shape
        (3, 2, 1, 128)

    Source: ``mx.gather_qmm``.
    """
    fmt = Format.checked(group_size, bits, mode)
    leading = _check(x, w, scales, biases, lhs_indices, rhs_indices, transpose, fmt, global_scale)
    left = _indices(lhs_indices, x.shape[:-2])
    right = _indices(rhs_indices, w.shape[:-2])
    empty = 0 in (*leading, *x.shape, *w.shape)
    present = [a for a in (x, w, scales, biases, left, right, global_scale) if a is not None]
    path = choose(
        "gather_qmm",
        () if empty else ("metal", "cuda", "host"),
        unless="the product is empty" if empty else _stock_is_better(),
        host_gain=_host_gain(prod(leading) * x.shape[-2], transpose, fmt),
        arrays=present,
    )
    if path == "ops":
        left, right = (mx.broadcast_to(a, leading) for a in (left, right))
        return reference(
            x, w, scales, biases, left, right, transpose, fmt, global_scale, sorted_indices
        )
    right = mx.broadcast_to(right, leading).flatten().astype(mx.uint32)
    if lhs_indices is None and (share := _share(x.shape[:-2], leading)):
        choice = Choice(right, None, share, sorted_indices)
    else:
        left = mx.broadcast_to(left, leading).flatten().astype(mx.uint32)
        choice = Choice(right, left, 1, sorted_indices)
    if biases is not None:
        kind = mx.result_type(scales, biases)
        x = x.astype(mx.result_type(x, kind))
        scales, biases = scales.astype(kind), biases.astype(kind)
    products = _Products(path, fmt, transpose, choice)
    y = products(x, w, scales, biases, global_scale)
    return y.reshape(*leading, *y.shape[-2:])


def _stock_is_better() -> str | None:
    """Why ``auto`` leaves this kernel for the stock operator on a GPU."""
    return {
        "cuda": "the kernel was not measured on this GPU",
        "metal": "the kernel was not measured on an Apple GPU",
    }.get(backend())


def _host_gain(rows: int, transpose: bool, fmt: Format) -> float:
    """The gain at the next smaller number of rows that was measured."""
    gains = _HOST_GAIN[fmt.mode, fmt.bits][0 if transpose else 1]
    found = zip(_GAIN_FROM_ROWS, reversed(gains), strict=True)
    return next(gain for least, gain in found if rows >= least)


# Scales, biases and factors.
_Numbers = tuple[mx.array, mx.array | None, mx.array | None]


@dataclass(frozen=True)
class _Products:
    """The kernels on a backend, and the gradients of what they compute."""

    path: str
    fmt: Format
    transpose: bool
    choice: Choice

    def __call__(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        global_scale: mx.array | None,
    ) -> mx.array:
        """(P, M, N), differentiable in all but what is packed."""

        def numbers(given: tuple[mx.array, ...]) -> _Numbers:
            if biases is not None:
                return given[0], given[1], None
            return scales, None, given[0].flatten() / GLOBAL_UNIT if given else None

        def forward(x: mx.array, *given: mx.array) -> mx.array:
            return self._launch(x, w, *numbers(given), self.choice, self.transpose)

        def of_x(x: mx.array, *given: mx.array) -> mx.array:
            return self._of_x(x, w, scales, biases, global_scale, given[-1])

        def of_numbers(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            x, scales, _, dy = arrays
            rows = _rows_by_matrix(self.choice, prod(w.shape[:-2]), x.shape[-2])
            return gradient_of_scales_and_biases(
                x, dy, w, scales, self.fmt, self.transpose, self.path, rows
            )

        def of_global(x: mx.array, given: mx.array, dy: mx.array) -> mx.array:
            x, dy = x.astype(mx.float32), dy.astype(mx.float32)
            y = self._launch(x, w, scales, None, None, self.choice, self.transpose)
            each = (y * dy).sum((-2, -1)) / GLOBAL_UNIT
            return mx.zeros((given.size,)).at[self.choice.right].add(each).reshape(given.shape)

        if biases is not None:
            function = separate_gradients(forward, of_x, *one_by_one(of_numbers))
            return function(x, scales, biases)
        if global_scale is not None:
            function = separate_gradients(forward, of_x, of_global)
            return function(x, global_scale.astype(mx.float32))
        return separate_gradients(forward, of_x)(x)

    def _of_x(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        global_scale: mx.array | None,
        dy: mx.array,
    ) -> mx.array:
        right, left, share, in_order = self.choice
        if left is not None or share > 1:  # terms are added up before they are rounded
            dy = dy.astype(mx.float32)
        group_size, bits, mode = self.fmt
        terms = gather_qmm(
            dy,
            w,
            scales,
            biases,
            None,
            right,
            transpose=not self.transpose,
            group_size=group_size,
            bits=bits,
            mode=mode,
            global_scale=global_scale,
            sorted_indices=in_order,
        )
        if left is not None:
            total = mx.zeros((prod(x.shape[:-2]), *x.shape[-2:]), mx.float32)
            terms = total.at[left].add(terms)
        elif share > 1:
            terms = terms.reshape(-1, share, *terms.shape[-2:]).sum(1)
        return terms.astype(x.dtype).reshape(x.shape)

    def _launch(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        factors: mx.array | None,
        choice: Choice,
        transpose: bool,
    ) -> mx.array:
        if choice.sorted and self.path != "host":
            blocks, count = choice.blocks(x), prod(w.shape[:-2])
            cut = gathered_tiles(self.path, prod(blocks.shape[:-1]), count, x.dtype, self.fmt)
            return products_in_tiles(
                blocks, w, scales, biases, factors, choice.right, transpose, self.fmt, cut
            )
        config = configuration(self.path, x.shape[-2], choice.sorted, transpose, self.fmt)
        return gathered_products(x, w, scales, biases, factors, choice, self.fmt, config)


def _rows_by_matrix(
    choice: Choice, matrices: int, per_pair: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The rows of x and of the result that met each matrix, and where each matrix's begin."""
    order = mx.argsort(choice.right)
    blocks = order // choice.share if choice.left is None else choice.left[order]
    x_rows, y_rows = (
        (at[:, None] * per_pair + mx.arange(per_pair)).flatten().astype(mx.uint32)
        for at in (blocks, order)
    )
    counts = mx.zeros((matrices + 1,), mx.uint32).at[choice.right + 1].add(per_pair)
    return x_rows, y_rows, mx.cumsum(counts).astype(mx.uint32)


def _indices(indices: mx.array | None, shape: tuple[int, ...]) -> mx.array:
    """As given, or each block of an array once."""
    return mx.arange(prod(shape)).reshape(shape) if indices is None else indices


def _share(batch: tuple[int, ...], leading: tuple[int, ...]) -> int:
    """How many neighbouring products take the same block of rows; 0 if it is not so simple."""
    padded = (1,) * (len(leading) - len(batch)) + tuple(batch)
    same = len(leading)
    while same and padded[same - 1] == 1:
        same -= 1
    return prod(leading[same:]) if padded[:same] == leading[:same] else 0


def _check(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array | None,
    transpose: bool,
    fmt: Format,
    global_scale: mx.array | None,
) -> tuple[int, ...]:
    """The leading dimensions of the result."""
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim < 2 or w.ndim < 2:
        raise ValueError(f"x and w need at least 2 dimensions, not shapes {x.shape} and {w.shape}")
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    inner = fmt.dims(w) if transpose else w.shape[-2]
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
    for name, indices in (("lhs_indices", lhs_indices), ("rhs_indices", rhs_indices)):
        if indices is not None and not mx.issubdtype(indices.dtype, mx.integer):
            raise ValueError(f"{name} must be integers, not {indices.dtype}")
    if global_scale is not None and (
        problem := fmt.mismatch_of_global(global_scale, prod(w.shape[:-2]))
    ):
        raise ValueError(problem)
    left = x.shape[:-2] if lhs_indices is None else lhs_indices.shape
    right = w.shape[:-2] if rhs_indices is None else rhs_indices.shape
    try:
        return mx.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(
            f"lhs_indices and rhs_indices do not broadcast: shapes {left} and {right} "
            "(None stands for the leading dimensions of x or w)"
        ) from None
