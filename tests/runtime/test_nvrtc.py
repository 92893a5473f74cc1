"""Kernels that no operation takes on CUDA compile for an H200; tensors stay in registers."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention import hopper
from mlx_qlayers.metal.attention.backward import attention_backward
from mlx_qlayers.metal.attention.forward import Launcher
from mlx_qlayers.metal.attention.tensor import attention_tensor
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import tensor_config
from mlx_qlayers.options import AttentionCall, PackedMatrix, Scores
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.spec import Spec
from tests.launchers import in_registers, qmm_tensor
from tests.machine import has_gpu, measured_from_one
from tests.packed import random_packed

from .nvrtc import compile_only, compile_text


def ptx_of(text):
    (name,) = re.findall(r"void (custom_kernel_\w+)", text)
    return compile_text(f"mlx::core::cu::{name}", text, ptx=True).decode()


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("fmt", "dtype", "transpose", "gate", "k"),
    [
        (Format(64, 4), mx.bfloat16, True, "silu", 128),
        (Format(16, 4, "nvfp4"), mx.float16, False, None, 80),
        (Format(32, 8, "mxfp8"), mx.bfloat16, True, None, 96),
    ],
)
def test_products_by_tensor_operations(fmt, dtype, transpose, gate, k):
    n, rng = 64, np.random.default_rng(0)
    packed = random_packed(rng, *((n, k) if transpose else (k, n)), fmt, dtype)
    config = in_registers(tensor_config(70, k, dtype, fmt, transpose, gate is not None), k)
    other = PackedMatrix(*packed) if gate else None
    with compile_only() as seen, use_backend("cuda"):
        x = mx.ones((70, k), dtype)
        mx.eval(qmm_tensor(x, *packed, None, transpose, fmt, config, other=other, gate=gate))
    ((text, problem),) = seen.items()
    assert not problem
    ptx = ptx_of(text)
    # Once for rows of x that are read 16 bytes at a time, and once for those that begin anywhere.
    products = config.rows // 8 * (32 // 16) * (config.tile_k // 16) * (2 if gate else 1)
    products *= 1 if config.ragged else 2
    assert ptx.count("mma.sync") == products and ".local" not in ptx


@pytest.mark.nvrtc
def test_attention_by_tensor_operations():
    """Forward, and the gradients of queries, keys and values."""
    q, k = mx.ones((1, 4, 96, 64), mx.bfloat16), mx.ones((1, 2, 96, 64), mx.bfloat16)
    with compile_only() as seen, use_backend("cuda"):
        call = AttentionCall(Spec.of(q), (Spec.of(k),), (Spec.of(k),), Scores(0.125, True))
        at = Launcher(call)
        outputs = attention_tensor(at)(q, k, k, None, None)
        of_all, _ = attention_backward(at, tensors=True)
        mx.eval(of_all([q, k, k, None, None], [outputs[0], None], outputs))
    assert not any(seen.values()) and len(seen) == 4
    kernels = map(ptx_of, seen)
    assert all("wgmma.mma_async" in ptx and ".local" not in ptx for ptx in kernels)


@pytest.mark.nvrtc
@pytest.mark.parametrize("width", [64, 128])
def test_attention_on_hopper_gpus(width, monkeypatch):
    """Products of warpgroups go on beside the warps."""
    has_gpu(monkeypatch, "sm_90")
    monkeypatch.setattr(hopper, "threshold", measured_from_one)
    q, k = mx.ones((1, 2, 512, width), mx.bfloat16), mx.ones((1, 1, 512, width), mx.bfloat16)
    with compile_only() as seen, use_backend("cuda"):
        at = Launcher(AttentionCall(Spec.of(q), (Spec.of(k),), (Spec.of(k),), Scores(0.125, True)))
        out, norms = hopper.forward_ahead(at, hopper.cut("forward", at))(q, k, k, None, None)
        of_all, _ = attention_backward(at)
        mx.eval(of_all([q, k, k, None, None], [out], [out, norms]))
    assert not any(seen.values()) and len(seen) == 4
    products = ["wgmma.wait_group.sync.aligned 1" in ptx for ptx in map(ptx_of, seen)]
    assert sorted(products) == [False, False, True, True]
