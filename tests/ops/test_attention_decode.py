"""What a call of attention keeps for those that are alike, and which path `auto` takes on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention, explain, use_backend
from mlx_qlayers.dispatch.entries import advance_epoch
from mlx_qlayers.ops import attention as ops
from mlx_qlayers.ops import attention_decode
from mlx_qlayers.ops.differentiable import without_gradients

Q, K = mx.ones((1, 4, 1, 64)), mx.ones((1, 2, 8, 64))
PACKED = tuple(mx.quantize(K, 64, 8))
MASK = mx.ones((1, 1, 1, 8), mx.bool_)


@pytest.fixture(autouse=True)
def nothing_known():
    advance_epoch()
    assert not ops._known
    yield
    advance_epoch()


def test_a_call_is_checked_once_for_all_that_are_alike(monkeypatch):
    checked = []
    monkeypatch.setattr(ops, "_checked", lambda *a: checked.append(a) or (lambda *given: given[0]))
    for scale in (1.0, 1.0, 2.0):
        attention(Q, K, K, scale=scale)
        attention(Q + 1, K + 1, K, scale=scale)
        attention(Q, PACKED, PACKED, scale=scale, mask=MASK)
    assert len(checked) == 4
    attention(Q.astype(mx.float16), K, K, scale=1.0)
    attention(Q, K[:, :, 1:], K[:, :, 1:], scale=1.0)
    attention(Q, K, K, scale=1.0, sinks=mx.zeros(4))
    with without_gradients():
        attention(Q, K, K, scale=1.0)
    with use_backend("ops"):
        attention(Q, K, K, scale=1.0)
    assert len(checked) == 9
    advance_epoch()  # What was tuned has changed.
    attention(Q, K, K, scale=1.0)
    assert len(checked) == 10


def test_calls_that_take_turns_are_told_apart(monkeypatch):
    monkeypatch.setattr(ops, "_checked", lambda q, *_: lambda *given: q.shape)
    others = mx.ones((1, 4, 2, 64))
    for q in (Q, Q, Q, others, others, others, Q, others):
        assert attention(q, K, K, scale=1.0) == q.shape
    monkeypatch.setattr(ops, "_checked", lambda *_: lambda *given: "new")
    advance_epoch()
    assert attention(others, K, K, scale=1.0) == "new"


def test_numbers_of_other_types_are_checked_again():
    attention(Q, K, K, scale=1.0, window=2)
    with pytest.raises(ValueError, match=r"window must be .* or None, not 2\.0"):
        attention(Q, K, K, scale=1.0, window=2.0)
    with pytest.raises(ValueError, match=r"v must be an mx\.array"):
        attention(Q, K, [K], scale=1.0)


def test_what_only_looks_like_the_last_call_is_checked():
    for _ in range(2):
        attention(Q, K, K, scale=1.0)
    for wrong, arguments in {
        "q must be an mx.array": (np.ones(Q.shape, np.float32), K, K, 1.0),
        "k must be float32": (Q, K.astype(mx.int32), K, 1.0),
        "v must be": (Q, K, K[:, :, 1:], 1.0),
        "scale must be a number": (Q, K, K, mx.array(1.0)),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            attention(*arguments[:3], scale=arguments[3])


def test_the_parts_of_packed_keys_may_be_a_list():
    expected = attention(Q, PACKED, PACKED, scale=1.0)
    for _ in range(2):
        assert mx.array_equal(attention(Q, [*PACKED], [*PACKED], scale=1.0), expected)


def test_no_array_is_kept():
    keys = mx.zeros((1, 2, 4096, 64))
    mx.eval(attention(Q, keys, keys, scale=1.0))
    before = mx.get_active_memory()
    size = keys.nbytes
    del keys
    assert before - mx.get_active_memory() >= size


def test_every_call_is_explained():
    explain(reset=True)
    for _ in range(3):
        attention(Q, K, K, scale=1.0)
    assert sum(d.calls for d in explain() if d.op == "attention") == 3


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_where_auto_leaves_stock_alone(device, monkeypatch):
    monkeypatch.setattr(attention_decode, "backend", lambda: device)

    def why(keys=K, packed=False, mask=None):
        return attention_decode._why_stock(Q, keys, packed, mask)

    if device == "metal":
        assert why() == why(packed=True) == "the kernel was not measured on an Apple GPU"
        return
    assert "launched faster" in why()
    assert why(packed=True) is None and why(mask=MASK) is None
    assert why(keys=SimpleNamespace(shape=(1, 4, 1 << 19, 64))) is None
    with without_gradients():
        assert why() is None


def test_the_stock_operator_is_called_at_once(monkeypatch):
    """Where `auto` takes it on a GPU, the way there is short: half of its time is Python's."""
    monkeypatch.setattr(attention_decode, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(attention_decode, "decide", None)
    explain(reset=True)
    found = attention(Q, K, K, scale=0.5, mask="causal")
    monkeypatch.undo()
    assert mx.array_equal(found, mx.fast.scaled_dot_product_attention(Q, K, K, scale=0.5))
    assert [(d.path, d.calls) for d in explain()] == [("ops", 1)]
