"""Attention by tensor operations, and its gradients, against float64 in every layout of lanes."""

from functools import partial
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import DTYPES, EXTRAS, MASKS, check, make
from devices import has_device
from numerics import random
from pairwise import pairwise
from runtime.host import mlx_kernels as mk

from mlx_qlayers import attention, explain
from mlx_qlayers.metal.attention import tensor
from mlx_qlayers.metal.attention.backward import attention_backward
from mlx_qlayers.metal.attention.forward import Launcher
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS
from mlx_qlayers.runtime.spec import Spec

# B, H, Hkv, L, S.
SHAPES = [(1, 1, 1, 32, 32), (1, 4, 2, 33, 65), (2, 3, 1, 49, 37), (1, 2, 2, 100, 33)]
WIDTHS = [(64, 64), (40, 72), (136, 256), (128, 128), (256, 80)]
layouts = cycle(LAYOUTS[:3])


def by_tensors(q, k, v, *, scale, mask=None, window=None, softcap=None, sinks=None, handed=True):
    """As the operation, whose gradients take the kernels of tensor operations too."""
    rule, seen = (mask, None) if isinstance(mask, str) else (None, mask)
    arrays = [q, k, v, seen, sinks]
    specs = [None if a is None else Spec.of(a) for a in arrays]
    scores = Scores(scale, rule == "causal", window, softcap)
    at = Launcher(AttentionCall(specs[0], (specs[1],), (specs[2],), scores, *specs[3:]), handed)
    assert tensor.why_no_tensors(at) is None
    run, (of_all, of_mask) = tensor.attention_tensor(at), attention_backward(at, tensors=True)
    there = [i for i, a in enumerate(arrays) if a is not None]

    @mx.custom_function
    def node(*given):
        full = dict(zip(there, given, strict=True))
        return run(*(full.get(i) for i in range(5)))[0]

    @node.vjp
    def _(given, cotangent, out):
        full = dict(zip(there, given, strict=True))
        arrays = [full.get(i) for i in range(5)]
        outputs = run(*arrays)
        found = dict(zip((0, 1, 2, 4), of_all(arrays, [cotangent, None], outputs), strict=False))
        if seen is not None and seen.dtype != mx.bool_:
            found |= {3: of_mask(arrays, [cotangent, None], outputs)[0]}
        return [found[i] if i in found else mx.zeros_like(full[i]) for i in there]

    return node(*(arrays[i] for i in there))


def hold(shape, dtype, kind, extra, barriers=False, layout=None, handed=True):
    layout = layout or next(layouts)
    with use_backend("host"), checks(tensor_layout=layout) as report:
        check(partial(by_tensors, handed=handed), shape, dtype, kind, extra)
    names, mine = zip(*report.launches, strict=True)
    assert all(name.startswith("attention_tensor") for name in names)
    taken = {c.threadgroup_written > 0 for c in mine}
    assert taken == {layout == "apart" or not handed}
    assert any(c.threadgroup_barriers for c in mine) == barriers


@pytest.mark.parametrize(
    ("shape", "widths", "dtype", "kind", "extra"),
    [
        (SHAPES[0], (64, 64), mx.float16, "causal", {}),
        (SHAPES[1], (40, 72), mx.bfloat16, "hidden", {"window": 9, "softcap": 30.0}),
        (SHAPES[2], (136, 128), mx.bfloat16, "biased", {"sinks": True, "softcap": 2.0}),
        (SHAPES[3], (64, 256), mx.float32, "boolean", {"window": 5}),
    ],
    ids=str,
)
def test_some_shapes(shape, widths, dtype, kind, extra):
    hold((*shape, *widths), dtype, kind, extra)


@pytest.mark.parametrize(
    ("shape", "widths", "dtype", "kind", "extra", "layout", "handed"),
    [
        (
            *(SHAPES[1], (40, 72), mx.bfloat16, "biased", {"softcap": 2.0, "sinks": True}),
            *("apart", True),
        ),
        (SHAPES[3], (40, 136), mx.float16, "hidden", {"window": 5}, "random", False),
    ],
    ids=str,
)
def test_through_threadgroup_memory(shape, widths, dtype, kind, extra, layout, handed):
    """Where the answer is that tensors are not compatible, and where nobody asks."""
    hold((*shape, *widths), dtype, kind, extra, layout=layout, handed=handed)


def test_simd_groups_in_lockstep(monkeypatch):
    """As on CUDA: of the last threadgroup some SIMD groups have no queries."""
    has_device(monkeypatch, "host", tensor_cores=True)
    shape = 1, 2, 1, 85, 90, 64, 64
    hold(shape, mx.float16, "causal", {"window": 50}, barriers=True, layout="random")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "widths", "dtype", "kind", "extra"),
    [
        (SHAPES[1], (64, 80), mx.bfloat16, "hidden", {"window": 9, "softcap": 30.0}),
        (SHAPES[2], (128, 128), mx.float16, "biased", {"sinks": True}),
        ((1, 4, 2, 200, 230), (128, 128), mx.bfloat16, "causal", {"window": 90}),
        ((1, 2, 1, 90, 100), (192, 128), mx.float16, "boolean", {}),
        (SHAPES[3], (80, 256), mx.bfloat16, "causal", {}),
    ],
    ids=str,
)
def test_on_cuda(shape, widths, dtype, kind, extra):
    """Where no operation takes it: the same source on other matrix units."""
    with use_backend("cuda"):
        check(by_tensors, (*shape, *widths), dtype, kind, extra)


@pytest.mark.tensors
@pytest.mark.parametrize(
    ("shape", "widths", "kind", "extra", "dtype"),
    [p.values for p in pairwise(SHAPES, WIDTHS, [*MASKS, "hidden"], EXTRAS, DTYPES)],
    ids=str,
)
def test_every_mask_and_dtype(shape, widths, kind, extra, dtype):
    hold((*shape, *widths), dtype, kind, extra)


def test_registers():
    for width in range(32, 257, 8):
        split = -(-width // 128)
        values = {"D": width, "DV": width, "SPLIT": split}
        kernels = tensor._FORWARD, tensor._QUERIES, tensor._KEYS
        assert max(kernel.registers(**values) for kernel in kernels) < 128


def test_moves_no_more_than_stock():
    """Device memory, beside MLX's kernel for the M5."""
    length = 128
    _, (q, k, v), _ = make(0, (1, 1, 1, length, length, 64, 64), mx.float16)
    _, theirs = mk.attention(q, k, v, (64, 32), nax=True)
    with use_backend("host"), checks() as report:
        by_tensors(q, k, v, scale=0.125)
    norms = 8 * length  # which MLX's kernel was not asked for
    moved = report.total("bytes_read") + report.total("bytes_written") - norms
    assert moved <= theirs.bytes_read + theirs.bytes_written


def test_taken_where_they_were_fastest(machine):
    """On a stand-in for an M5; through memory where what is handed over was wrong, or slower."""
    machine.apple()
    x = random(np.random.default_rng(0), (1, 2, 64, 64), mx.float16)
    call = AttentionCall(x, (x,), (x,), Scores(0.125))
    taken = []
    for path in ("tensor", "tensor_memory"):
        machine.measured("attention_forward", *Launcher(call).key(), **{path: 41e-6})
        with trace() as launches:
            mx.eval(attention(x, x, x, scale=0.125))
        taken += [dict(launch.template)["HANDED"] for launch in launches]
    assert taken == [True, False]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("applegpu_g17s", "tensor operations, measured here"), ("applegpu_g16s", "applegpu_g16s")],
)
def test_says_why(gpu, said, machine):
    machine.apple(gpu)
    x = mx.zeros((1, 2, 64, 64), mx.float16)
    call = AttentionCall(x, (x,), (x,), Scores(0.125))
    seconds = {"tensor": 41e-6, "kernel": 63e-6}
    machine.measured("attention_forward", *Launcher(call).key(), **seconds)
    explain(reset=True)
    with use_backend("metal"):
        attention(x, x, x, scale=0.125)
    (choice,) = (d for d in explain() if d.op == "attention")
    assert choice.reason.startswith("asked for") and said in choice.reason
