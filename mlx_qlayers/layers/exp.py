"""The exponential as a layer: the layer to learn from."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..ops.exp import exp


class Exp(nn.Module):
    """``exp(x)``, element by element. A layer holds parameters, here none, and calls one operation.

    Shape:
        input and output (...), float32, float16 or bfloat16.

    Example:
        >>> Exp()(mx.zeros((2, 3))).shape
        (2, 3)

    Source: :func:`mlx_qlayers.ops.exp.exp`, where errors are described.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return exp(x)
