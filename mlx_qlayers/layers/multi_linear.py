"""The quantized projection with a matrix for each head.

Imports mlx-lm, which takes a while: this file is imported when it is needed.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.mla import QuantizedMultiLinear

from ..formats import Format
from ..reference.quantized_matmul import quantized_matmul
from .qlinear import Counterpart


class QMultiLinear(Counterpart, QuantizedMultiLinear):
    """``y = x @ dequantize(weight).T`` for each head, in place of mlx-lm's QuantizedMultiLinear.

    On NVIDIA GPUs MLX multiplies all heads of a batch by the first matrix; this layer does not.
    Constructor, parameters and frozen state are those of the stock layer.

    Raises:
        ValueError: the format does not exist, or an input does not fit.

    Shape:
        input (B, H, M, K), output (B, H, M, N); with ``transpose=False`` the other way around.

    Example:
        >>> layer = QMultiLinear(64, 128, 4, group_size=64, bits=4, mode="affine")
        >>> layer(mx.ones((3, 4, 1, 64))).shape
        (3, 4, 1, 128)

    Source: ``mlx_lm.models.mla.QuantizedMultiLinear``.
    """

    stock = QuantizedMultiLinear

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        packed = self["weight"], self["scales"], self.get("biases")
        fmt = Format(self.group_size, self.bits, self.mode)
        return quantized_matmul(x, *packed, transpose, fmt)
