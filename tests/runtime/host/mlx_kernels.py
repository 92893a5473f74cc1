"""MLX's own Metal kernels, from the headers in its wheel, launched as MLX launches them."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers.runtime.host import Counters, HostKernel, KernelFault, compile_source
from tests.numerics import EPSILON

_FOLDER = "mlx/backend/metal/kernels/"

HEADERS = {
    "affine": ("utils", "steel/gemm/gemm", "quantized_utils", "quantized"),
    "fp": ("utils", "steel/gemm/gemm", "quantized_utils", "fp_quantized"),
    "sdpa": ("utils", "sdpa_vector"),
    "attention": ("utils", "steel/attn/kernels/steel_attention"),
    "attention_nax": ("utils", "steel/attn/kernels/steel_attention_nax"),
    "affine_nax": ("utils", "steel/gemm/gemm", "steel/gemm/nax", "quantized_nax"),
    "fp_nax": ("utils", "steel/gemm/gemm", "quantized_utils", "steel/gemm/nax", "fp_quantized_nax"),
    "gemm": ("utils", "steel/gemm/gemm", "steel/gemm/kernels/steel_gemm_fused"),
    "softmax": ("utils", "softmax"),
    "sort": ("utils", "sort"),
    "scan": ("utils", "binary_ops", "scan"),
}


METAL_NAMES = {mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.float32: "float"}


def source(family: str) -> str:
    """The Metal source that includes MLX's headers of one family."""
    return "".join(f'#include "{_FOLDER}{name}.h"\n' for name in HEADERS[family])


def load(
    family: str, function: str, *, checked: bool, constants: Mapping[int, object] | None = None
) -> HostKernel:
    """One instantiation of one of MLX's kernels."""
    # Kernels for the M5 exist where Metal 4 does.
    language = 400 if family.endswith("nax") else 320
    return compile_source(
        source(family), function, checked=checked, constants=constants, language=language
    )


def i32(*values: int) -> Any:
    """An int, or ints, as a kernel's ``constant int`` argument."""
    return (ctypes.c_int * len(values))(*values)


def i64(*values: int) -> Any:
    """64-bit integers as a kernel's argument."""
    return (ctypes.c_int64 * len(values))(*values)


def run(
    kernel: HostKernel,
    arguments: Mapping[str, Any],
    outputs: Mapping[str, np.ndarray],
    threadgroups: Sequence[int],
    threads: tuple[int, int, int],
    tolerate: Sequence[type[KernelFault]] = (),
    tensor_layout: str = "m5",
) -> Counters | None:
    """Run on arguments by name; ``outputs`` are filled with NaN or ones first, then written."""
    for array in outputs.values():
        array.view(np.uint8).fill(0xFF)
    given = {**arguments, **outputs}
    buffers = {i: given[p.name] for i, p in kernel.signature.buffers.items() if p.name in given}
    written = [i for i, p in kernel.signature.buffers.items() if p.name in outputs]
    x, y, z = (g * t for g, t in zip(threadgroups, threads, strict=True))
    return kernel.run(
        *(buffers, (x, y, z), threads),
        writes=written,
        fresh=written,
        tolerate=tolerate,
        tensor_layout=tensor_layout,
    )


def empty(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray:
    """Memory for an output; bfloat16 as uint16, since NumPy has none."""
    kinds = {mx.float16: np.float16, mx.bfloat16: np.uint16, mx.float32: np.float32}
    return np.empty(tuple(shape), kinds.get(dtype, np.uint32))


def float64(array: Any, dtype: mx.Dtype) -> np.ndarray:
    """The exact values of an ``mx.array`` or of an output's memory."""
    if isinstance(array, mx.array):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    if dtype == mx.bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def error(found: np.ndarray, truth: np.ndarray, dtype: mx.Dtype) -> float:
    """How many times the error of rounding the truth to the dtype ``found`` is off, at most.

    The scale is the largest value, since sums that cancel have the error of their terms.
    """
    return float(np.abs(found - truth).max() / (np.abs(truth).max() * EPSILON[dtype] / 2))


# Arguments of the quantized kernels for batches, when there are none.
UNBATCHED = {"x_batch_ndims": i32(0), "w_batch_ndims": i32(0)} | {
    name: i64(0)
    for name in ("x_shape", "x_strides", "w_shape", "w_strides", "s_strides", "b_strides")
}


def affine_product(
    kernel: str,
    x: mx.array,
    packed: Sequence[mx.array],
    n: int,
    fmt: tuple[int, int],
    flags: str,
    threadgroups: Sequence[int],
    threads: tuple[int, int, int],
    *,
    checked: bool = True,
    tensor_layout: str = "m5",
) -> tuple[np.ndarray, Counters | None]:
    """The product of x and a packed matrix, which gives n columns, by one of MLX's kernels.

    ``fmt`` is a group's size and bits. It returns what the kernel did, too.
    """
    (m, k), nax = x.shape, kernel.endswith("_nax")
    sizes = {"in_vec_size": k, "out_vec_size": n, "K": k, "N": n, "M": m}
    given = {"x": x, **dict(zip(("w", "scales", "biases"), packed, strict=True)), **UNBATCHED}
    given |= {name: i32(value) for name, value in sizes.items()}
    name = f"affine_{kernel}<{METAL_NAMES[x.dtype]}, {fmt[0]}, {fmt[1]}, {flags}>"
    constants = {200: False, 201: False, 202: False} if nax else None
    loaded = load("affine_nax" if nax else "affine", name, checked=checked, constants=constants)
    y = empty((m, n), x.dtype)
    did = run(loaded, given, {"y": y}, threadgroups, threads, tensor_layout=tensor_layout)
    return y, did


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tiles: tuple[int, int],
    *,
    causal: bool = False,
    nax: bool = False,
) -> tuple[np.ndarray, Counters | None]:
    """Attention by MLX's kernel for many queries, in tiles of queries and keys; what it did, too.

    The one for the M5 splits a head of 256 over two SIMD groups.
    """
    (_, h, length, d), (_, hk, keys, _), (bq, bk) = q.shape, k.shape, tiles
    constants = {200: length % bq == 0, 201: keys % bk == 0, 300: False, 301: causal}
    constants |= {302: False, 303: False}
    t, split, family = METAL_NAMES[q.dtype], nax and d == 256, "attention_nax" * nax or "attention"
    widths = f"{d}, 4, 2" if split else f"{d}, {d}, 4, 1"
    name = f"{family}{'_dsplit' * split}<{t}, {bq}, {bk}, {widths}, {t}, float>"
    loaded = load(family, name, checked=True, constants=constants)
    nq, nk = -(-length // bq), -(-keys // bk)
    strides = [(a * b * d, b * d, d) for a, b in ((h, length), (hk, keys), (hk, keys), (h, length))]
    params = struct.pack(
        "6if7i12q",
        *(1, h, d, length, keys, h // hk, d**-0.5),
        *(nq, nk, length // bq, keys // bk, length % bq, keys % bk, keys - length),
        *(s for row in strides for s in row),
    )
    out, given = empty(q.shape, q.dtype), {"Q": q, "K": k, "V": v, "params": params}
    return out, run(loaded, given, {"O": out}, (nq, h, 1), (32, 4, 2 if split else 1))


def fp_product(
    m: int, n: int, k: int, mode: str, group: int, bits: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of a kernel for x (m, k) and a matrix (n, k) in half precision, and the product."""
    mx.random.seed(bits + group)
    wq, scales = mx.quantize(mx.random.normal((n, k)), group, bits, mode=mode)
    x = mx.random.normal((m, k)).astype(mx.float16)
    weights = mx.dequantize(wq, scales, None, group, bits, mode, dtype=mx.float32)
    truth = float64(x, mx.float16) @ float64(weights, mx.float32).T
    return {"w": wq, "scales": scales, "x": x, "global_scale": mx.ones(1), **UNBATCHED}, truth
