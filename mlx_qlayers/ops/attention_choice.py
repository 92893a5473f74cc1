"""Which path attention takes: what kernels lack, and where stock operators were measured faster."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from ..dispatch.choice import unmeasured
from ..measurements.thresholds import Measured, threshold
from ..metal.attention import decode
from ..metal.attention.forward import FAR
from ..metal.attention.layout import WIDEST
from ..options import AttentionCall
from ..reference import attention as reference
from ..runtime import tensor_ops
from ..runtime.backend import current, requested
from ..runtime.devices import device_of

# The exponent of a hidden score must be finite: see LOWEST in score_tile.metal.
_MAX_SCALE = 1e7
# Queries that would leave most of a tile empty.
FEW_QUERIES = 8
# Scores that stock operators may keep in memory, where they do.
MOST_SCORES = 1 << 25
# Heads of which the stock operator takes many queries in one kernel on Apple GPUs.
STOCK_ON_APPLE = (64, 72, 80, 96, 128, 192, 256)
# Arrays of all scores that stock's gradient keeps on Metal at a time; the share of memory that they
# may take, and the memory of a GPU that does not say: that of the smallest Mac with an M1.
_KEPT_SCORES, _SHARE, _MEMORY = 3, 16, 8 << 30
# Queries of which the stock operator's gradient on NVIDIA GPUs takes whole numbers.
_STOCK_TILE = 128


def takes_decode(call: AttentionCall) -> bool:
    """Whether the kernel of few queries takes these arguments; on a CPU it is that of many, too."""
    (*_, queries, width), v_width = call.q.shape, call.v_width
    widths_fit = width % 8 == v_width % 8 == 0 and 0 < max(width, v_width) <= decode.MAX_WIDTH
    bits_fit = {*call.packing[1:]} <= {0, *decode.BITS}
    few = queries <= decode.MAX_QUERIES
    if not few and requested() == "auto" and not device_of().gpu:
        few = why_no_kernel(call) is None
    if not (few and call.q.size > 0 and widths_fit and bits_fit):
        return False
    return not device_of().few_registers or decode.fits_few_registers(call)


def why_not_decode(call: AttentionCall) -> str | None:
    """Why ``auto`` leaves the kernel of few queries for the stock operator on a GPU.

    On an H200 the kernel was no slower from 256 keys to 131,072 in a compiled graph. Called one by
    one, its launches take Python longer than one stock operator; with packed keys or an
    array as mask stock makes more than one.
    """
    if why := unmeasured():
        return why
    single = current.get().mode.single and len(call.k) == 1 and call.mask is None
    if not (device_of().gpu and single):
        return None
    short = prod(call.k[0].shape) < threshold("attention_decode_min_elements")
    why = "on NVIDIA GPUs the stock operator is launched faster, and the cache is short"
    return Measured(why if short else "")


def decode_host_gain(call: AttentionCall) -> float:
    """How many times as fast as the reference the kernel is on a CPU: by launch and work."""
    work = call.q.size * call.k[0].shape[2] * 2e-6
    paths = "reference", "kernel"
    costs = (threshold("attention_decode_cost", path, device="host") for path in paths)
    stock, kernel = (launch + each * work for launch, each in costs)
    return float(stock / kernel)


def why_no_kernel(call: AttentionCall, widest: int = WIDEST) -> str | None:
    """Why the kernels of many queries do not take these arguments, by default with gradients."""
    (*_, queries, width), v_width, scale = call.q.shape, call.v_width, call.scores.scale
    if call.q.size == 0 or v_width == 0:
        return "there is nothing to compute"
    if width % 8 or v_width % 8 or width < 32 or max(width, v_width) > widest:
        return f"heads of {width} and {v_width}; kernels take multiples of 8 from 32 to {widest}"
    if max(queries, call.k[0].shape[2]) >= FAR:
        return f"{FAR} queries or keys, or more"
    if not 0 < scale <= _MAX_SCALE:
        return f"a scale of {scale}; kernels take positive ones up to {_MAX_SCALE:g}"
    return None


def why_not_forward(call: AttentionCall) -> str | None:
    """Why ``auto`` leaves the kernels of many queries for the stock operator on a GPU.

    Apple GPUs take it wherever it is one kernel, until somebody measures there; NVIDIA GPUs take it
    wherever the kernels were not measured to be no slower.
    """
    q, scores = call.q, call.scores
    if q.shape[2] <= FEW_QUERIES:
        return f"{q.shape[2]} queries; tiles of them would be mostly empty"
    if not (device := device_of()).measured:
        sizes_fit = q.shape[3] == call.v_width in STOCK_ON_APPLE
        fused = sizes_fit and reference.stock(call) is not None
        return (
            "kernels were not measured on this Apple GPU; they compute gradients" if fused else None
        )
    if not device.gpu:
        return None
    if len(call.v) == 1 and _builds_a_plan(call):
        return Measured("")
    if len(call.v) > 1 or call.mask is not None or call.sinks is not None:
        return (
            "on NVIDIA GPUs the stock operator is faster with these arrays, or nothing was measured"
        )
    if q.dtype == mx.float32:
        return "on NVIDIA GPUs the stock operator is faster in float32, with gradients"
    sizes, keys = (q.shape[3], call.v_width), call.k[0].shape[2]
    if max(sizes) > threshold("attention_forward_widest"):
        if sizes in threshold("attention_forward_wide_heads"):
            return Measured("")
        stock_keeps = prod(q.shape[:3]) * keys > MOST_SCORES
        return None if stock_keeps else "heads of these sizes were not measured on NVIDIA GPUs"
    if scores.softcap is not None:
        return None
    pairs = prod(q.shape[:3]) * keys
    better = scores.window is not None and 2 * scores.window <= keys
    if current.get().mode.differentiable:
        better = better and pairs >= threshold("attention_forward_min_scores")
    elif better:
        return None
    else:
        # Launches of a compiled graph, of which stock's take longer.
        work = pairs // (1 + scores.causal) * sum(sizes)
        short, little = (threshold("attention_forward_short", key) for key in ("keys", "work"))
        better = keys <= short and work <= little
    why = "on NVIDIA GPUs the stock operator was measured faster where nobody differentiates"
    return Measured("" if better else why)


def _builds_a_plan(call: AttentionCall) -> bool:
    """Whether stock would build a plan for a prompt's length, and probably for this prompt alone.

    cuDNN takes longer for that than a prompt takes. Lengths that come again are round: those of the
    parts that mlx-lm cuts a prompt into, and of most training.
    """
    (*_, queries, width), least = call.q.shape, threshold("attention_round_length")
    if not device_of().stock_is_cudnn or least is None or call.q.dtype == mx.float32:
        return False
    fused = max(width, call.v_width) <= threshold("attention_forward_widest")
    of_text = call.scores.causal or call.mask is not None
    return fused and of_text and queries % least > 0


def gradients_by_kernels(call: AttentionCall) -> bool:
    """Whether ``auto`` leaves a call to the kernels on NVIDIA GPUs where it is differentiated.

    There stock's own gradient keeps all scores unless the queries fill its tiles, is that of q, k
    and v only, and was measured slower where a causal mask hides much.
    """
    least, mode = threshold("attention_gradient_min_scores"), current.get().mode
    if least is None or requested() != "auto" or not mode.differentiable or call.packing[1]:
        return False
    (*heads, queries, width), mask = call.q.shape, call.mask
    wide = max(width, call.v_width) > threshold("attention_forward_widest")
    few = queries <= FEW_QUERIES
    if wide or few or call.q.dtype == mx.float32 or why_no_kernel(call):
        return False
    additive = mask is not None and mask.dtype != mx.bool_
    if queries % _STOCK_TILE or call.sinks is not None or additive or call.scores.deterministic:
        return True
    if mask is not None or not call.scores.causal:
        return False
    return prod(heads) * queries * call.k[0].shape[2] >= least


def fills_memory(call: AttentionCall) -> bool:
    """Whether stock's gradient would keep scores in more than a share of an Apple GPU's memory.

    On an M5 it is fused where the forward pass is, and keeps none.
    """
    fused = call.q.shape[3] == call.v_width in STOCK_ON_APPLE and call.scores.softcap is None
    if fused and tensor_ops.missing() is None:
        return False
    scores = prod(call.q.shape[:3]) * call.k[0].shape[2]
    memory = int(mx.device_info(mx.gpu).get("memory_size") or _MEMORY)
    return _KEPT_SCORES * scores * call.q.dtype.size > memory / _SHARE
