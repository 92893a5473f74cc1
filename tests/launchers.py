"""Launchers as functions of arrays: each call plans for its arrays and launches."""

from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_qlayers.dispatch.measurements import configure
from mlx_qlayers.metal.attention import decode as _decode
from mlx_qlayers.metal.quantized_matmul import dequantize as _dequantize
from mlx_qlayers.metal.quantized_matmul import gradients as _gradients
from mlx_qlayers.metal.quantized_matmul import qmm as _qmm
from mlx_qlayers.metal.quantized_matmul import qmm_tensor as _qmm_tensor
from mlx_qlayers.metal.quantized_matmul import qmv as _qmv
from mlx_qlayers.metal.quantized_matmul.qmv import QmvArrays
from mlx_qlayers.metal.quantized_matmul.tile import Tile
from mlx_qlayers.options import AttentionCall, MatmulCall, PackedMatrix, Scores
from mlx_qlayers.runtime.spec import Spec

# Tiles of the kernels on the matrix units; of the last one with what its rule always has.
matrix, persistent = (partial(Tile, name) for name in ("qmv_matrix", "qmv_persistent"))
skinny = partial(Tile, "qmm_skinny", stages=2, ahead=2, occupancy=1)


def specs(arrays):
    """The specs of an array, or of a named tuple of arrays."""
    if isinstance(arrays, tuple):
        return type(arrays)(*(None if a is None else Spec.of(a) for a in arrays))
    return Spec.of(arrays)


def qmv(
    x,
    matrices,
    fmt,
    config,
    *,
    norm=None,
    gate=None,
    residual=None,
    partial_squares=None,
    deferred_weight=None,
):
    """A list of products; ``norm`` is a weight, which may be None, and epsilon."""
    weight, epsilon = norm or (None, None)
    packed = [PackedMatrix(*matrix) for matrix in matrices]
    flat = QmvArrays(x, weight, partial_squares, residual, deferred_weight, packed).flat
    given = QmvArrays.of([None if a is None else Spec.of(a) for a in flat])
    return _qmv.qmv(given, fmt, config, epsilon=epsilon, gate=gate)(*flat)


def qmm(x, w, scales, biases, bias, *options):
    return _product(_qmm.qmm, x, PackedMatrix(w, scales, biases, bias), *options)


def qmm_tensor(
    x, w, scales, biases, bias, transpose, fmt, config, *, residual=None, other=None, gate=None
):
    """``other`` is a :class:`PackedMatrix`."""
    matrix = PackedMatrix(w, scales, biases, bias)
    call, nothing = MatmulCall(specs(x), specs(matrix), transpose, fmt), PackedMatrix(None, None)
    added = None if residual is None else specs(residual)
    launch = _qmm_tensor.qmm_tensor(call, config, added, specs(other or nothing), gate)
    return launch(x, *matrix, residual, *(other or nothing))


def in_registers(config, k):
    """A product by tensor operations with operands in registers, as tensor cores take it."""
    tile_k = min(config.tile_k, 32)
    return replace(config, staged=False, tile_k=tile_k, ragged=bool(k % tile_k))


def _product(launcher, x, matrix, transpose, fmt, *config):
    return launcher(MatmulCall(specs(x), specs(matrix), transpose, fmt), *config)(x, *matrix)


def dequantize(matrices, fmt, dtype):
    arrays = [array for matrix in matrices for array in matrix[:3] if array is not None]
    return _dequantize.dequantize(matrices, fmt, dtype)(*arrays)


def scales_and_biases_gradient(x, dy, w, scales, fmt, transpose, device, chosen=None):
    call = MatmulCall(x, PackedMatrix(w, scales), transpose, fmt)
    launch = _gradients.scales_and_biases_gradient(call, dy, device, chosen)
    return launch(x, dy, w, *(chosen or ()))


def decode_config(device, q, k, v):
    """The configuration of attention of a few queries."""
    call = AttentionCall(q, _parts(k), _parts(v), Scores(1.0))
    return configure("attention_decode", device, *_decode.key_of(call))


def attention_decode(q, k, v, *, scale, config, mask=None, window=None, softcap=None, sinks=None):
    scores = Scores(scale, mask is not None, window, softcap)
    mask = mask if isinstance(mask, mx.array) else None
    call = AttentionCall(q, _parts(k), _parts(v), scores, mask, sinks)
    (out,) = _decode.attention_decode(call, config)(q, *call.k, *call.v, mask, sinks)
    return out


def _parts(array):
    return array if isinstance(array, tuple) else (array,)
