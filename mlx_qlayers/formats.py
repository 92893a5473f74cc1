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
}
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
# The divisor of a global scale in mode nvfp4: the largest numbers that E4M3 and E2M1 hold.
GLOBAL_UNIT = 448.0 * 6.0
_MLX: Any = mx  # its type stubs refuse `*self` in the place of group_size, bits and mode


class Format(NamedTuple):
    """How a matrix is quantized, in the order that MLX's operators take it.

    Attributes:
        group_size: consecutive elements of a row that share one scale.
        bits: bits an element.
        mode: ``"affine"`` (float scale and bias a group), ``"mxfp4"`` and ``"mxfp8"`` (E8M0
            scale) or ``"nvfp4"`` (E4M3 scale).
    """

    group_size: int
    bits: int
    mode: str = "affine"

    @classmethod
    def checked(
        cls, group_size: object = None, bits: object = None, mode: object = "affine"
    ) -> Format:
        """A format that MLX has, or a ValueError; ``None`` stands for the mode's default."""
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
        """The format of ``to_quantized(**entry)``, which inherits nothing from other layers."""
        return cls.checked(entry.get("group_size"), entry.get("bits"), entry.get("mode", "affine"))

    def dims(self, w: Any) -> int:
        """Elements of one row of the packed matrix ``w``, an array or its spec."""
        return w.shape[-1] * 32 // self.bits

    # MLX's operators of packed matrices; the package calls them here only.

    @property
    def _where(self) -> dict[str, mx.DeviceType]:
        """MLX's CUDA kernels have no case of 1 bit: they launch nothing and leave results unset."""
        return {"stream": mx.cpu} if self.bits == 1 and mx.cuda.is_available() else {}

    def quantize(self, x: mx.array) -> Any:
        """``mx.quantize``: w, scales and, in mode affine, biases."""
        return _MLX.quantize(x, *self, **self._where)

    def quantized_matmul(self, x: Any, w: Any, *rest: Any) -> mx.array:
        """``mx.quantized_matmul`` of x, w, scales, biases and whether to transpose."""
        return _MLX.quantized_matmul(x, w, *rest, *self, **self._where)

    def gather_qmm(self, x: Any, w: Any, *rest: Any, **options: Any) -> mx.array:
        """``mx.gather_qmm`` of x, w, scales, biases, both indices and whether to transpose."""
        return _MLX.gather_qmm(x, w, *rest, *self, **options, **self._where)

    def dequantize(self, w: Any, *rest: Any, **options: Any) -> mx.array:
        """``mx.dequantize`` of w, scales and biases."""
        if self.mode == "nvfp4" and w.size % 4:  # MLX takes 32 elements at once
            twice = (mx.concatenate([a, a]) for a in (w, rest[0]))
            return self.dequantize(*twice, *rest[1:], **options)[: len(w)]
        return _MLX.dequantize(w, *rest, *self, **options, **self._where)

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


def _one_of(name: str, allowed: tuple[int, ...], value: object, mode: str) -> int:
    if type(value) is int and value in allowed:
        return value
    choices = ", ".join(map(str, allowed))
    raise ValueError(f"{name} must be {choices} in mode {mode!r}, not {value!r}")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
