"""Which operations multiply float32 by MLX's dense products, which on GPUs round it to TF32."""

import io
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import (
    deform_conv2d,
    deformable_attention,
    grid_sample,
    linalg,
    quantized_matmul,
    use_backend,
)
from mlx_qlayers.ops.matmul import matmul
from tests import default_gpu


def zeros(*shape):
    return mx.array(np.zeros(shape, np.float32))  # a value, as nothing can be evaluated


def quantized(x):
    packed = mx.array(np.zeros((256, 64), np.uint32))
    return quantized_matmul(x, packed, zeros(256, 8), zeros(256, 8))


def convolved(x, **options):
    return deform_conv2d(x, zeros(1, 8, 8, 18), zeros(6, 3, 3, 4), padding=1, **options)


CALLS = {
    "quantized_matmul, 1 row": (quantized, (1, 512)),
    "quantized_matmul, 600 rows": (quantized, (600, 512)),
    "grid_sample": (lambda x: grid_sample(x, zeros(1, 3, 3, 2)), (1, 9, 9, 4)),
    "deformable_attention": (
        lambda x: deformable_attention(x, [(4, 6)], zeros(1, 5, 2, 1, 4, 2), zeros(1, 5, 2, 1, 4)),
        (1, 24, 2, 8),
    ),
    "cholesky": (lambda a: linalg.cholesky(a, check=False), (200, 200)),
    "solve_triangular": (lambda a: linalg.solve_triangular(a, a), (200, 200)),
    "qr": (lambda a: mx.concatenate(linalg.qr(a), axis=1), (100, 200)),
    "deform_conv2d": (convolved, (1, 8, 8, 4)),
    "deform_conv2d, allowed": (lambda x: convolved(x, allow_tf32=True), (1, 8, 8, 4)),
}


def print_dense():
    """The calls whose graphs on CUDA, with gradients, have a dense product of MLX's."""
    default_gpu.launch_nothing()
    with use_backend("cuda"):
        for name, (call, shape) in CALLS.items():
            graph = io.StringIO()
            loss = mx.value_and_grad(lambda x, call=call: call(x).sum())
            mx.export_to_dot(graph, *loss(zeros(*shape)))
            if re.search(r'"(Matmul|AddMM|\w*MM|\w*Matmul|Convolution)', graph.getvalue()):
                print(name)


def test_float32_that_must_stay_so(tmp_path):
    code = "from tests.ops.test_tf32 import print_dense\nprint_dense()"
    assert default_gpu.run(code, tmp_path).splitlines() == ["deform_conv2d, allowed"]


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_forced_to_mlx_a_product_is_still_exact(allow_tf32, monkeypatch):
    """In float32 it is a CPU's, unless TF32 is allowed."""
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    streams, multiply = [], mx.matmul

    def watched(a, b, stream=None):
        streams.append(stream)
        return multiply(a, b, stream=stream)

    monkeypatch.setattr(mx, "matmul", watched)
    with use_backend("reference"):
        y = matmul(mx.ones((2, 3)), mx.eye(3), allow_tf32=allow_tf32)
    assert streams == [mx.cpu] * (not allow_tf32) and (y == 1).all().item()
