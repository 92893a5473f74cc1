"""Attention against float64 on awkward shapes, and what it refuses."""

from collections import Counter

import mlx.core as mx
import pytest
from attention_cases import DTYPES, expect, make
from numerics import assert_accurate

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.runtime import explain, trace, use_backend
from mlx_qlayers.runtime.backend import advance_epoch
from tests.machine import has_device


@pytest.fixture(autouse=True)
def on_the_reference_path():
    with use_backend("reference"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["boolean", "additive", "causal"])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": True}, {"window": 3}])
def test_a_fully_masked_row_averages_the_values_and_harms_no_other(kind, extra, dtype):
    # Causal with more queries than keys: the first ones see nothing.
    _, (q, k, v), options = make(5, (1, 4, 2, 12, 9, 32, 8), dtype, extra=extra)
    row = 1
    if kind == "causal":
        options["mask"] = "causal"
    else:
        hidden = mx.zeros((12, 9), mx.bool_)
        hidden[row] = True
        bias = mx.where(hidden, -float("inf"), 0.0).astype(dtype)
        options["mask"] = ~hidden if kind == "boolean" else bias
    (out,), gradients = mx.vjp(
        lambda *a: [attention(*a, **options)], [q, k, v], [mx.ones((1, 4, 12, 8), dtype)]
    )
    truth, rounded, terms = expect((q, k, v), options, dtype)["out"]
    assert_accurate(out, truth, rounded, terms=terms)
    assert all(mx.isfinite(array).all().item() for array in (out, *gradients))
    if "sinks" in extra:
        assert not mx.abs(out[0, :, row]).max().item()


@pytest.mark.parametrize(
    "width, scale, why", [(36, 1.0, "heads of 36"), (64, -1.0, "a scale of -1"), (64, 1.0, "on a ")]
)
def test_auto_says_why_it_takes_no_kernel(width, scale, why, machine):
    q = mx.ones((1, 2, 20, width))
    explain(reset=True)
    machine("host")
    with use_backend("auto"):
        attention(q, q, q, scale=scale)
    (decision,) = (d for d in explain() if d.op == "attention")
    assert decision.path == "reference" and why.lower() in decision.reason.lower()


@pytest.mark.parametrize("extra", [{}, {"window": 2}, {"softcap": 5.0}], ids=str)
def test_a_mask_without_axes_is_broadcast(extra):
    _, arrays, options = make(9, (1, 2, 1, 3, 5, 32, 32), mx.float32, "none", extra)
    for value in (True, False, 0.5, -float("inf")):
        mask = mx.array(value)
        out, whole = (
            attention(*arrays, **options | {"mask": m})
            for m in (mask, mx.broadcast_to(mask, (1, 2, 3, 5)))
        )
        assert mx.array_equal(out, whole)


@pytest.mark.parametrize("kind", ["causal", "boolean", "padded", "additive", "one key"])
def test_launches_that_would_take_long_are_split(kind, monkeypatch):
    """Over heads and batch, down to one of each: the same results from as many launches."""
    _, arrays, options = make(5, (2, 6, 3, 9, 13, 32, 32), mx.float32, kind, {"sinks": True})
    some = *arrays, options.pop("sinks")

    def run():
        advance_epoch()

        def of(q, k, v, sinks):
            return [attention(q, k, v, sinks=sinks, **options)]

        with use_backend("host"), trace() as launches:
            outputs, gradients = mx.vjp(of, some, [arrays[0]])
            mx.eval(outputs, gradients)
        return [*outputs, *gradients], Counter(launch.kernel for launch in launches)

    whole, once = run()
    has_device(monkeypatch, "host", most_operations=1.0)
    split, often = run()
    monkeypatch.undo()
    advance_epoch()
    assert often == {kernel: 6 * count for kernel, count in once.items()}
    for one, other in zip(whole, split, strict=True):
        assert mx.array_equal(one, other)


def test_a_batch_gives_each_member_what_a_batch_of_one_gives():
    _, (q, k, v), options = make(8, (3, 4, 2, 1, 65, 64, 64), mx.bfloat16)
    together = attention(q, k, v, **options)
    for i in range(3):
        part = slice(i, i + 1)
        assert mx.array_equal(attention(q[part], k[part], v[part], **options), together[part])
