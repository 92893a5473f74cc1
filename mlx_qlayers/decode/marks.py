"""Calls that a captured graph has as one node each, whatever MLX makes of them.

On a CPU MLX spells out ``mx.fast`` operations and unpacking, in ways that cannot all be written by
its exporter. So a twin's code (:mod:`.twin`) calls the functions of this file: each gives zeros
like the results of the stock function, that depend on what the node takes and on a number. Where
:mod:`.capture` finds such a number, the node takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import mlx.core as mx

from ..reference.hadamard import rotated_heads

# Operation, arguments and which sources are there, of each node so far, and its number.
_numbers: dict[tuple[str, tuple[Any, ...], tuple[bool, ...]], int] = {}
_count = count()
# The first of a mark's numbers: no model has it.
SIGN = 0x5EED_0000


def marked(
    op: str, arg: tuple[Any, ...], results: Sequence[mx.array], *src: mx.array | None
) -> list[mx.array]:
    """Zeros like some arrays, of which a captured graph knows that they are those of a node."""
    key = op, arg, tuple(each is not None for each in src)
    number = _numbers.setdefault(key, next(_count))
    given = [each for each in src if each is not None]
    like = [mx.zeros(each.shape, each.dtype) for each in results]
    return mx.depends(like, [*given, mx.array([SIGN, number])])


def mark_of(array: mx.array) -> tuple[str, tuple[Any, ...], tuple[bool, ...]] | None:
    """The operation, arguments and sources that are there of what a constant marks."""
    if array.shape != (2,) or array.dtype != mx.int32:
        return None
    mark: Any = array.tolist()
    return next((key for key, number in _numbers.items() if mark == [SIGN, number]), None)


def _cast(like: mx.array, *arrays: mx.array | None) -> list[mx.array | None]:
    """Arrays as MLX has them for a result: in its dtype, but for masks of truth values."""
    return [a if a is None or a.dtype == mx.bool_ else a.astype(like.dtype) for a in arrays]


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
    made = mx.fast.rms_norm(x, weight, eps)
    return marked("RMSNorm", (eps,), [made], *_cast(made, x, weight))[0]


def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **_: Any
) -> mx.array:
    made = mx.fast.layer_norm(x, weight, bias, eps)
    return marked("LayerNorm", (eps,), [made], *_cast(made, x, weight, bias))[0]


def rope(a: mx.array, dims: int, *, offset: Any, freqs: Any = None, **options: Any) -> mx.array:
    made = mx.fast.rope(a, dims, offset=offset, freqs=freqs, **options)
    at = offset if isinstance(offset, mx.array) else mx.array(offset)
    base, scale = (x if x is None else float(x) for x in (options["base"], options["scale"]))
    arg = dims, options["traditional"], base, scale
    return marked("RoPE", arg, [made], a, at, freqs)[0]


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None
) -> mx.array:
    made = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    causal, shown = isinstance(mask, str), mask if isinstance(mask, mx.array) else None
    return marked("Attention", (scale, causal), [made], *_cast(made, q, k, v, shown, sinks))[0]


def attention(
    stock: Callable[..., mx.array],
    q: mx.array,
    k: Any,
    v: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's, to keys and values that are packed in any formats as well."""
    own = {} if cache is None else vars(cache)
    if "bits" not in own:
        return stock(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if sinks is not None:
        raise ValueError("packed keys, and sinks")
    rotated: Callable[[mx.array], mx.array] = rotated_heads if own.get("hadamard") else lambda x: x
    made = mx.zeros((*q.shape[:3], v[1].shape[-1] * own["group_size"]), q.dtype)
    causal, shown = isinstance(mask, str), mask if isinstance(mask, mx.array) else None
    arg, src = (scale, causal, len(k), len(v)), (rotated(q), *k, *v, shown, None)
    return rotated(marked("AttentionPacked", arg, [made], *src)[0])


def attention_mask(
    stock: Callable[..., Any],
    h: mx.array,
    cache: Any = None,
    window_size: int | None = None,
    return_array: bool = False,
) -> Any:
    """mlx-lm's, with what it shows: number of a cache, window or 0, and whether rows are padded."""
    mask = stock(h, cache, window_size=window_size, return_array=return_array)
    own = getattr(cache, "__dict__", {})
    if not isinstance(mask, mx.array) or "number" not in own or "chunk_size" in own:
        return mask
    window = window_size or own.get("max_size", 0)
    arg = own["number"], window, "left_padding" in own
    return marked("Mask", arg, [mask], mask)[0]


def all_sum(x: mx.array, *, group: Any = None, **_: Any) -> mx.array:
    return marked("AllSum", (group,), [x], x)[0]


def gated_delta(
    stock: Any, q: mx.array, k: mx.array, v: mx.array, *others: Any
) -> tuple[mx.array, mx.array]:
    """mlx-lm's rule of all tokens, of decays, learning rates, a state and perhaps a mask."""
    dtype = mx.result_type(q, k, v)
    src = *(each.astype(dtype) for each in (q, k, v)), *others, *[None] * (4 - len(others))
    y, after = marked("GatedDelta", (None,), [src[2], others[2]], *src)
    return y.astype(q.dtype), after


def swiglu(stock: Any, gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's, with factors in an order that no other code's are in."""
    return mx.sigmoid(gate) * gate * x


def embedding(stock: Any, layer: Any, x: mx.array) -> mx.array:
    """``QuantizedEmbedding.__call__``."""
    w, scales = layer["weight"], layer["scales"]
    dtype = scales.dtype if layer.mode == "affine" else mx.bfloat16
    rows = mx.zeros((*x.shape, w.shape[1] * 32 // layer.bits), dtype)
    arg = layer.group_size, layer.bits, layer.mode
    return marked("Embedding", arg, [rows], x, w, scales, layer.get("biases"))[0]


def switch(stock: Callable[..., mx.array], layer: Any, x: mx.array, indices: Any) -> mx.array:
    """The methods of mlx-lm's mixtures, in the order that rows have."""
    first, last = [layer.get("fc1")], layer.get("fc2")
    if last is None:
        first, last = [layer.up_proj, layer.gate_proj], layer.down_proj
    if not all(map(_is_marked, (*first, last))):
        return stock(layer, x, indices)
    between = layer.activation(*(_experts(each, x, indices) for each in first))
    return _experts(last, between, indices)


def _is_marked(layer: Any) -> bool:
    """Whether all that a layer of experts has is in a node."""
    bias, scale = layer.get("bias"), layer.get("global_scale")
    packed = "scales" in layer and scale is None
    return packed and (bias is None or layer.mode != "affine" or bias.dtype == layer.scales.dtype)


def _experts(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
    """Products of rows (..., K), or (..., J, K), with the matrices that they chose (..., J)."""
    w, scales, bias = layer["weight"], layer["scales"], layer.get("bias")
    dtype = mx.result_type(x, scales) if layer.mode == "affine" else x.dtype
    made = mx.zeros((*indices.shape, w.shape[1]), dtype)
    arg = layer.group_size, layer.bits, layer.mode, None, None
    src = x, indices, None, w, scales, layer.get("biases"), bias
    return marked("Experts", arg, [made], *src)[0]


# Functions and methods of MLX and mlx-lm by their names, and what a twin has in their place: each
# is called with the stock one first.
INSTEAD: dict[str, Callable[..., Any]] = {
    "mlx.nn.layers.distributed.sum_gradients": lambda stock, group: lambda x: x,
    "mlx.nn.layers.quantized.QuantizedEmbedding.__call__": embedding,
    "mlx_lm.models.activations.swiglu": swiglu,
    "mlx_lm.models.base.create_attention_mask": attention_mask,
    "mlx_lm.models.base.scaled_dot_product_attention": attention,
    "mlx_lm.models.gated_delta.gated_delta_kernel": gated_delta,
    "mlx_lm.models.gated_delta.gated_delta_ops": gated_delta,
    "mlx_lm.models.switch_layers.SwitchGLU.__call__": switch,
    "mlx_lm.models.switch_layers.SwitchMLP.__call__": switch,
}
