"""Quantized linear, grid sampling and attention layers with custom Metal kernels for Apple MLX.

``convert_model`` puts the layers into a model that mlx-lm has loaded, and ``load`` loads and
converts one; ``register_counterpart`` adds what modules of other classes become. The layers are
``QLinear``, ``GridSample``, ``DeformableAttention``, ``DeformConv2d`` and ``FusedAttention``; they
call the differentiable functions ``quantized_matmul``, ``grid_sample``, ``deformable_attention``,
``deform_conv2d`` and ``attention``. ``linear_cross_entropy`` and ``log_probabilities`` take the
logits of an output layer in blocks, ``fused_loss`` those of a model that mlx-lm trains;
``recompute_activations`` has it keep less for its gradients. ``speculate`` and ``speculate_batch``
write text with verified guesses; ``load_heads`` reads what checkpoints have to make them.
``backend`` names what runs kernels, ``use_backend`` and ``set_backend`` force it; ``explain`` tells
which path each operation took, and why.
"""

from . import _interrupts  # noqa: F401, first: what follows takes a while
from .conversion.gptq import quantize_model
from .conversion.registry import register_counterpart
from .conversion.report import ConversionReport
from .convert import convert_model, load, load_heads, revert_model
from .layers.deform_conv2d import DeformConv2d
from .layers.deformable_attention import DeformableAttention
from .layers.fused_attention import FusedAttention
from .layers.grid_sample import GridSample
from .layers.qlinear import QLinear
from .ops.attention import attention
from .ops.deform_conv2d import deform_conv2d
from .ops.deformable_attention import deformable_attention
from .ops.grid_sample import affine_grid, grid_sample
from .ops.linear_cross_entropy import linear_cross_entropy, log_probabilities
from .ops.quantized_matmul import quantized_matmul
from .runtime.backend import backend, set_backend, use_backend
from .runtime.explain import explain
from .speculation.text import speculate, speculate_batch
from .training.fused_loss import fused_loss
from .training.recompute import recompute_activations

__all__ = [
    "ConversionReport",
    "DeformConv2d",
    "DeformableAttention",
    "FusedAttention",
    "GridSample",
    "QLinear",
    "affine_grid",
    "attention",
    "backend",
    "convert_model",
    "deform_conv2d",
    "deformable_attention",
    "explain",
    "fused_loss",
    "grid_sample",
    "linear_cross_entropy",
    "load",
    "load_heads",
    "log_probabilities",
    "quantize_model",
    "quantized_matmul",
    "recompute_activations",
    "register_counterpart",
    "revert_model",
    "set_backend",
    "speculate",
    "speculate_batch",
    "use_backend",
]
