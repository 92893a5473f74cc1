"""Quantized linear and embedding layers whose products go through this package's operation."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..ops.quantized_matmul import quantized_matmul


class Counterpart(nn.Module):
    """What a layer that only computes differently shares with its stock class.

    Such a layer has the attributes of its stock class and no others, so that one becomes the
    other by changing its class: every reference to it, every array and what is frozen stay.
    """

    stock: type[nn.Module]

    @classmethod
    def from_quantized(cls, layer: nn.Module) -> nn.Module:
        """A layer of this class that shares the arrays of ``layer`` and its frozen state.

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

    def _product(self, x: mx.array) -> mx.array:
        return quantized_matmul(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            bias=self.get("bias"),
        )


class QLinear(Counterpart, nn.QuantizedLinear):
    """``y = x @ dequantize(weight).T + bias``, in place of ``nn.QuantizedLinear``.

    Constructor, parameters and frozen state are those of ``nn.QuantizedLinear``.

    Args:
        input_dims: size of the last axis of the input, K.
        output_dims: size of the last axis of the output, N.
        bias: whether to add a bias.
        group_size: elements of a row that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.

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

    def __call__(self, x: mx.array) -> mx.array:
        return self._product(x)


class QEmbedding(Counterpart, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding`` whose tied output, ``as_linear``, goes as a ``QLinear`` does."""

    stock = nn.QuantizedEmbedding

    def as_linear(self, x: mx.array) -> mx.array:
        """``x @ dequantize(weight).T``: (..., dims) to (..., num_embeddings)."""
        return self._product(x)


COUNTERPARTS: dict[type[nn.Module], type[Counterpart]] = {
    cls.stock: cls for cls in (QLinear, QEmbedding)
}
