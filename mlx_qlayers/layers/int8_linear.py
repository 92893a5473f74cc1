"""A quantized linear layer that multiplies prompts in 8-bit integers."""

from __future__ import annotations

import re

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..measurements.thresholds import threshold
from ..ops.int8_matmul import int8_matmul
from ..reference.int8_matmul import MOST, block_of, rotated
from ..runtime.devices import device_of
from .qlinear import QLinear

# The head multiplies a row of a prompt, and the loss of its digits would not be made up for.
_IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\.")


class Int8Linear(QLinear):
    """A :class:`QLinear` that holds its matrix in int8 too, and multiplies prompts with that.

    Prompts are inputs of more than 128 rows in half precision, outside training. The copy has a
    scale for each row of the matrix, takes a byte a weight, and is no parameter: it is not saved.
    Its columns, and those of rows, are mixed in blocks, which spreads what is large in few of them.

    Example:
        >>> layer = QLinear(256, 128)
        >>> layer = Int8Linear.joining(layer.eval())
        >>> layer(mx.ones((129, 256), mx.bfloat16)).shape
        (129, 128)

    Source: rows rounded one by one as in LLM.int8() (Dettmers et al. 2022); columns mixed as in
    QuaRot (Ashkboos et al. 2024), block by block.
    """

    @classmethod
    def joining(cls, layer: QLinear) -> Int8Linear:
        """Make a layer one of this class, in place."""
        packed = layer["weight"], layer["scales"], layer.get("biases")
        fmt = Format(layer.group_size, layer.bits, layer.mode)
        dense = fmt.dequantize(*packed).astype(mx.float32)
        block = block_of(dense.shape[1])
        dense = rotated(dense, block) * (64 / block if block else 1)
        scales = mx.abs(dense).max(axis=1) / MOST
        codes = mx.round(dense / mx.maximum(scales, 1e-30)[:, None]).astype(mx.int8)
        mx.eval(codes, scales)
        # A name that begins so is no parameter of an nn.Module.
        layer._int8, layer._int8_scales = codes, scales
        layer.__class__ = cls
        assert isinstance(layer, Int8Linear)
        return layer

    def leave(self) -> None:
        """Be a :class:`QLinear` again, without the copy."""
        layer: QLinear = self
        layer.__class__ = QLinear
        for name in ("_int8", "_int8_scales"):
            dict.pop(self, name, None)

    def __call__(self, x: mx.array, with_bias: bool = True) -> mx.array:
        """(..., K) to (..., N)."""
        if not self._rounds(x):
            return self._product(x, with_bias)
        given = x, self["_int8"], self["_int8_scales"], self.get("bias") if with_bias else None
        return int8_matmul(*given, block=block_of(x.shape[-1]))

    def _rounds(self, x: mx.array) -> bool:
        """Whether rows are multiplied in 8-bit integers: many, whose result is in their dtype."""
        bias = self.get("bias")
        of_scales = self["scales"].dtype in (x.dtype, mx.uint8)
        in_dtype = of_scales and (bias is None or bias.dtype == x.dtype)
        if self.training or x.dtype == mx.float32 or not in_dtype:
            return False
        # The same for all devices, as results are others with it.
        least: int = threshold("int8_min_rows", device="cuda")
        return x.size >= least * x.shape[-1]


def join_int8(model: nn.Module) -> None:
    """Make the linear layers of decoder layers :class:`Int8Linear`.

    On a CPU, whose kernels multiply codes as they are packed, calls of the model say that they may.
    """
    if device_of().integer_rows:
        model._integers = True
        return
    for path, module in model.named_modules():
        if _IN_LAYERS.search(path) and type(module) is QLinear:
            Int8Linear.joining(module)


def leave_int8(model: nn.Module) -> None:
    """Undo :func:`join_int8`."""
    vars(model).pop("_integers", None)
    for module in model.modules():
        if isinstance(module, Int8Linear):
            module.leave()
