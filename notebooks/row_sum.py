"""Sums of rows: the smallest kernel with every option that the tuner knows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

import mlx.core as mx

from mlx_qlayers.metal.record import Inputs, Path, Record, normal
from mlx_qlayers.runtime.kernel import Kernel
from mlx_qlayers.runtime.spec import Spec

KERNEL = Kernel(
    "row_sum",
    pathlib.Path(__file__).with_name("row_sum.metal"),
    large=True,
    threadgroup_memory=lambda upcast, local, group, **_: 4 * upcast * local * group,
    registers=lambda upcast, unroll, **_: upcast * (1 + unroll),
)


@dataclass(frozen=True)
class RowSum:
    """How the sums are spread over threads.

    Of each option, on the right, what it makes of the loops of one thread. ``x0`` and ``x1`` are
    two rows, and ``lane`` numbers the 32 threads of a SIMD group.

    Attributes:
        upcast: rows that a SIMD group sums side by side. Shared operands are read and worked out
            once, and the sums do not wait for each other. Each takes registers, and there are
            fewer threads::

                for k in range(lane, K, 32):        for k in range(lane, K, 32):
                    sum += x0[k]                        sum0 += x0[k]
                                                        sum1 += x1[k]

        unroll: neighbours that a lane reads at each step: one wide load in place of several, and
            the loop turns less often::

                for k in range(lane, K, 32):        for k in range(4 * lane, K, 128):
                    sum += x0[k]                        a, b, c, d = x0[k : k + 4]
                                                        sum += a; sum += b; sum += c; sum += d

        local: teams of SIMD groups in a threadgroup, each with rows of its own. They are started
            together, and share threadgroup memory and whatever the cache holds::

                grid = 32, M                        grid = 32, M
                threadgroup = 32, 1                 threadgroup = 32, 8

        group: SIMD groups of a team, which share its rows, step by step: more threads for few
            outputs. Their parts meet in threadgroup memory::

                for k in range(lane, K, 32):        for k in range(32 * simd + lane, K, 32 * group):
                    sum += x0[k]                        sum += x0[k]
                                                    parts[simd] = sum; barrier; sum = parts.sum()

        blocked: whether each of them takes one part of a row, of ``begin`` on, and reads memory in
            a line::

                for k in range(lane, K, 32):        for k in range(begin + lane, begin + part, 32):
                    sum += x0[k]                        sum += x0[k]
                                                    parts[simd] = sum; barrier; sum = parts.sum()

        padded: whether the last turn may reach beyond the row, where it adds zeros: any length goes
            with any step::

                for k in range(4 * lane, K, 128):   for k in range(4 * lane, whole turns of K, 128):
                    sum += x0[k] + ...                  sum += (x0[k] if k < K else 0) + ...

    Source: the optimisations of tinygrad's kernels, ``UPCAST``, ``UNROLL``, ``LOCAL``, ``GROUP``,
    ``GROUPTOP`` and ``PADTO``.
    """

    upcast: int = 1
    unroll: int = 1
    local: int = 1
    group: int = 1
    blocked: bool = False
    padded: bool = True


def row_sum(x: Spec, config: RowSum) -> Callable[[mx.array], mx.array]:
    """The launch of the sums of the rows of a matrix.

    Args:
        x: (M, K) in float32, float16 or bfloat16.
        config: how to spread the work.

    Returns:
        A function of ``x`` that gives (M,) float32.

    Raises:
        ValueError: ``config`` needs a K that is a multiple of what its SIMD groups take in a turn.

    Example:
        >>> x = mx.ones((3, 5))
        >>> row_sum(x, RowSum(unroll=4))(x)
        array([5, 5, 5], dtype=float32)
    """
    m, k = x.shape
    if not config.padded and k % (32 * config.unroll):
        raise ValueError(f"rows of {k} are not whole turns of {32 * config.unroll}: pad them")
    threads, shape = 32 * config.local * config.group, mx.array([m, k], mx.int32)
    launch = KERNEL.bind(
        [x, shape],
        template={"T": x.dtype, **asdict(config)},
        grid=(threads, -(-m // (config.upcast * config.local)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(m,)],
    )
    return lambda x: launch([x, shape])[0]


@dataclass(frozen=True)
class RowSumRecord(Record):
    """Sums of the rows of x (M, K): the record to learn from."""

    m: int
    k: int
    dtype: mx.Dtype
    family, configs = "row_sum", (RowSum,)
    values: ClassVar = {
        "upcast": (1, 2, 4),
        "unroll": (1, 2, 4, 8),
        "local": (1, 2, 4, 8),
        "group": (1, 2, 4, 8),
        "blocked": (False, True),
        "padded": (False, True),
    }

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.m, self.k), ""

    def kernels(self) -> tuple[Kernel, ...]:
        return (KERNEL,)

    def heuristic(self, device: str) -> RowSum:
        return RowSum(local=4)

    def why_not(self, config: RowSum) -> str | None:
        if 32 * config.local * config.group > 256:
            return "more than 256 threads"
        if config.blocked and config.group == 1:
            return "one SIMD group has nothing to split"
        if not config.padded and self.k % (32 * config.unroll):
            return f"rows of {self.k} are not whole turns"
        return None

    def inputs(self) -> Inputs:
        return normal(self.dtype, (self.m, self.k))

    def bind(self, inputs: Inputs, config: RowSum) -> Path:
        launch = row_sum(Spec.of(inputs[0]), config)
        return lambda inputs: [launch(inputs[0])]

    def stock(self, inputs: Inputs) -> Inputs:
        return [inputs[0].astype(mx.float32).sum(axis=1)]
