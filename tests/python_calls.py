"""Python's calls for one call of each operation, and for one decoded token.

A call is a Python function that is entered, as ``sys.setprofile`` reports it, when the same one has
been made before. Where there is no GPU, ``gpu`` is the path of one whose kernels were not measured,
as on every Mac: the stock operators and graphs of ``mx.compile``, which are made but never run.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import (
    QLinear,
    attention,
    convert_model,
    deform_conv2d,
    deformable_attention,
    grid_sample,
    quantized_matmul,
    use_backend,
)
from mlx_qlayers.decode import engine
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.ops.attention_step import Rotation, attention_step
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import backend as backends
from mlx_qlayers.runtime.proof import trial
from tests.machine import zeros

Call = Callable[[], Any]
LAYERS = 28  # of Qwen2-7B


def calls(call: Call, times: int = 3) -> int:
    """Python functions that are entered by a call which has been made before."""
    for _ in range(times):
        mx.eval(call())
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    mx.eval(result)
    return count


def operations(path: str) -> dict[str, Call]:
    """A call of each operation with few rows: of its function, or where there is one its layer."""
    random = partial(mx.random.normal, dtype=mx.bfloat16)
    x, weight, position = random((1, 1, 256)), random((256,)), mx.array(5)
    matrices = [PackedMatrix(*mx.quantize(random((256, 256)))) for _ in range(3)]
    experts = mx.quantize(random((4, 256, 256)))
    layer = QLinear(256, 256)
    layer.set_dtype(mx.bfloat16)
    q, k, keys = random((1, 4, 1, 64)), random((1, 2, 1, 64)), random((1, 2, 300, 64))
    buffer, positions = mx.zeros((1, 2, 256, 64), mx.bfloat16), mx.array([7, 7] + [14] * 6)
    image, grid = random((1, 8, 8, 4)), mx.random.uniform(-1, 1, (1, 4, 4, 2))
    found: dict[str, Call] = {
        "QLinear": partial(layer, x),
        "quantized_matmul": partial(quantized_matmul, x, *matrices[0][:3]),
        "fused_products": partial(fused_products, x, matrices, norm=(weight, 1e-6)),
        "gather_qmm": partial(gather_qmm, x[None], *experts, mx.array([[0]]), mx.array([[1, 2]])),
        "QSwitchLinear": partial(QSwitchLinear(256, 256, 4), x[None], mx.array([[1, 2]])),
        "attention": partial(attention, q, keys, keys, scale=0.125),
        "rotary_embedding": partial(
            rotary_embedding, q.swapaxes(1, 2), k.swapaxes(1, 2), position, dims=64
        ),
    }
    if path == "gpu" and not _has_gpu():
        return found  # there the others run kernels
    flat = [a.reshape(1, 1, -1) for a in (q, k, k)]
    return found | {
        "attention_step": partial(
            attention_step, *flat, *[buffer] * 4, positions, scale=0.125, rotation=Rotation(64)
        ),
        "attention, causal": partial(
            attention, mx.repeat(q, 40, axis=2), keys, keys, scale=0.125, mask="causal"
        ),
        "attention, masked": partial(
            attention, q, keys, keys, scale=0.125, mask=mx.ones((1, 1, 1, 300), mx.bool_)
        ),
        "attention, packed": partial(attention, q, *[mx.quantize(keys)] * 2, scale=0.125),
        "attention, with sinks": partial(attention, q, keys, keys, scale=0.125, sinks=mx.ones(4)),
        "grid_sample": partial(grid_sample, image, grid),
        "deform_conv2d": partial(
            deform_conv2d,
            image,
            mx.zeros((1, 8, 8, 18)),
            mx.ones((2, 3, 3, 4), mx.bfloat16),
            padding=1,
        ),
        "deformable_attention": partial(
            deformable_attention,
            image.reshape(1, 64, 1, 4),
            [(8, 8)],
            grid.reshape(1, 4, 1, 1, 4, 2),
            mx.ones((1, 4, 1, 1, 4)),
        ),
        "exp": partial(exp, x),
    }


def token(by_graph: bool = False) -> Call:
    """The next token of a converted model of Qwen2's layers, narrow ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, **sizes, **heads))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model)
    model.eval()
    convert_model(model, verify=False)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]]), cache=cache))
    if by_graph:
        return partial(engine.step, model, mx.array([[1]]), cache)
    return partial(model, mx.array([[1]]), cache=cache)


@contextmanager
def on(path: str) -> Iterator[None]:
    """Run on a path: that of this machine's GPU, or without one as ``auto`` chooses on a Mac."""
    with ExitStack() as stack:
        if path not in ("gpu", "metal"):
            stack.enter_context(use_backend(path))
        elif not _has_gpu():
            gpu, stream = _Gpu(), mx.default_stream(mx.default_device())
            # Functions of C, which are not counted.
            stack.enter_context(patch.object(mx, "default_device", repeat(gpu).__next__))
            stack.enter_context(patch.object(mx, "default_stream", {gpu: stream}.get))
            stack.enter_context(patch.dict(backends.missing, metal={}.clear))
            stack.enter_context(patch.object(mx.fast, "metal_kernel", lambda **_: zeros))
            stack.enter_context(trial())  # launches as if all were proven
            if path == "metal":
                stack.enter_context(use_backend("metal"))
            backends.advance_epoch()
            stack.callback(backends.advance_epoch)
        yield


def _has_gpu() -> bool:
    return mx.metal.is_available() or mx.cuda.is_available()


class _Gpu:
    type = mx.gpu
