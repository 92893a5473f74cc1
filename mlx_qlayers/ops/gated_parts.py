"""A gated feed-forward module of many rows, in parts that share the memory of dense weights.

MLX gives memory back when the GPU is done with all that it was given at once. So what follows each
other there shares no memory but what a launch writes in place: dense weights of some rows at a
time, and columns of the gated rows. Each of these launches takes an array that comes behind
whatever read the memory before; a product that reads it adds zeros that the launch gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ..formats import Format
from ..metal.quantized_matmul.dequantize import dequantize_into
from ..metal.quantized_matmul.gated import gated_into
from ..metal.quantized_matmul.qmv import Gate
from ..options import PackedMatrix
from ..runtime.spec import Spec

# Bytes of dense weights at a time.
MOST_DENSE = 68 << 20


class Memory(NamedTuple):
    """What modules that run one behind the other compute in.

    Attributes:
        weights: dense ones, as many elements as :func:`memory_of` gives.
        gated: (M, width of the module), gated rows.
        after: whatever has its values when both may be written.
    """

    weights: mx.array
    gated: mx.array
    after: mx.array


def gated_parts(
    x: mx.array,
    h: mx.array,
    packed: Sequence[mx.array | None],
    formats: tuple[Format, Format],
    gate: Gate,
    memory: Memory,
) -> tuple[mx.array, list[list[mx.array]]]:
    """``h + activation(x @ gate.T) * (x @ up.T) @ down.T``, on CUDA; there is no gradient.

    Args:
        x: (M, K) in float16 or bfloat16.
        h: (M, N).
        packed: w, scales, biases and bias of gate, up and down, without a bias.
        formats: that of gate and up, and of down.
        gate: the activation.
        memory: what to compute in, in the dtype of ``x``; it is written.

    Returns:
        (M, N), and what it is computed from: lists to be evaluated one behind the other, one for
        each of :func:`parts_of` a matrix of ``width`` rows and ``2 * K`` columns.
    """
    matrices = [PackedMatrix(*packed[i : i + 4]) for i in (0, 4, 8)]
    of_up, of_down = ([a for a in some if a is not None] for some in (packed[:8], packed[8:]))
    (weights, gated, done), k, width = memory, x.shape[-1], matrices[0].w.shape[0]
    pieces, products = list[list[mx.array]](), list[mx.array]()
    for span in parts_of(width, 2 * k):
        unpack = dequantize_into(matrices[:2], formats[0], span, weights, done)
        zeros = unpack(*of_up, weights, done)
        product = mx.addmm(zeros, x, _view(weights, (zeros.size, k)))
        done = gated_into(Spec.of(product), gate, width, span[0])(product, gated)
        pieces.append([done])
    for span in parts_of(h.shape[-1], width, weights.size):
        unpack = dequantize_into(matrices[2:], formats[1], span, weights, done)
        zeros = unpack(*of_down, weights, done)
        done = mx.addmm(zeros, gated, _view(weights, (zeros.size, width)))
        products.append(done)
    return h + (mx.concatenate(products, 1) if len(products) > 1 else done), pieces


def parts_of(rows: int, columns: int, most: int | None = None) -> list[tuple[int, int]]:
    """Where the parts of a matrix begin and end, of at most so many elements.

    None is larger than the first, and all begin at a multiple of 8.
    """
    limit = max((most or MOST_DENSE // 2) // columns // 8, 1) * 8
    count = -(-rows // limit)
    step = min(-(-rows // count // 64) * 64, limit)
    return [*pairwise((*range(0, rows, step), rows))]


def memory_of(x: Spec | mx.array, width: int, after: mx.array) -> Memory:
    """For modules of so many gated columns and rows like ``x`` (..., K)."""
    k = x.shape[-1]
    weights, gated = (2 * k * parts_of(width, 2 * k)[0][1],), (prod(x.shape[:-1]), width)
    return Memory(mx.zeros(weights, x.dtype), mx.zeros(gated, x.dtype), after)


def _view(weights: mx.array, shape: tuple[int, int]) -> mx.array:
    """The first elements as a matrix, transposed."""
    return weights[: shape[0] * shape[1]].reshape(shape).T
