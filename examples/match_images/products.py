"""What both models are made of, fast on CPUs by the kernels of ``products.metal``.

MLX's wheel for Linux computes products with the reference BLAS, at a twentieth of what a core can
do. The host backend runs Metal kernels there instead; everywhere else MLX's own operators do.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_qlayers import attention as fused_attention
from mlx_qlayers import backend
from mlx_qlayers.runtime.kernel import Kernel

_PRODUCT = Kernel(
    "match_images_product",
    Path("products.metal"),
    inputs=("x", "weight", "bias", "sizes"),
    outputs=("y",),
    template=("P", "V"),
    function="product",
    large=True,
)
_SELU, _NORMALIZED = (
    Kernel(
        f"match_images_{name}",
        Path("products.metal"),
        inputs=("x", size),
        outputs=("y",),
        template=template,
        function=name,
    )
    for name, size, template in (
        ("selu", "size", ("COUNT",)),
        ("normalized", "rows", ("COUNT", "C")),
    )
)
_ALPHA, _LAMBDA = 1.6732632423543772, 1.0507009873554805
# Pixels and channels that a thread computes, in sixteen registers of AVX-512.
PIXELS, STRIP = 8, 32


def product(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """Convolve without padding.

    Args:
        x: (B, H, W, C) of float32.
        weight: (1, kh, kw, C, O), or (B, kh, kw, C, O) with a weight for each image.
        bias: (O,), or None.

    Returns:
        (B, H - kh + 1, W - kw + 1, O).
    """
    (images, height, width, channels), (each, kh, kw, _, outputs) = x.shape, weight.shape
    height, width, strip = height - kh + 1, width - kw + 1, math.gcd(outputs, STRIP)
    sizes = height, width, channels, outputs, kh, kw, int(each > 1)
    bias = mx.zeros(outputs) if bias is None else bias
    (y,) = _PRODUCT(
        [x, weight, bias, mx.array(sizes)],
        template={"P": PIXELS, "V": strip},
        grid=(-(-width // PIXELS) * (outputs // strip), images * height, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(images, height, width, outputs)],
    )
    return y


class Linear(nn.Linear):
    """``nn.Linear``, faster on CPUs."""

    def __call__(self, x: mx.array) -> mx.array:
        if backend() != "host":
            return super().__call__(x)
        weight = _turned(self, lambda w: w.T[None, None, None])
        y = product(x.reshape(1, 1, -1, x.shape[-1]), weight, self.get("bias"))
        return y.reshape(*x.shape[:-1], -1)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` without strides, faster on CPUs."""

    def __call__(self, x: mx.array) -> mx.array:
        if backend() != "host":
            return super().__call__(x)
        weight = _turned(self, lambda w: w.transpose(1, 2, 3, 0)[None])
        y_x = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        x = mx.pad(x, [(0, 0), *((n, n) for n in y_x), (0, 0)])
        if x.shape[1:3] == weight.shape[1:3]:  # one pixel each: rows of a matrix
            x, weight = x.reshape(1, 1, len(x), -1), weight.reshape(1, 1, 1, -1, weight.shape[-1])
            return product(x, weight, self.get("bias")).reshape(x.shape[2], 1, 1, -1)
        return product(x, weight, self.get("bias"))


def matmul(a: mx.array, b: mx.array) -> mx.array:
    """(B, M, K) times (B, K, N)."""
    return a @ b if backend() != "host" else product(a[:, None], b[:, None, None])[:, 0]


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Attention of one image's heads, (1, heads, N, D) each."""
    if backend() != "host":
        return fused_attention(q, k, v, scale=scale)
    scores = matmul(scale * q[0], k[0].swapaxes(1, 2))
    return matmul(mx.softmax(scores, axis=-1), v[0])[None]


def selu(x: mx.array) -> mx.array:
    """SELU with all digits of its constants."""
    if backend() == "host":
        return _rows(_SELU, x, x.size, COUNT=4096)
    return mx.where(x > 0, _LAMBDA * x, _LAMBDA * _ALPHA * (mx.exp(mx.minimum(x, 0)) - 1))


def normalized(x: mx.array) -> mx.array:
    """The last axis at length one."""
    if backend() == "host":
        return _rows(_NORMALIZED, x, x.size // x.shape[-1], COUNT=64, C=x.shape[-1])
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _rows(kernel: Kernel, x: mx.array, rows: int, **template: int) -> mx.array:
    (y,) = kernel(
        [x, mx.array(rows)],
        template=template,
        grid=(-(-rows // template["COUNT"]), 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[x.shape],
    )
    return y


def compiled(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """The function, which reads the parameters of a module, as one graph where launches cost most.

    A CPU would compile it with the system's compiler, if there is one.
    """
    if mx.default_device().type != mx.gpu:
        return function
    graph: Callable[..., Any] = mx.compile(function, inputs=module)
    return graph


def keep_memory() -> None:
    """Let this process keep what it frees, where MLX allocates with glibc, as on CPUs.

    Large arrays go back to the system otherwise, and half of the time is spent on getting new ones.
    """
    if backend() == "host" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
            libc.mallopt(option, 2**30)


def _turned(layer: nn.Module, turn: Callable[[mx.array], mx.array]) -> mx.array:
    """The weight in the kernel's layout, kept as long as it is the same."""
    kept = layer.get("_kept")
    if kept is None or kept[0] is not layer.weight:
        layer._kept = kept = layer.weight, mx.contiguous(turn(layer.weight))
    return kept[1]
