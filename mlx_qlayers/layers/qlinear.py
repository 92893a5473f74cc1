"""Quantized linear and embedding layers whose products go through this package's operation."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..dispatch import dispatch
from ..formats import Format
from ..ops.embedding import quantized_rows
from ..ops.quantized_matmul import QUANTIZED_MATMUL


class Counterpart(nn.Module):
    """Base class of layers that differ from their stock class only in how they compute.

    Such a layer has the attributes of its stock class and no others, so that one becomes the
    other by changing its class: every reference to it, every array and what is frozen stay.
    """

    stock: type[nn.Module]

    @classmethod
    def from_quantized(cls, layer: nn.Module) -> nn.Module:
        """A layer of this class that shares the arrays of ``layer`` and its frozen state.

        Args:
            layer: of the stock class, such as ``nn.QuantizedLinear`` for a ``QLinear``.

        Raises:
            ValueError: ``layer`` is not of this layer's stock class.
        """
        if type(layer) is not cls.stock:
            raise ValueError(f"layer must be a {cls.stock.__name__}, not a {type(layer).__name__}")
        twin = cls.__new__(cls)
        dict.update(twin, layer)  # Module.update takes parameters
        twin.__dict__.update(layer.__dict__)
        twin._no_grad = set(layer._no_grad)
        return twin

    def _product(self, x: mx.array, with_bias: bool = True) -> mx.array:
        """``x @ dequantize(weight).T + bias``: (..., K) to (..., N)."""
        # The operation itself: a decoded token makes a hundred of these calls.
        bias = self.get("bias") if with_bias else None
        arrays = x, self["weight"], self["scales"], self.get("biases"), bias, None
        return dispatch(QUANTIZED_MATMUL, arrays, (True, self.group_size, self.bits, self.mode))


class QLinear(Counterpart, nn.QuantizedLinear):
    """``y = x @ dequantize(weight).T + bias``, in place of ``nn.QuantizedLinear``.

    Constructor, parameters and frozen state are those of ``nn.QuantizedLinear``.

    Args:
        input_dims: size of the last axis of the input, K.
        output_dims: size of the last axis of the output, N.
        bias: whether to add a bias.
        group_size: elements of a row that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.

    Raises:
        ValueError: the format does not exist, or ``input_dims`` is no multiple of the group size.

    Shape:
        input (..., K), output (..., N).

    Example:
        >>> layer = QLinear(256, 128, group_size=64, bits=4)
        >>> layer(mx.ones((3, 256))).shape
        (3, 128)

    Source: ``mlx.nn.QuantizedLinear``.
    """

    stock = nn.QuantizedLinear

    __call__ = Counterpart._product

    def to_quantized(
        self, group_size: int | None = None, bits: int | None = None, mode: str | None = None
    ) -> nn.QuantizedLinear:
        """The stock layer: in this layer's own format, or in one that is asked for.

        ``nn.quantize`` and mlx-lm's ``quantize_model`` call it, which then write that format into
        a configuration.

        Args:
            group_size: elements of a row that share a scale.
            bits: bits an element.
            mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``. Without any argument the
                format is the layer's own; with some, None stands for affine and the mode's
                defaults, as in ``nn.Linear.to_quantized``.

        Returns:
            A layer that shares the arrays of this one if it has that format already, else one
            whose weight was dequantized and quantized anew. Its frozen state is that of this one.

        Raises:
            ValueError: there is no such format, or the group size does not divide the width.

        Example:
            >>> QLinear(256, 128).to_quantized(bits=8).bits
            8
        """
        own = Format(self.group_size, self.bits, self.mode)
        asked = (group_size, bits, mode) != (None, None, None)
        fmt = Format.checked(group_size, bits, mode or "affine") if asked else own
        if fmt == own:
            layer = nn.QuantizedLinear.__new__(nn.QuantizedLinear)
            dict.update(layer, self)  # Module.update takes parameters
            layer.__dict__.update(self.__dict__)
        else:
            dense = nn.Linear(1, 1, bias=False)
            dense.weight = own.dequantize(self["weight"], self["scales"], self.get("biases"))
            if (width := dense.weight.shape[-1]) % fmt.group_size:
                raise ValueError(f"group_size must divide the width {width}, not {fmt.group_size}")
            if "bias" in self:
                dense.bias = self["bias"]
            layer = nn.QuantizedLinear.from_linear(dense, *fmt)
            layer.train(self.training)
        layer._no_grad = (layer._no_grad | self._no_grad) - (self.keys() - self._no_grad)
        return layer


class QEmbedding(Counterpart, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding`` in one launch; its tied output, ``as_linear``, goes as ``QLinear``.

    Constructor, parameters and frozen state are those of the stock layer.

    Shape:
        as an embedding: indices (...), output (..., K); ``as_linear``: input (..., K), output
        (..., N) for N embeddings.

    Example:
        >>> layer = QEmbedding(128, 256)
        >>> layer(mx.array([3, 5])).shape, layer.as_linear(mx.ones((2, 256))).shape
        ((2, 256), (2, 128))

    Source: ``mlx.nn.QuantizedEmbedding``.
    """

    stock = nn.QuantizedEmbedding

    def __call__(self, x: mx.array) -> mx.array:
        arrays = x, self["weight"], self["scales"], self.get("biases")
        return quantized_rows(*arrays, group_size=self.group_size, bits=self.bits, mode=self.mode)

    as_linear = Counterpart._product
