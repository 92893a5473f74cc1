"""What the tiled attention kernels take, and where stock is left in place."""

import threading
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import pytest

from mlx_qlayers import attention, explain
from mlx_qlayers.metal.attention import Scores
from mlx_qlayers.ops import attention_stock, attention_tiled
from mlx_qlayers.ops.differentiable import gradients_are_left_out, without_gradients
from mlx_qlayers.reference import attention as reference
from mlx_qlayers.tuning.store import forget


def why_stock(device, *, keys=2048, length=2048, width=128, v_width=None, **options):
    dtype = options.pop("dtype", mx.bfloat16)
    q = mx.zeros((1, 4, length, width), dtype)
    k, v = mx.zeros((1, 2, keys, width), dtype), mx.zeros((1, 2, keys, v_width or width), dtype)
    mask, sinks = options.pop("mask", "causal"), options.pop("sinks", None)
    scores = Scores(0.1, isinstance(mask, str), **options)
    with mock.patch.object(attention_tiled, "backend", lambda: device):
        return attention_tiled.stock_is_better(q, k, v, mask, sinks, scores)


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({}, False),
        ({"softcap": 30.0}, True),
        ({"window": 1024}, True),
        ({"window": 1025}, False),
        ({"width": 192, "v_width": 128}, True),
        ({"width": 256}, True),
        ({"width": 160}, False),
        ({"softcap": 30.0, "dtype": mx.float32}, False),
        ({"window": 8, "mask": mx.zeros((2048, 2048))}, False),
        ({"window": 8, "sinks": mx.zeros(4)}, False),
        ({"window": 8, "length": 8}, False),
        ({"softcap": 30.0, "length": 300}, True),
        ({"length": 512, "keys": 512}, True),
        ({"length": 512, "keys": 1024, "window": 1000}, True),
        ({"length": 512, "keys": 1025}, False),
        ({"length": 4096, "keys": 1024}, False),
        ({"length": 512, "keys": 512, "dtype": mx.float32}, False),
        ({"length": 512, "keys": 512, "width": 160}, False),
    ],
)
def test_on_cuda_only_what_was_measured(options, kernel):
    assert (why_stock("cuda", **options) is None) == kernel


def test_on_apple_gpus_all_but_few_queries():
    assert why_stock("metal") is None
    assert "8 queries" in why_stock("metal", length=8)


@pytest.mark.parametrize(
    "width, v_width, scale, why",
    [
        (36, 40, 1.0, "heads of 36 and 40"),
        (24, 24, 1.0, "heads of 24"),
        (264, 64, 1.0, "heads of 264"),
        (64, 0, 1.0, "nothing to compute"),
        (64, 64, 0.0, "a scale of 0"),
        (64, 64, 1.0, None),
    ],
)
def test_lacking(width, v_width, scale, why):
    q, v = mx.zeros((1, 1, 9, width)), mx.zeros((1, 1, 9, v_width))
    found = attention_tiled.lacking(q, q, v, scale)
    assert found is None if why is None else why in found


class ByKernel:
    """In the place of the kernels: the reference, and whether a gradient was wanted."""

    calls: list[bool]

    def __init__(self, *arguments):
        self.scores = arguments[-1]

    def __call__(self, q, k, v, mask, sinks):
        self.calls.append(gradients_are_left_out())
        seen = "causal" if self.scores.causal else mask
        return 2 * reference.attention(q, k, v, self.scores.scale, seen, self.scores.window)


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch):
    """An NVIDIA GPU, as far as attention asks for one, whose kernels double what is right."""

    def place():
        return "auto", threading.get_ident(), "a stream"

    def decide(op, backends, *, unless, host_gain):
        return op, "cuda" if unless is None else "ops", unless or "auto"

    for module in (attention_tiled, attention_stock):
        monkeypatch.setattr(module, "backend", lambda: "cuda")
    monkeypatch.setattr(attention_stock, "mx", SimpleNamespace(**vars(mx)))
    gpu = SimpleNamespace(type=mx.gpu)
    monkeypatch.setattr(attention_stock.mx, "default_device", lambda: gpu)
    monkeypatch.setattr(attention_tiled, "place", place)
    monkeypatch.setattr(attention_tiled, "decide", decide)
    monkeypatch.setattr(attention_tiled, "Kernels", ByKernel)
    ByKernel.calls = []
    forget()
    explain(reset=True)
    yield ByKernel.calls
    forget()


def prompt(length=64, dtype=mx.float16):
    q, k = mx.random.normal((1, 4, length, 32)), mx.random.normal((1, 2, length, 32))
    return q.astype(dtype), k.astype(dtype)


def test_short_prompts_are_traced_once_and_counted(by_kernel):
    for _ in range(3):
        for length in (64, 48):
            q, k = prompt(length)
            expected = 2 * reference.attention(q, k, k, 0.5, "causal")
            assert mx.array_equal(attention(q, k, k, scale=0.5, mask="causal"), expected)
    assert by_kernel == [True, True]
    assert [(d.op, d.path, d.calls) for d in explain()] == [("attention", "cuda", 6)]


@pytest.mark.parametrize("transform", ["vjp", "compile", "both"])
def test_what_others_trace_or_differentiate_is_left_to_stock(by_kernel, transform):
    q, k = prompt()

    def run(q):
        return [attention(q, k, k, scale=0.5, mask="causal")]

    def gradient(q):
        return mx.vjp(run, [q], [q])[1]

    functions = {"vjp": gradient, "compile": mx.compile(run), "both": mx.compile(gradient)}
    mx.eval(functions[transform](q))
    assert by_kernel == [True]  # traced ahead, and not used
    (decision,) = explain()
    assert decision.path == "ops" and "less time than Python" in decision.reason


def test_of_what_is_only_evaluated_kernels_are_a_part(by_kernel):
    q, k = prompt()
    with without_gradients():
        out = attention(q, k, k, scale=0.5, mask="causal")
    assert by_kernel == [True]
    assert mx.array_equal(out, 2 * reference.attention(q, k, k, 0.5, "causal"))


def test_capped_scores_are_left_to_kernels_with_gradients_too(by_kernel):
    q, k = prompt()
    mx.vjp(lambda q: [attention(q, k, k, scale=0.5, softcap=5.0)], [q], [q])
    assert by_kernel == [True, False]
