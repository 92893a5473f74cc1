"""GPTQ: each size of a group, scales chosen before, more than one matrix and block."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq

from . import Cases


def cases() -> Cases:
    for group_size, bits in ((32, 3), (64, 4), (128, 2)):
        for act_order in (False, True):
            name = f"gptq {bits} bits in {group_size}, act_order={act_order}"
            yield name, partial(run, Format(group_size, bits), act_order)


def run(fmt: Format, act_order: bool) -> None:
    w = mx.random.normal((2, 7, 256), key=mx.random.key(0)).astype(mx.bfloat16)
    x = mx.random.normal((2, 600, 256), key=mx.random.key(1))
    x = x + 2 * x[..., :1]
    h = x.swapaxes(1, 2) @ x
    packed, scales, biases = gptq(w, h, fmt, act_order=act_order)
    wrong = (mx.dequantize(packed, scales, biases, fmt.group_size, fmt.bits) - w).astype(mx.float32)
    assert ((wrong @ h) * wrong).sum().item() < ((w @ h) * w).sum().item()
