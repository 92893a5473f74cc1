"""The experts' quantized projection of a mixture of experts, through this package's operation.

Imports mlx-lm, which takes a while: this file is imported when it is needed.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..ops.gather_qmm import gather_qmm, leaves_to_stock
from ..runtime.backend import current, epoch
from .qlinear import Counterpart


class QSwitchLinear(Counterpart, QuantizedSwitchLinear):
    """``y = x @ dequantize(weight[indices]).T + bias[indices]``, mlx-lm's QuantizedSwitchLinear.

    Constructor, parameters and frozen state are those of the stock layer.

    Raises:
        ValueError: the format does not exist, or an input does not fit; the message names it.

    Shape:
        input (..., M, K), indices (...), output (..., M, N): leading dimensions of 1 are broadcast
        against those of the indices.

    Example:
        >>> layer = QSwitchLinear(256, 128, num_experts=8)
        >>> layer(mx.ones((3, 1, 1, 256)), mx.array([[0, 5], [2, 7], [5, 6]])).shape
        (3, 2, 1, 128)

    Source: ``mlx_lm.models.switch_layers.QuantizedSwitchLinear``.
    """

    stock = QuantizedSwitchLinear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if leaves_to_stock(current.get(), epoch.number, indices.size, self.bits, sorted_indices):
            return super().__call__(x, indices, sorted_indices)
        y = gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=indices,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.get("global_scale"),
            sorted_indices=sorted_indices,
        )
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices], -2)
        return y
