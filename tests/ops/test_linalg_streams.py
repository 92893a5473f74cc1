"""On which streams factorisations and their gradients run: MLX has its own on the CPU only."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import linalg
from mlx_qlayers.ops.linalg import subtract_product
from mlx_qlayers.runtime.backend import use_backend
from tests import default_gpu
from tests.examples.factors import (
    differentiated,
    gram_schmidt,
    substituted,
    unblocked_cholesky,
)

CALLS = {
    "cholesky": lambda a: linalg.cholesky(a, check=False),
    "upper cholesky": lambda a: linalg.cholesky(a, upper=True, check=False),
    "solve": lambda a: linalg.solve_triangular(a, a),
    "transposed solve": lambda a: linalg.solve_triangular(a, a, transpose=True),
    "cho_solve": lambda a: linalg.cho_solve(a, a),
    "cholesky_inv": linalg.cholesky_inv,
    "qr": lambda a: mx.concatenate([*linalg.qr(a)]),
    "r of qr": lambda a: linalg.qr(a, "r"),
}


def build_graphs():
    """Of all functions and gradients, by kernels and by MLX's operators."""
    default_gpu.launch_nothing()
    assert mx.default_device().type == mx.gpu
    for backend in ("cuda", "reference"):
        with use_backend(backend):
            for name, call in CALLS.items():
                for shape in [(5, 5), (2, 140, 140)]:
                    value, gradient = mx.value_and_grad(lambda a, call=call: call(a).sum())(
                        mx.array(np.ones(shape, np.float32))
                    )
                    assert value.shape == () and gradient.shape == shape, name
            linalg.qr(mx.zeros((3, 5)), "raw")
            subtract_product(*[mx.zeros((3, 3))] * 3)
    print("built")


def differentiate_oracles():
    """In float64, of one array and of two; MLX gives one gradient alone, not in a list."""
    for function, arrays in [
        (lambda a: [unblocked_cholesky(a @ a.T)], [np.eye(2)]),
        (lambda a: [gram_schmidt(a, [1.0, -1.0])[1]], [np.eye(3, 2)]),
        (lambda a, b: [substituted(a, b)], [np.eye(2), np.ones((2, 3))]),
    ]:
        with mx.stream(mx.cpu):
            up = [np.ones(y.shape) for y in function(*map(mx.array, arrays))]
        found = differentiated(function, arrays, up)
        assert [a.shape for a in found] == [a.shape for a in arrays]
    print("differentiated")


@pytest.mark.parametrize("function", [build_graphs, differentiate_oracles])
def test_with_a_gpu_as_default_device(function, tmp_path):
    name = function.__name__
    code = f"from tests.ops.test_linalg_streams import {name}\n{name}()"
    assert default_gpu.run(code, tmp_path)


def test_what_mlx_refuses_there(tmp_path):
    """Otherwise the tests above would see nothing."""
    code = "import mlx.core as mx\nmx.linalg.cholesky(mx.array([[1.0]]))"
    with pytest.raises(AssertionError, match="not yet supported on the GPU"):
        default_gpu.run(code, tmp_path)
