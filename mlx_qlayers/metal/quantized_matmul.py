"""Launches the kernels that multiply with a quantized matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from ..formats import Format
from ..runtime.kernel import Kernel

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
# Rows for which the kernel is compiled; a product takes the next larger.
ROWS = (1, 2, 4, 8, 16)

_FEW = Kernel(
    "quantized_matmul_few",
    "quantized_matmul.metal",
    inputs=("x", "w", "scales", "biases", "bias", "shape"),
    outputs=("y",),
    template=(
        "T",
        "S",
        "mode",
        "group",
        "bits",
        "rows",
        "outputs",
        "run",
        "lanes",
        "ways",
        "biased",
    ),
    large=True,
)


@dataclass(frozen=True)
class FewRows:
    """How a product of few rows is spread over threads.

    Attributes:
        outputs: columns of the result that a SIMD group (or a thread) computes.
        run: neighbouring elements of K that a thread takes at once; they share a scale.
        lanes: threads that share the columns: 32, or 1 where threads are not run side by side.
        ways: float32 sums a thread keeps for each output.
        threads: of a threadgroup.
    """

    outputs: int
    run: int
    lanes: int
    ways: int
    threads: int


@cache
def few_rows(device: str, rows: int, fmt: Format) -> FewRows:
    if device == "host":
        return FewRows(outputs=4, run=fmt.group_size, lanes=1, ways=16, threads=8)
    pack = 32 if fmt.bits % 2 else 16
    return FewRows(outputs=4 if rows <= 4 else 2, run=pack, lanes=32, ways=1, threads=64)


@cache
def _shape(m: int, n: int, k: int) -> mx.array:
    return mx.array([m, n, k], mx.int32)


def product_of_few_rows(x, w, scales, biases, bias, fmt, config):
    (m, k), n = x.shape, w.shape[0]
    tiles = -(-n // config.outputs)
    threads = -(-tiles * config.lanes // config.threads) * config.threads
    (y,) = _FEW(
        [x, w, scales, scales if biases is None else biases, x if bias is None else bias, _shape(m, n, k)],
        template={
            "T": x.dtype,
            "S": scales.dtype,
            "mode": MODES.index(fmt.mode),
            "group": fmt.group_size,
            "bits": fmt.bits,
            "rows": next(r for r in ROWS if r >= m),
            "outputs": config.outputs,
            "run": config.run,
            "lanes": config.lanes,
            "ways": config.ways,
            "biased": bias is not None,
        },
        grid=(threads, 1, 1),
        threadgroup=(config.threads, 1, 1),
        output_shapes=[(m, n)],
    )
    return y
