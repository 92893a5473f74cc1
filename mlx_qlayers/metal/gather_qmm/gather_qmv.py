"""Launches the kernels that multiply rows with the quantized matrices that they choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ...formats import GLOBAL_UNIT, Format
from ...options import MatmulCall
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import large_kernel
from ..quantized_matmul.tile import Tile, packed_template, registers, whole_words

_kernel: Callable[..., Kernel] = partial(large_kernel, file="gather_qmm/gather_qmv.metal")
_ROWS = _kernel(
    "gather_qmm_rows",
    # And where each row of x is.
    registers=lambda rows, **values: registers(rows=rows, **values) + 2 * rows,
)
_COLUMNS = _kernel(
    "gather_qmm_columns", registers=lambda rows, run, chunk, **_: (rows + chunk) * run + 2 * rows
)


class Pairs(NamedTuple):
    """The products that there are: which rows and which matrix each takes."""

    shape: tuple[int, ...]  # the leading dimensions of the result; P products in all
    share: int = 1  # neighbouring products with the same block of rows; 0 where blocks are listed
    in_order: bool = False  # whether products with the same matrix are neighbours
    left: Any = None  # the blocks that products take where no list is given, uint32 in `shape`
    right: Any = None  # likewise the matrices
    broadcast: bool = False  # whether lists that are given have other shapes

    def lists(self, left: Any, right: Any) -> tuple[mx.array | None, mx.array]:
        """The blocks, None where they are not listed, and the matrices of all products: (P,)."""
        found = (
            default if given is None else mx.broadcast_to(given, self.shape).astype(mx.uint32)
            for given, default in ((left, self.left), (right, self.right))
        )
        left, right = (a if a is None else a.flatten() for a in found)
        return left, right


# Of x, w, scales, biases, the blocks and the matrices that products take, and global scales; what
# is left out is None.
Products = Callable[..., mx.array]


@dataclass(frozen=True)
class Columns:
    """How products with matrices as they are, not transposed, are spread over threads."""

    rows: int  # neighbouring results in a tile
    run: int  # neighbouring columns of a thread, as in `Tile`
    chunk: int  # rows of a matrix that a thread unpacks at a time; 1 where `lanes` is 32
    wide: int  # threads with neighbouring runs; others of a SIMD group take other parts of sums
    lanes: int  # as in `Tile`
    threads: int

    def template(self) -> dict[str, TemplateValue]:
        """The values of the kernel's parameters."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}


def configuration(
    device: str, per_pair: int, in_order: bool, transpose: bool, fmt: Format
) -> Tile | Columns:
    """The configuration for ``per_pair`` rows of each product."""
    single = per_pair == 1 and not in_order
    if not device_of(device).gpu:
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        rows, run = 1 if single else 16, fmt.group_size
        if transpose:
            return Tile("qmv", run, rows, outputs=4, lanes=1, ways=16, local=8)
        return Columns(rows, run=run, chunk=1 if single else 32, wide=1, lanes=1, threads=8)
    # The sums and unpacked weights must stay in registers, of which Apple GPUs have fewer.
    run = whole_words(fmt)
    if transpose:
        rows = 1 if single else 4 if run == 16 else 2
        wide = run == 32 and not device_of(device).spills
        outputs = 2 if wide or (single and fmt.mode == "affine") else 4
        return Tile("qmv", run, rows, outputs)
    return Columns(1 if single else 64 // run, run=run, chunk=1, wide=4, lanes=32, threads=64)


def gather_qmv(
    call: MatmulCall, pairs: Pairs, config: Tile | Columns, scaled: bool = False
) -> Products:
    """Binds products of M rows each with the packed matrices that they choose.

    The launch gives (..., M, N): float32 sums rounded once. It casts arrays to the dtypes of their
    specs, and broadcasts indices of any integer type.
    """
    x, (w, scales, *_), _, fmt = call
    (*_, m, k), (shape, share, _, every_left, every_right, strided) = x.shape, pairs
    template = config.template()
    if isinstance(config, Tile):
        template |= {"lanes": config.lanes, "ways": config.ways}
        kernel, n, across = _ROWS, w.shape[-2], config.outputs
    else:
        kernel, n, across = _COLUMNS, fmt.dims(w), config.wide * config.run
    tiles = -(-n // across)
    groups = -(-tiles * config.lanes // config.threads)
    results, indices = prod(shape) * m, Spec(shape, mx.uint32)
    sizes, one = mx.array([results, n, k, m, share], mx.int32), mx.array([1.0])
    factors = Spec((prod(w.shape[:-2]),), mx.float32) if scaled else one
    launch = kernel.bind(
        [x, w, scales, scales, factors, indices, indices, sizes],
        template=packed_template(fmt, x.dtype, scales.dtype)
        | template
        | {"listed": not share, "scaled": scaled},
        grid=(groups * config.threads, -(-results // config.rows), 1),
        threadgroup=(config.threads, 1, 1),
        output_shapes=[(*shape, m, n)],
    )
    rows, kind = x.dtype, scales.dtype

    # Every product of a token comes through here: calls of Python functions are its cost.
    def run(*arrays: Any) -> mx.array:
        x, w, scales, biases, left, right, global_scale = arrays
        scales = scales.astype(kind)
        biases = scales if biases is None else biases.astype(kind)
        factors = one if global_scale is None else global_scale.astype(mx.float32) / GLOBAL_UNIT
        right = every_right if right is None else mx.broadcast_to(right, shape).astype(mx.uint32)
        if left is not None:
            left = mx.broadcast_to(left, shape).astype(mx.uint32)
        elif share:
            left = right  # not read
        else:
            left = every_left
        if strided:
            left, right = mx.contiguous(left), mx.contiguous(right)
        return launch([x.astype(rows), w, scales, biases, factors, left, right, sizes])[0]

    return run
