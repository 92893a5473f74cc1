"""The logits of an output layer in blocks of rows and columns, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ...dispatch import dispatch
from ...runtime.devices import on_cpu
from ...runtime.transformed import without_graph
from ..matmul import matmul
from ..quantized_matmul import QUANTIZED_MATMUL
from ..quantized_route import by_reference
from .logits import OF_LOGITS, Scoring, composed

# Logits of a block: 8 MB of float32 where there are so many rows, and on a GPU 12 times as many, of
# which products of few rows would take twice the time.
ROWS, COLUMNS = 2048, 1024
# Rows of a block are left out in such numbers, so that there are few shapes of products.
STEP = ROWS // 8


class Head(NamedTuple):
    """An output layer, or that of some columns of its logits."""

    # As the operation takes them.
    weight: mx.array
    scales: Any
    biases: Any
    bias: Any
    fmt: Any  # that of a quantized matrix, else None
    softcap: float | None  # of the logits, or None
    dtype: mx.Dtype  # of products
    # On a CPU, where arrays have values: compute one block after the other, by kernels.
    at_once: bool = False

    def holding(self, *arrays: Any) -> Head:
        """The same with other arrays."""
        return self._replace(**dict(zip(self._fields, arrays, strict=False)))

    def part(self, columns: slice) -> Head:
        """The layer of some columns of the logits."""
        return self.holding(*(None if a is None else a[columns] for a in self[:4]))

    def times(self, rows: mx.array, transpose: bool) -> mx.array:
        """The product of rows with the matrix, or its transpose."""
        packed = self.weight, self.scales, self.biases
        rows = rows.astype(self.dtype)
        if self.fmt is None:
            dense = self.weight.astype(self.dtype)
            y = product(rows, dense.T if transpose else dense)
        elif on_cpu() and not self.at_once:
            # Where kernels cannot run, as mx.compile traces.
            y = by_reference(transpose, self.fmt)(rows, *packed)
        else:
            given = rows, *packed, None, None
            y = dispatch(QUANTIZED_MATMUL, given, (transpose, *self.fmt))
        return y

    def of_logits(
        self, y: mx.array, targets: mx.array, *lse: mx.array, scoring: Scoring, dtype: Any = None
    ) -> list[mx.array]:
        """The losses of products, or their slopes in a dtype."""
        given = y, targets, None if self.bias is None else self.bias.astype(mx.float32), *lse
        if on_cpu() and not self.at_once:  # as of products
            return composed(scoring, dtype)(*given)
        found: list[mx.array] = dispatch(OF_LOGITS, given, (dtype, *scoring))
        return found


def added(total: mx.array, part: mx.array) -> mx.array:
    return total + part.astype(mx.float32)


@cache
def _compiled(function: Callable[..., mx.array], *options: Any) -> Callable[..., mx.array]:
    return mx.compile(partial(function, *options))


def in_one_pass(function: Callable[..., mx.array], *options: Any) -> Callable[..., mx.array]:
    """A function of arrays where MLX would hold each step, of which a CPU may lack the compiler."""
    return partial(function, *options) if on_cpu() else _compiled(function, *options)


def product(a: mx.array, b: mx.array) -> mx.array:
    """A B, in float32 never rounded to TF32."""
    return a @ b if on_cpu() else matmul(a, b)


def _blocks(length: int, most: int) -> list[slice]:
    return [slice(i, min(i + most, length)) for i in range(0, length, most)]


class Blocks(NamedTuple):
    """The logits of all rows, block by block."""

    x: mx.array  # (R, K), in the dtype of products
    targets: mx.array  # (R,) int32, -1 outside of the vocabulary
    head: Head  # the layer
    smoothing: float  # of the targets

    @property
    def columns(self) -> list[slice]:
        """Blocks of columns."""
        return _blocks(self.head.weight.shape[0], COLUMNS if on_cpu() else 5 * COLUMNS)

    @property
    def rows(self) -> list[slice]:
        """Blocks of rows."""
        return _blocks(self.x.shape[0], ROWS if on_cpu() else 2 * ROWS)

    def after(self, before: Sequence[mx.array]) -> Blocks:
        """The same, of which nothing is read before some arrays are there.

        Else MLX begins blocks side by side, and ``mx.compile`` keeps what the gradients have in
        common with the losses, such as all unpacked blocks of the matrix.
        """
        if not before or self.head.at_once:
            return self
        arrays: tuple[Any, ...] = self.x, self.targets, *self.head[:4]
        held: Iterator[Any] = iter(mx.depends([a for a in arrays if a is not None], list(before)))
        made: list[Any] = [a if a is None else next(held) for a in arrays]
        x, targets, *head = made
        return self._replace(x=x, targets=targets, head=self.head.holding(*head))

    def there(self, sums: list[mx.array]) -> list[mx.array]:
        """The same float32 numbers, with values where blocks are computed at once.

        Inside of ``mx.grad`` an array holds all that it was computed from, even with a value.
        """
        if not self.head.at_once:
            return sums
        mx.eval(sums)
        return [without_graph(each) for each in sums]

    def later(self) -> Blocks:
        """The same to be computed whenever MLX does."""
        return self._replace(head=self.head._replace(at_once=False))

    def losses(self) -> list[mx.array]:
        """Of each row the loss, the logarithm of the sum of all exponentials, and those of the
        shares that the blocks of columns have of it.
        """
        found, state = [], list[mx.array]()
        for rows in self.rows:
            parts = []
            for columns in self.columns:
                now = self.after(state)
                head, targets = now.head.part(columns), now.targets[rows] - columns.start
                y = head.times(now.x[rows], True)
                state = self.there(head.of_logits(y, targets, scoring=self.scoring))
                parts.append(state)
            each, scores = (mx.stack(list(some), axis=1) for some in zip(*parts, strict=True))
            lse = mx.logsumexp(each, axis=1)
            found.append([lse - scores.sum(axis=1), lse, each - lse[:, None]])
        return [mx.concatenate(list(each)) for each in zip(*found, strict=True)]

    @property
    def scoring(self) -> Scoring:
        """The options that logits depend on."""
        return Scoring(self.head.softcap, self.smoothing, self.head.weight.shape[0])

    def counted(
        self, dy: mx.array, loss: mx.array, shares: mx.array, dtype: mx.Dtype
    ) -> Callable[[slice, slice], slice | mx.array | None]:
        """Which rows of a block of rows have a gradient by a block of columns: a function of both.

        Not counted are rows without a cotangent, and where all probabilities of the block together
        are below the rounding of those of wrong tokens in a dtype: there all of a row's blocks that
        are left out add up to 2^-5 of it.
        """
        if not self.head.at_once or self.smoothing:
            return lambda rows, _: rows
        import numpy as np  # which the import of this package does not wait for

        least = 2.0**-5 * mx.finfo(dtype).eps / len(self.columns)
        wrong = -np.expm1(-np.array(loss, dtype=np.float64))[:, None]
        above, targets = np.exp(np.array(shares)) >= least * wrong, np.array(self.targets)
        above &= np.array(dy) != 0
        there = np.array(dy)[:, 0] != 0

        def function(rows: slice, columns: slice) -> slice | mx.array | None:
            own = (targets[rows] >= columns.start) & (targets[rows] < columns.stop)
            some = above[rows, self.columns.index(columns)] | (own & there[rows])
            count = -(-int(some.sum()) // STEP) * STEP
            if not count:
                return None
            if count >= len(some):
                return rows
            first = np.sort(np.argsort(~some, kind="stable")[:count])
            return mx.array((first + rows.start).astype(np.uint32))

        return function

    def slopes(
        self, rows: slice | mx.array, columns: slice, lse: mx.array, dtype: mx.Dtype = mx.float32
    ) -> mx.array:
        """The derivatives of rows' losses by some logits without a bias or a cap."""
        head, targets = self.head.part(columns), self.targets[rows] - columns.start
        y = head.times(self.x[rows], True)
        (found,) = head.of_logits(y, targets, lse[rows], scoring=self.scoring, dtype=dtype)
        return found
