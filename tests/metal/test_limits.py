"""No configuration that a launcher chooses breaks a limit of the hardware: every one is bound."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mlx_qlayers.metal.quantized_matmul.qmm import qmm, qmm_config
from mlx_qlayers.metal.quantized_matmul.qmv import QmvArrays, qmv, qmv_config
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.spec import Spec
from tests.packed import FORMATS

DTYPES = (mx.float32, mx.bfloat16)
WIDTHS = (512, 4096, 18944, 152064)
DEPTHS = (512, 8960)


@pytest.fixture(params=["metal", "cuda"])
def device(request, machine, monkeypatch):
    """A GPU that is not here: launches are checked and bound, nothing runs."""
    machine(request.param)
    monkeypatch.setattr(mx.fast, f"{request.param}_kernel", lambda **made: lambda **launch: [])
    with use_backend(request.param):
        yield request.param


def packed(fmt, n, k, dtype):
    """The specs of a matrix of n rows."""
    scales = Spec((n, k // fmt.group_size), dtype if fmt.mode == "affine" else mx.uint8)
    biases = scales if fmt.mode == "affine" else None
    return PackedMatrix(Spec((n, k * fmt.bits // 32), mx.uint32), scales, biases, None)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_qmv(fmt, device):
    bound = set()
    for rows, n, k, dtype in itertools.product(range(1, 17), WIDTHS, DEPTHS, DTYPES):
        for norm, gate in itertools.product((False, True), (None, "silu")):
            kind = "-".join(["norm"] * norm + ["gate"] * bool(gate))
            config = qmv_config(device, rows, n, k, dtype, fmt, kind)
            if (config, dtype, norm, gate) in bound:
                continue
            bound.add((config, dtype, norm, gate))
            weight, matrix = Spec((k,), dtype) if norm else None, packed(fmt, n, k, dtype)
            matrices = (*matrix, *(matrix if gate else ()))
            specs = QmvArrays(Spec((rows, k), dtype), weight, None, None, None, *matrices)
            qmv(specs, fmt, config, gate=gate, epsilon=1e-6 if norm else None)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_qmm(fmt, device):
    bound = set()
    rows = (17, 33, 65, 96, 128, 512)
    for m, n, k, dtype, transpose in itertools.product(rows, WIDTHS, DEPTHS, DTYPES, (True, False)):
        config = qmm_config(device, m, n, k, dtype, fmt, transpose)
        if (config, dtype, transpose) not in bound:
            bound.add((config, dtype, transpose))
            matrix = packed(fmt, *((n, k) if transpose else (k, n)), dtype)
            qmm(MatmulCall(Spec((m, k), dtype), matrix, transpose, fmt), config)
