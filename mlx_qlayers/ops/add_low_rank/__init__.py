"""Products with two matrices of a small rank, as those of LoRA, added to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...dispatch import Gradient, Operation, Plan, choose, dispatch
from ...metal.common.kernels import constants, large_kernel, without
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec
from ..matmul import matmul
from ..signature import Signature

_FILE = Path("add_low_rank.metal")
DOWN = large_kernel(
    "low_rank_down", _FILE, threadgroup_memory=1024, registers=lambda W, **_: 64 + 16 * W
)
UP = large_kernel("low_rank_up", _FILE, registers=lambda W, **_: 24 * W + 8)
OUTER = large_kernel(
    "low_rank_outer",
    _FILE,
    threadgroup_memory=lambda W, **_: 4096 * W,
    registers=lambda W, **_: 16 * W + 8,
)
_ALONE = without(UP, ("y",))
# Of the kernels: threads of a threadgroup, of the third and of the others, and threadgroups that a
# multiprocessor is to hold; ranks of a block; rows of a threadgroup of the first and of the second,
# and of a part of the third.
_OUTER, _THREADS, _BLOCK, _ROWS, _TALL, _LONG = (256, 2), (128, 3), 8, 8, 16, 512
# For each 8 ranks x is read again; above, dense products have not been compared.
_LARGEST = 32
Size = tuple[int, int]
_TAKES = Signature("""
    y: float (*B, N)
    x: y (*B, K)
    a: float (K, R)
    b: a (R, N)
    scale: number
""")


def add_low_rank(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, *, scale: float = 1.0
) -> mx.array:
    """``y + scale (x a) b`` with matrices of a small rank R, computed in float32 and rounded once.

    On a GPU two launches read x and y once for ranks up to 32, with no copy of them in the dtype of
    the matrices, and the gradients read x once and the cotangent twice.

    Args:
        y: (..., N), such as the outputs of a linear layer; float32, float16 or bfloat16.
        x: (..., K) in the dtype of ``y``, such as its inputs.
        a: (K, R) in float32, float16 or bfloat16, as mlx-lm's ``lora_a``.
        b: (R, N) in the dtype of ``a``, as ``lora_b``.
        scale: of the product.

    Returns:
        (..., N) in the dtype of ``y``. It can be differentiated once, by all arrays.

    Raises:
        ValueError: an argument has a shape or dtype that does not fit; it is named.

    Example:
        >>> x, a, b = mx.ones((2, 5, 64)), mx.ones((64, 8)), mx.ones((8, 32))
        >>> add_low_rank(mx.zeros((2, 5, 32)), x, a, b, scale=0.5)[0, 0, 0].item()
        256.0

    Source: LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
    """
    found: mx.array = dispatch(_ADD, (y, x, a, b), (scale,))[0]
    return found


def _launch(
    kernel: Kernel, inputs: Sequence[Spec], size: Size, **template: Any
) -> Callable[..., mx.array]:
    """A launch, as a function of the kernel's arrays.

    ``size`` are rows and columns of the large array, ``template`` is what it is compiled for.
    """
    (rows, columns), rank = size, template["R"]
    width, blocks = 1 if columns % 4 else 4, -(-rank // _BLOCK)
    if kernel is DOWN and device_of().few_registers:
        width = min(width, 2)  # more are refused on M1 and M2
    threads, resident = _OUTER if kernel is OUTER else _THREADS
    across = -(-columns // ((32 if kernel is OUTER else threads) * width))
    grid = across, -(-rows // _TALL), 1
    output: tuple[int, ...] = rows, columns
    if kernel is DOWN:
        grid, output = (blocks, -(-rows // _ROWS), 1), (rows, rank)
    elif kernel is OUTER:
        parts = -(-rows // _LONG)
        grid, output = (across, parts, blocks), (parts, rank, columns)
    launch = kernel.bind(
        inputs,
        template=template | {"W": width, "RESIDENT": resident},
        grid=(threads * grid[0], *grid[1:]),
        threadgroup=(threads, 1, 1),
        output_shapes=[output],
    )
    return lambda *arrays: launch([*arrays])[0]


# Of x (M, K), y and dy (M, N), a (K, R), b (R, N) and low (M, R), and of a scale s: s x a;
# y + low b; s dy b^T; low a^T; and parts of the sums low^T x and low^T dy.
Steps = Sequence[Callable[..., mx.array]]


def _launches(y: Spec, a: Spec, b: Spec, sizes: tuple[Size, Size], s: float) -> Steps:
    (narrow, wide), rank, dtype = sizes, a.shape[1], y.dtype
    rows, outputs, scale = Spec(narrow, dtype), Spec(wide, dtype), constants([s], mx.float32)
    low, factor = Spec((narrow[0], rank), mx.float32), Spec.of(scale)
    turned = Spec(a.shape[::-1], a.dtype)  # lanes read ranks of neighbouring columns
    sums: Any = {"T": dtype, "R": rank}
    both = sums | {"A": a.dtype}
    down, back = (
        _launch(DOWN, [each, matrix, factor], size, **both)
        for each, matrix, size in ((rows, turned, narrow), (outputs, b, wide))
    )
    of_x = _launch(_ALONE, [low, turned], narrow, **both, added=False)
    return (
        lambda x, a: down(x, a.T, scale),
        _launch(UP, [outputs, low, b], wide, **both, added=True),
        lambda dy, b: back(dy, b, scale),
        lambda low, a: of_x(low, a.T),
        _launch(OUTER, [rows, low], narrow, **sums),
        _launch(OUTER, [outputs, low], wide, **sums),
    )


def _operators(dtype: mx.Dtype, s: float) -> Steps:
    def times(a: mx.array, b: mx.array) -> mx.array:
        return matmul(a.astype(mx.float32), b.astype(mx.float32))

    def outer(x: mx.array, low: mx.array) -> mx.array:
        # Of x, not of its transpose, compilation would keep the forward pass's float32 copy.
        return times(x.T, low).T[None]

    return (
        lambda x, a: s * times(x, a),
        lambda y, low, b: (y.astype(mx.float32) + times(low, b)).astype(dtype),
        lambda dy, b: s * times(dy, b.T),
        lambda low, a: times(low, a.T).astype(dtype),
        outer,
        outer,
    )


def _plan(arrays: Sequence[Spec], scale: float) -> Plan:
    y, x, a, b = arrays
    _TAKES.check(*arrays, scale)
    scale = float(scale)  # MLX takes no larger integers than int64
    rank, rows = a.shape[1], prod(y.shape[:-1])
    sizes = (rows, x.shape[-1]), (rows, y.shape[-1])
    reason = None if rank <= _LARGEST else f"its rank {rank} is above {_LARGEST}"
    least = min(y.size, x.size, a.size, b.size, rows * rank)
    few = "kernels read shapes, which arrays of fewer than 8 elements come without"
    empty = (few if least else "there is nothing to add") if least < CONSTANT_BELOW else None
    choice = choose("add_low_rank", reason=reason, empty=empty)
    operators = _operators(y.dtype, scale)
    if not least:
        return Plan(choice, lambda y, *_: [y])
    if choice.path == "reference":
        return Plan(choice, *_of(operators, *sizes))
    launches = _launches(y, a, b, sizes, scale)
    return Plan(choice, *_of(launches, *sizes), _of(operators, *sizes)[0])


def _of(steps: Steps, narrow: Size, wide: Size) -> tuple[Any, list[Gradient]]:
    """The operation and its gradients, which keep its arrays and ``scale x a``: that is small."""
    down, up, back, of_x, of_a, of_b = steps

    def run(y: mx.array, x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
        low = down(x.reshape(narrow), a)
        return [up(y.reshape(wide), low, b).reshape(y.shape), low]

    def gradient(given: Any, cotangents: list[mx.array], outputs: Any) -> list[mx.array]:
        (_, x, a, b), (_, low) = given, outputs
        rows, dy = x.reshape(narrow), cotangents[0].reshape(wide)
        along = back(dy, b)
        da, db = of_a(rows, along).sum(axis=0).T, of_b(dy, low).sum(axis=0)
        return [of_x(along, a).reshape(x.shape), da.astype(a.dtype), db.astype(b.dtype)]

    return run, [Gradient((0,), lambda _, dy, __: dy[:1]), Gradient((1, 2, 3), gradient)]


_ADD = Operation("add_low_rank", _plan)


def examples() -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Calls: what each is of, the arguments by name, and those that are differentiated."""
    for dtype, matrices, rank in ((mx.float32, mx.float32, 8), (mx.bfloat16, mx.float32, 3)):
        y, x = (mx.random.normal((2, 9, n)).astype(dtype) for n in (37, 65))
        a, b = (mx.random.normal(s).astype(matrices) / 8 for s in ((65, rank), (rank, 37)))
        name = f"rank {rank}, {str(dtype).removeprefix('mlx.core.')}"
        yield name, {"y": y, "x": x, "a": a, "b": b, "scale": 0.5}, ("y", "x", "a", "b")
