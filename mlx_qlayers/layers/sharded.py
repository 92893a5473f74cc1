"""Quantized linear layers of which each rank has a part, in place of MLX's own.

A layer is sharded by ``mlx.nn.layers.distributed.shard_linear``, as mlx-lm's ``model.shard`` does.
Constructors, parameters and frozen state are those of the stock layers.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from .qlinear import Counterpart, QEmbedding, QLinear


class QAllToShardedLinear(Counterpart, distributed.QuantizedAllToShardedLinear):
    """A :class:`QLinear` of which each rank has some rows: the result is this rank's part.

    Shape:
        input (..., K), output (..., N / ranks).

    Example:
        >>> QAllToShardedLinear(128, 64, group=mx.distributed.init())(mx.ones((3, 128))).shape
        (3, 64)

    Source: ``mlx.nn.QuantizedAllToShardedLinear``.
    """

    stock = distributed.QuantizedAllToShardedLinear

    def __call__(self, x: mx.array) -> mx.array:
        return self._product(distributed.sum_gradients(self.group)(x))


class QShardedToAllLinear(Counterpart, distributed.QuantizedShardedToAllLinear):
    """A :class:`QLinear` of which each rank has some columns: products are added over the ranks.

    From (..., K / ranks) to (..., N), which all ranks have then; the bias comes after the sum.
    Source: ``mlx.nn.QuantizedShardedToAllLinear``.

    Example:
        >>> QShardedToAllLinear(128, 64, group=mx.distributed.init())(mx.ones((3, 128))).shape
        (3, 64)
    """

    stock = distributed.QuantizedShardedToAllLinear

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self._product(x, with_bias=False), group=self.group)
        return y + self["bias"] if "bias" in self else y


# The layers whose products can share launches, and all by the class that they stand in for.
LINEARS = (QLinear, QAllToShardedLinear, QShardedToAllLinear)
COUNTERPARTS: dict[type[nn.Module], type[Counterpart]] = {
    cls.stock: cls for cls in (*LINEARS, QEmbedding)
}
