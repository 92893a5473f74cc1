"""The quantized formats of MLX: which group sizes and bits each mode allows.

The order of modes is that of their numbers in MLX and in ``packed.metal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx

MODES = {
    "affine": ((32, 64, 128), (1, 2, 3, 4, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
    "mxfp6": ((32,), (6,)),
}
DEFAULTS = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "mxfp8": (32, 8),
    "nvfp4": (16, 4),
    "mxfp6": (32, 6),
}
# What mode nvfp4 divides a global scale by: the largest numbers that E4M3 and E2M1 hold.
GLOBAL_UNIT = 448.0 * 6.0
# The numbers of E2M3, from 0 on: two bits of exponent, three of mantissa. E4M3 holds each of them.
_E2M3 = [m / 8 if m < 8 else (1 + m % 8 / 8) * 2.0 ** (m // 8 - 1) for m in range(32)]
_MLX: Any = mx  # whose types take no format as arguments in turn


class Format(NamedTuple):
    """How a matrix is quantized, in the order that MLX's operators take it.

    Attributes:
        group_size: consecutive elements of a row that share one scale.
        bits: bits an element.
        mode: ``"affine"`` (float scale and bias a group), ``"mxfp4"`` and ``"mxfp8"`` (E8M0
            scale), ``"nvfp4"`` (E4M3 scale) or ``"mxfp6"`` (E2M3, with an E8M0 scale).
    """

    group_size: int
    bits: int
    mode: str = "affine"

    @classmethod
    def checked(
        cls, group_size: object = None, bits: object = None, mode: object = "affine"
    ) -> Format:
        """A format that MLX has; ``None`` stands for the mode's default.

        Raises:
            ValueError: naming the argument and its value.
        """
        if not isinstance(mode, str) or mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        sizes, widths = MODES[mode]
        size, width = DEFAULTS[mode]
        return cls(
            _one_of("group_size", sizes, size if group_size is None else group_size, mode),
            _one_of("bits", widths, width if bits is None else bits, mode),
            mode,
        )

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Format:
        """The format that ``to_quantized(**entry)`` makes; it inherits nothing from other layers.

        Raises:
            ValueError: naming the argument and its value.
        """
        return cls.checked(entry.get("group_size"), entry.get("bits"), entry.get("mode", "affine"))

    def dims(self, w: Any) -> int:
        """Elements of one row of the packed matrix ``w``, an array or its spec."""
        return w.shape[-1] * 32 // self.bits

    # MLX's operators of packed matrices: all that asks for one asks here.

    def quantize(self, x: mx.array) -> Any:
        """``mx.quantize``: w, scales and, in mode affine, biases."""
        if self.mode != "mxfp6":
            return _MLX.quantize(x, *self)
        groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, self.group_size)
        exponents = mx.floor(mx.log2(mx.maximum(abs(groups).max(-1, keepdims=True), 2.0**-120))) - 2
        sizes, numbers = abs(groups) * 2.0**-exponents, mx.array(_E2M3)
        codes = (sizes[..., None] > (numbers[1:] + numbers[:-1]) / 2).sum(-1) + 32 * (groups < 0)
        return _regrouped(codes.reshape(x.shape), 6, 32), (exponents[..., 0] + 127).astype(mx.uint8)

    def _in_mlx(self, w: Any) -> tuple[Any, Format]:
        """The same matrix in a format that MLX has."""
        if self.mode != "mxfp6":
            return w, self
        bytes_of = mx.to_fp8(mx.array([*_E2M3, *(-number for number in _E2M3)]))
        return _regrouped(bytes_of[_regrouped(w, 32, 6)], 8, 32), Format(32, 8, "mxfp8")

    def quantized_matmul(self, x: Any, w: Any, *rest: Any) -> mx.array:
        """``mx.quantized_matmul`` of x, w, scales, biases and whether to transpose."""
        w, fmt = self._in_mlx(w)
        return _MLX.quantized_matmul(x, w, *rest, *fmt)

    def gather_qmm(self, x: Any, w: Any, *rest: Any, **options: Any) -> mx.array:
        """``mx.gather_qmm`` of x, w, scales, biases, both indices and whether to transpose."""
        w, fmt = self._in_mlx(w)
        return _MLX.gather_qmm(x, w, *rest, *fmt, **options)

    def dequantize(self, w: Any, *rest: Any, **options: Any) -> mx.array:
        """``mx.dequantize`` of w, scales and biases."""
        w, fmt = self._in_mlx(w)
        return _MLX.dequantize(w, *rest, *fmt, **options)

    def mismatch(self, w: Any, scales: Any, biases: Any) -> str | None:
        """Describe why arrays do not hold this format; None if they do."""
        if w.dtype != mx.uint32:
            return f"w must be uint32, not {_name(w.dtype)}"
        if w.ndim < 2 or scales.ndim != w.ndim:
            return f"scales of shape {scales.shape} do not go with w of shape {w.shape}"
        packed, remainder = divmod(scales.shape[-1] * self.group_size * self.bits, 32)
        if scales.shape[:-1] != w.shape[:-1] or remainder:
            return f"scales of shape {scales.shape} do not go with w of shape {w.shape}"
        if packed != w.shape[-1]:
            return (
                f"w of shape {w.shape} and scales of shape {scales.shape} do not hold "
                f"group_size={self.group_size}, bits={self.bits}: "
                f"that needs {packed} words a row"
            )
        if self.mode == "affine":
            if biases is None:
                return "biases is missing: affine needs one a group"
            if biases.shape != scales.shape:
                return (
                    f"biases of shape {biases.shape} must have the shape of scales {scales.shape}"
                )
            for name, array in (("scales", scales), ("biases", biases)):
                if not mx.issubdtype(array.dtype, mx.floating):
                    kind = _name(array.dtype)
                    return f"{name} must be floating point in mode 'affine', not {kind}"
        else:
            if biases is not None:
                return f"biases must be None in mode {self.mode!r}"
            if scales.dtype != mx.uint8:
                return f"scales must be uint8 in mode {self.mode!r}, not {_name(scales.dtype)}"
        return None

    def mismatch_of_global(self, global_scale: Any, matrices: int) -> str | None:
        """Describe why global scales do not fit so many matrices; None if they do."""
        if self.mode != "nvfp4":
            return f"global_scale must be None in mode {self.mode!r}"
        if global_scale.size != matrices or not mx.issubdtype(global_scale.dtype, mx.floating):
            return (
                f"global_scale must hold a floating-point number for each matrix, {matrices} in "
                f"all, not {_name(global_scale.dtype)} in shape {global_scale.shape}"
            )
        return None


def _regrouped(numbers: mx.array, bits: int, into: int) -> mx.array:
    """A stream of numbers of so many bits, the first in the lowest ones, as numbers of others."""
    places = mx.arange(32, dtype=mx.uint32)
    stream = (numbers.astype(mx.uint32)[..., None] >> places[:bits]) & 1
    return (stream.reshape(*numbers.shape[:-1], -1, into) << places[:into]).sum(-1)


def _one_of(name: str, allowed: tuple[int, ...], value: object, mode: str) -> int:
    if type(value) is int and value in allowed:
        return value
    choices = ", ".join(map(str, allowed))
    raise ValueError(f"{name} must be {choices} in mode {mode!r}, not {value!r}")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
