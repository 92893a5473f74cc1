"""Which path attention takes and why, and what a call costs that was made before."""

from contextlib import nullcontext
from functools import partial

import mlx.core as mx
import pytest
from attention_cases import check, expect, make
from numerics import assert_accurate, assert_same_sums, random, to64

from mlx_qlayers import attention, explain, use_backend
from mlx_qlayers.ops import attention as ops
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.reference import attention as reference
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.backend import Mode, advance_epoch, mode
from mlx_qlayers.runtime.spec import Spec

Q, K = mx.ones((1, 4, 1, 64)), mx.ones((1, 2, 8, 64))
PACKED = tuple(mx.quantize(K, 64, 8))
SEEN = mx.ones((1, 1, 1, 8), mx.bool_)
GRAPH = {True: lambda: mode(Mode.INFERENCE), False: nullcontext}


def record(q, k, v, mask=None, sinks=None, **options):
    """A call's arguments, checked."""
    arrays = q, *k, *v, *(None if isinstance(a, str) else a for a in (mask, sinks))
    names = {"scale": 0.1, "mask": mask if isinstance(mask, str) else None, "window": None}
    names |= {"softcap": None, **options}
    return ops.checked(arrays, (3, 3) if len(k) == 3 else (0, 0), **names)


def why_stock(*arrays, **options):
    """Why ``auto`` leaves the kernels for such a call, or None."""
    checked = record(*arrays, **options)
    few = ops.takes_decode(checked)
    return ops.why_not_decode(checked) if few else ops.why_not_forward(checked)


def given(*, keys=2048, length=2048, width=128, v_width=None, dtype=mx.bfloat16, **options):
    q = Spec((1, 4, length, width), dtype)
    k, v = (Spec((1, 2, keys, n), dtype) for n in (width, v_width or width))
    return record(q, (k,), (v,), **{"mask": "causal", **options})


def forward(**options):
    return ops.why_not_forward(given(**options))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "options, kernel, in_a_graph",
    [
        ({}, False, False),
        ({"softcap": 30.0}, True, True),
        ({"window": 1024}, True, True),
        ({"window": 1025}, False, False),
        ({"width": 192, "v_width": 128}, True, True),
        ({"width": 256}, True, True),
        ({"width": 160}, False, False),
        ({"softcap": 30.0, "dtype": mx.float32}, False, False),
        ({"window": 8, "mask": Spec((2048, 2048), mx.float32)}, False, False),
        ({"window": 8, "sinks": Spec((4,), mx.float32)}, False, False),
        ({"softcap": 30.0, "length": 300}, True, True),
        # For each length that is not round, stock would build a plan.
        ({"length": 2047}, True, True),
        ({"length": 2047, "mask": Spec((2047, 2048), mx.bool_)}, True, True),
        ({"length": 2047, "sinks": Spec((4,), mx.float32)}, True, True),
        ({"length": 2047, "mask": None}, False, False),
        ({"length": 2047, "dtype": mx.float32}, False, False),
        ({"length": 2047, "width": 160}, False, False),
        # Launches of a graph take less than stock's, up to so much work.
        ({"keys": 512, "length": 512}, False, True),
        ({"keys": 512, "length": 2048}, False, True),
        ({"keys": 512, "length": 2176}, False, False),
        ({"keys": 512, "length": 2048, "mask": None}, False, False),
        ({"keys": 513, "length": 512}, False, False),
        ({"keys": 512, "length": 512, "dtype": mx.float32}, False, False),
        ({"keys": 512, "length": 512, "width": 160}, False, False),
    ],
)
def test_many_queries_on_cuda_by_kernel_only_where_measured(
    options, kernel, in_a_graph, compiled, on
):
    on("cuda")
    with GRAPH[compiled]():
        assert (not forward(**options)) == (in_a_graph if compiled else kernel)


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({"length": 8192, "keys": 8192}, True),
        ({"length": 8192, "keys": 8192, "width": 64}, True),
        ({"length": 8192, "keys": 8192, "width": 96}, True),
        ({"length": 4096, "keys": 4096}, False),
        # Stock's own gradient would keep all scores, or is none of these, or adds in any order.
        ({"length": 4097, "keys": 4100}, True),
        ({"length": 256, "keys": 256, "sinks": Spec((4,), mx.bfloat16)}, True),
        ({"length": 256, "keys": 256, "mask": Spec((256, 256), mx.bfloat16)}, True),
        ({"length": 256, "keys": 256, "deterministic": True}, True),
        # Without a causal mask it computes what it needs.
        ({"mask": None, "length": 8192}, False),
        ({"mask": Spec((4096, 8192), mx.bool_), "length": 4096, "keys": 8192}, False),
        ({"length": 8192, "keys": 8192, "dtype": mx.float32}, False),
        ({"length": 8192, "keys": 8192, "width": 160}, False),
        ({"length": 8}, False),
    ],
)
def test_gradients_on_cuda_where_stock_is_slower_or_has_none(options, kernel, on):
    on("cuda")
    call = given(**options)
    assert ops.gradients_by_kernels(call) == kernel
    with mode(Mode.INFERENCE):
        assert not ops.gradients_by_kernels(call)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "length, kind, extra",
    [(200, "causal", {}), (256, "causal", {"sinks": True}), (256, "additive", {})],
)
def test_differentiated_calls_are_kernels_and_others_the_stock_operator(length, kind, extra):
    """Stock keeps all scores, or raises where the gradient of sinks or mask is asked for.

    It would also plan for each length that is no multiple of 128.
    """
    shape = 1, 4, 2, length, length, 64, 64
    with trace() as launches:
        check(attention, shape, mx.bfloat16, kind, extra)
    assert len(launches) == 3 + (kind == "additive")
    _, arrays, options = make(0, shape, mx.bfloat16, kind, extra)
    run = partial(attention, **options)
    with trace() as launches:
        mx.eval(run(*arrays), mx.compile(run)(*arrays))
    assert len(launches) == (2 if length % 128 else 0)
    gradient = mx.compile(mx.grad(lambda *a: run(*a).sum()))
    with trace() as launches:
        mx.eval(gradient(*arrays))
    # That of the mask is traced too; nobody asks for it, so that it never runs.
    assert len(launches) == 3 + (kind == "additive")


def test_many_queries_on_an_apple_gpu_are_for_kernels_where_stock_has_none(on):
    on("metal")
    assert "not measured on this Apple GPU" in forward()
    assert "not measured on this Apple GPU" in forward(mask=Spec((2048, 2048), mx.bool_))
    assert forward(mask=Spec((2048, 2048), mx.float32)) is None
    assert forward(width=160) is None and forward(width=192, v_width=128) is None
    assert forward(softcap=30.0) is None
    assert "8 queries" in forward(length=8, width=36)


@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"window": 5}])
def test_on_an_apple_gpu_kernels_compute_the_gradient_of_the_stock_operator(
    options, on, monkeypatch
):
    """Where stock's own would keep more scores than a sixteenth of its memory."""
    launched = []

    def metal_kernel(name, **_):
        def launch(*, output_shapes, output_dtypes, **_):
            launched.append(name)
            return [mx.ones(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    q, k = mx.random.normal((1, 4, 24, 64)), mx.random.normal((1, 2, 24, 64))
    i = mx.arange(24)
    near = (i <= i[:, None]) & (i > i[:, None] - 5)
    seen = near if "window" in options else options.get("mask")
    expected = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1, mask=seen)
    on("metal")
    call = partial(attention, scale=0.1, **options)
    mx.eval(mx.grad(lambda q: call(q, k, k).sum())(q))
    assert not launched
    scores = q.size // 64 * 24 * q.dtype.size
    monkeypatch.setattr(mx, "device_info", lambda *_: {"memory_size": 16 * 3 * scores - 1})
    advance_epoch()
    assert_same_sums(call(q, k, k), expected)
    with mode(Mode.INFERENCE):
        assert_same_sums(call(q, k, k), expected)
    assert not launched
    outputs, gradients = mx.vjp(lambda *a: [call(*a)], [q, k, k], [mx.ones_like(q)])
    assert_same_sums(outputs[0], expected)
    mx.eval(gradients)
    assert launched[0].startswith("attention_forward") and len(launched) == 3
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_few_queries_on_a_gpu(on):
    plain, packed = (Spec.of(K),), tuple(map(Spec.of, PACKED))
    long = (Spec((1, 4, 1 << 19, 64), mx.float32),)
    on("metal")
    for k in (plain, packed):
        assert why_stock(Q, k, k) == "the kernel was not measured on an Apple GPU"
    on("cuda")
    assert "launched faster" in why_stock(Q, plain, plain)
    assert why_stock(Q, packed, packed) is None and why_stock(Q, plain, plain, mask=SEEN) is None
    assert not why_stock(Q, long, long)
    with mode(Mode.INFERENCE):
        assert why_stock(Q, plain, plain) is None


# B, H, Hkv, L, S, D, Dv
SHAPE, ONE_QUERY = (2, 4, 2, 16, 24, 64, 64), (2, 4, 2, 1, 24, 64, 64)


def planned(arrays, options):
    """The plan of a call, and the arrays that it is called with."""
    mask, sinks = options["mask"], options.get("sinks")
    seen, rule = (None, mask) if isinstance(mask, str) else (mask, None)
    given = *arrays, seen, sinks
    static = (0, 0), options["scale"], rule, options.get("window"), options.get("softcap")
    return ops._plan([a if a is None else Spec.of(a) for a in given], *static), given


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize(
    "shape, kind, extra",
    [
        (SHAPE, "none", {}),
        (SHAPE, "causal", {}),
        (SHAPE, "causal", {"window": 3}),
        (SHAPE, "none", {"window": 3}),
        (SHAPE, "causal", {"window": 30}),
        (SHAPE, "boolean", {}),
        (SHAPE, "causal", {"sinks": True}),
        (SHAPE, "causal", {"sinks": True, "window": 3}),
        (SHAPE, "padded", {"sinks": True}),
        (ONE_QUERY, "causal", {}),
        (ONE_QUERY, "none", {"window": 24}),
        ((2, 4, 2, 24, 16, 64, 64), "causal", {"window": 3}),
    ],
)
def test_the_stock_operator_is_called_at_once(shape, kind, extra, device, on, monkeypatch):
    """Where ``auto`` takes it on a GPU: half of such a call's time is Python's."""
    _, arrays, options = make(0, shape, mx.float32, kind, extra)
    with use_backend("reference"):
        expected, wanted = mx.vjp(lambda *a: [attention(*a, **options)], arrays, [arrays[0]])
    on(device)
    monkeypatch.delattr(mx, "softmax")  # of which the operators would be composed
    plan, given = planned(arrays, options)
    assert plan.choice[:2] == ("attention", "reference") and plan.choice.reason
    assert not plan.gradients  # but for scores that would fill an Apple GPU's memory
    rest = given[3:]
    # The mask is made while something is compiled, and used afterwards.
    actual, gradients = mx.vjp(lambda *a: plan.run(*a, *rest), arrays, [arrays[0]])
    compiled = mx.compile(lambda *a: plan.run(*a, *rest)[0])
    for out in (*actual, compiled(*arrays), *plan.run(*given)):
        assert_same_sums(out, expected[0])
    for one, other in zip(gradients, wanted, strict=True):
        assert_same_sums(one, other)


def stock(q, k, v, mask=None, sinks=None, causal=False, window=None, softcap=None):
    scores = Scores(1.0, causal, window, softcap)
    return reference.stock(AttentionCall(q, (k,), (v,), scores, mask, sinks))


def test_what_needs_more_than_the_stock_operator(on):
    _, (q, k, v), _ = make(0, SHAPE, mx.float32)
    on("cuda")
    assert stock(q, k, v) and stock(q, k, v, mask=mx.ones((16, 24), mx.bool_))
    assert not stock(q, k, v, softcap=2.0)
    assert not stock(q.astype(mx.float16), k, v)
    assert not stock(q, k, v, sinks=mx.zeros(4, mx.float16))
    assert not stock(q, k, v, mask=mx.zeros((16, 24))), "minus infinity must become a number"
    assert not stock(q, k, v, mask=mx.ones((16, 24), mx.bool_), window=3)
    assert not stock(q[:, :, :1], k, v, window=3), "most keys need not be read"
    long = mx.zeros((1, 1, 2048, 32))
    assert not stock(long, long, long, causal=True, window=3), "too much to keep"


def test_on_a_cpu_the_stock_operator_is_for_one_core_and_float32():
    _, (q, k, v), _ = make(0, SHAPE, mx.float32)
    assert stock(q, k, v, causal=True)
    assert not stock(q, k, v, window=3)
    assert not stock(*(a.astype(mx.float16) for a in (q, k, v)))


def test_masks_of_windows_are_shared_and_bounded(on):
    on("cuda")
    for heads in (4, 2, 2):
        _, (q, k, v), _ = make(0, (2, heads, *SHAPE[2:]), mx.float32)
        stock(q, k, v, window=3)(q, k, v, None, None)
    info = reference._window_mask.cache_info()
    assert (info.misses, info.hits) == (1, 2)
    assert info.maxsize * reference._MASK_BYTES <= 32 << 20
    mask = reference._window_mask(16, 24, 3, mx.float32)
    assert reference._window_mask.cache_info().misses == 1 and mask.shape == (16, 24)


@pytest.mark.cuda
@pytest.mark.parametrize("extra", [{}, {"window": 30}])
@pytest.mark.parametrize("length", [64, 201])
def test_short_sequences_in_a_graph_run_on_kernels(length, extra):
    dtype = mx.bfloat16
    _, arrays, options = make(0, (2, 8, 2, length, length, 128, 128), dtype, "causal", extra)
    exact, rounded, terms = expect(arrays, options, dtype)["out"]
    explain(reset=True)
    with mode(Mode.INFERENCE):
        run = mx.compile(lambda *a: attention(*a, **options))
        for _ in range(2):
            assert_accurate(run(*arrays), exact, rounded, terms=terms)
    assert [d.path for d in explain() if d.op == "attention"] == ["cuda"]


@pytest.mark.cuda
@pytest.mark.parametrize("length", [256, 384])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_window_is_as_accurate_as_with_a_mask_of_booleans(dtype, length):
    """Forward and with gradients, of batches too: cuDNN is given one mask for all heads."""
    shape, extra = (2, 8, 2, length, length, 128, 128), {"window": 64}
    rng, arrays, options = make(0, shape, dtype, "causal", extra)
    cotangent = random(rng, arrays[0].shape, dtype)
    truth = expect(arrays, options, dtype, cotangent=to64(cotangent))
    mask = reference.visible(length, length, 64)

    def stock(*a):
        return [mx.fast.scaled_dot_product_attention(*a, scale=options["scale"], mask=mask)]

    rough, rough_gradients = mx.vjp(stock, arrays, [cotangent])
    explain(reset=True)
    outputs, gradients = mx.vjp(lambda *a: [attention(*a, **options)], arrays, [cotangent])
    assert [d.path for d in explain() if d.op == "attention"] == ["reference"]
    for name, actual, stocks in zip(
        ("out", "q", "k", "v"), (*outputs, *gradients), (*rough, *rough_gradients), strict=True
    ):
        exact, _, terms = truth[name]
        assert_accurate(actual, exact, stocks, terms=terms, what=name)
