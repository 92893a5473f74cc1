"""Launchers as functions of arrays: each call plans for its arrays and launches."""

from __future__ import annotations

from mlx_qlayers.metal.quantized_matmul import dequantize as _dequantize
from mlx_qlayers.metal.quantized_matmul import gradients as _gradients
from mlx_qlayers.metal.quantized_matmul import qmm as _qmm
from mlx_qlayers.metal.quantized_matmul import qmv as _qmv
from mlx_qlayers.metal.quantized_matmul import qvm as _qvm
from mlx_qlayers.metal.quantized_matmul.qmv import PackedMatrix, QmvArrays


def qmv(
    x,
    matrices,
    fmt,
    config,
    *,
    norm=None,
    gate=None,
    residual=None,
    tile_squares=None,
    next_weight=None,
):
    """A list of products; ``norm`` is a weight, which may be None, and epsilon."""
    weight, epsilon = norm or (None, None)
    flat = [array for matrix in matrices for array in PackedMatrix(*matrix)]
    arrays = QmvArrays(x, weight, tile_squares, residual, next_weight, *flat)
    return _qmv.qmv(arrays, fmt, config, epsilon=epsilon, gate=gate)(*arrays)


def qmm(x, w, scales, biases, bias, transpose, fmt, config):
    arrays = x, w, scales, biases, bias
    return _qmm.qmm(*arrays, transpose, fmt, config)(*arrays)


def qvm(x, w, scales, biases, bias, fmt, config):
    arrays = x, w, scales, biases, bias
    return _qvm.qvm(*arrays, fmt, config)(*arrays)


def dequantize(matrices, fmt, dtype):
    arrays = [array for matrix in matrices for array in matrix[:3] if array is not None]
    return _dequantize.dequantize(matrices, fmt, dtype)(*arrays)


def scales_and_biases_gradient(x, dy, w, scales, fmt, transpose, device, chosen=None):
    plan = _gradients.scales_and_biases_gradient
    return plan(x, dy, w, scales, fmt, transpose, device, chosen)(x, dy, w, *(chosen or ()))
