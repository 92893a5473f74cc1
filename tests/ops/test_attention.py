"""Attention beyond the table: when no kernel is taken, masks of one number, split launches."""

from collections import Counter

import mlx.core as mx
import pytest
from attention_cases import make

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.runtime import explain, trace, use_backend
from mlx_qlayers.runtime.backend import advance_epoch
from tests.devices import has_device


@pytest.fixture(autouse=True)
def on_the_reference_path():
    with use_backend("reference"):
        yield


@pytest.mark.parametrize(
    "width, v_width, scale, why",
    [
        (36, 40, 1.0, "heads of 36 and 40"),
        (24, 24, 1.0, "heads of 24"),
        (264, 64, 1.0, "heads of 264"),
        (64, 0, 1.0, "nothing to compute"),
        (64, 64, 0.0, "a scale of 0"),
        (64, 64, -1.0, "a scale of -1"),
        (64, 64, 1.0, "on a "),
    ],
)
def test_auto_says_why_it_takes_no_kernel(width, v_width, scale, why, machine):
    q, v = (mx.ones((1, 2, 20, n)) for n in (width, v_width))
    explain(reset=True)
    machine("host")
    with use_backend("auto"):
        attention(q, q, v, scale=scale)
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


def test_the_parts_of_packed_keys_may_be_lists():
    q, packed = mx.ones((1, 4, 1, 64)), mx.quantize(mx.ones((1, 2, 8, 64)), 64, 8)
    expected = attention(q, tuple(packed), tuple(packed), scale=1.0)
    for k, v in ((list(packed), list(packed)), (list(packed), tuple(packed))):
        assert mx.array_equal(attention(q, k, v, scale=1.0), expected)


def test_no_array_is_kept():
    keys = mx.zeros((1, 2, 4096, 64))
    mx.eval(attention(mx.ones((1, 4, 1, 64)), keys, keys, scale=1.0))
    before, size = mx.get_active_memory(), keys.nbytes
    del keys
    assert before - mx.get_active_memory() >= size
