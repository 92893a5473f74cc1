"""The moves of the search: small typed changes of a kernel's configuration.

Each is explained on a kernel that sums the rows of a matrix. ``x0`` and ``x1`` are two of its rows,
``lane`` numbers the 32 threads of a SIMD group, and the loops are those of one thread.
``mlx_qlayers/metal/common/row_sum.metal`` is that kernel with all of them.

Source: the optimisations of tinygrad's kernels (``UPCAST``, ``UNROLL``, ``LOCAL``, ``GROUP``,
``GROUPTOP``, ``PADTO``), after which the moves are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Move:
    """A field of a configuration, and the values that it may take; subclasses say what it does.

    Attributes:
        field: the field of the configuration, a frozen dataclass.
        values: those that it may take.

    Example:
        >>> from mlx_qlayers.metal.common.row_sum import RowSum
        >>> [config.upcast for config in Upcast("upcast", (1, 2, 4))(RowSum(upcast=2))]
        [1, 4]
    """

    field: str
    values: tuple[int, ...]

    def __call__(self, config: Any) -> Iterator[Any]:
        """A configuration with every other value that it admits, if it has such a field."""
        if self.field in {field.name for field in fields(config)}:
            for value in self.values:
                if value != getattr(config, self.field):
                    with suppress(ValueError):
                        yield replace(config, **{self.field: value})


class Upcast(Move):
    """Outputs per thread: what they share is read and worked out once:

        for k in range(lane, K, 32):            for k in range(lane, K, 32):
            sum += x0[k]                            sum0 += x0[k]
                                                    sum1 += x1[k]

    The sums do not wait for each other. Each takes registers, and there are fewer threads.
    """


class Unroll(Move):
    """Values per step: neighbours are read at once, and the loop turns less often:

        for k in range(lane, K, 32):            for k in range(4 * lane, K, 128):
            sum += x0[k]                            a, b, c, d = x0[k : k + 4]
                                                    sum += a; sum += b; sum += c; sum += d

    One wide load takes the place of four.
    """


class Local(Move):
    """Threads in a threadgroup, with outputs of their own: they are started together, and share
    threadgroup memory and whatever the cache holds:

        grid = 32, M                            grid = 32, M
        threadgroup = 32, 1                     threadgroup = 32, 8
    """


class Group(Move):
    """Split a sum over the SIMD groups of a threadgroup, step by step: more threads for few
    outputs. Their parts meet in threadgroup memory:

        for k in range(lane, K, 32):            for k in range(32 * simd + lane, K, 32 * group):
            sum += x0[k]                            sum += x0[k]
                                                parts[simd] = sum; barrier; sum = parts.sum()
    """


class GroupTop(Move):
    """Split a sum as :class:`Group` does, but in whole parts: each reads memory in a line, and what
    belongs to a part, as the scale of a group of weights, is read by one SIMD group:

        for k in range(lane, K, 32):            for k in range(simd * K / group + lane, ..., 32):
            sum += x0[k]                            sum += x0[k]
                                                parts[simd] = sum; barrier; sum = parts.sum()
    """


class PadTo(Move):
    """Pad a dimension to whole steps: any length goes with any step, and each element beyond the
    edge is replaced by a zero:

        for k in range(4 * lane, K, 128):       for k in range(4 * lane, ceil(K / 128) * 128, 128):
            sum += x0[k] + ...                      sum += (x0[k] if k < K else 0) + ...
    """
