"""What a call of attention costs Python: it is checked and planned once for all that are alike."""

import sys

import mlx.core as mx
import pytest

from mlx_qlayers import attention, explain, use_backend
from mlx_qlayers.metal.attention import decode
from mlx_qlayers.metal.attention.records import AttentionDecodeRecord
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime.spec import Spec

Q, K = mx.ones((1, 4, 1, 64)), mx.ones((1, 2, 8, 64))
PACKED = tuple(mx.quantize(K, 64, 8))
SEEN = mx.ones((1, 1, 1, 8), mx.bool_)


def test_numbers_of_other_types_are_checked_again():
    attention(Q, K, K, scale=1.0, window=2)
    with pytest.raises(ValueError, match=r"window must be .* or None, not 2\.0"):
        attention(Q, K, K, scale=1.0, window=2.0)


def test_the_parts_of_packed_keys_may_be_lists():
    expected = attention(Q, PACKED, PACKED, scale=1.0)
    for k, v in ((list(PACKED), list(PACKED)), (list(PACKED), PACKED)):
        assert mx.array_equal(attention(Q, k, v, scale=1.0), expected)


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
    with use_backend("host"):
        attention(Q, K, K, scale=1.0)
    rows = [(d.op, d.path, d.calls) for d in explain()]
    assert ("attention", "host", 1) in rows and ("kernel attention_serial", "host", 1) in rows
    assert sum(calls for op, _, calls in rows if op == "attention") == 4


KEYS = mx.ones((1, 2, 64, 64))
CACHE = mx.ones((1, 2, 256, 64))[:, :, :64]
CALLS = {
    "decode": ((Q, KEYS, KEYS), {}),
    "decode from a cache": ((Q, CACHE, CACHE), {}),
    "decode with a mask": ((Q, KEYS, KEYS), {"mask": mx.ones((1, 1, 1, 64), mx.bool_)}),
    "decode of packed keys": ((Q, *[tuple(mx.quantize(KEYS, 64, 8))] * 2), {}),
    "prefill": ((mx.ones((1, 4, 16, 64)), KEYS, KEYS), {"mask": "causal"}),
    "prefill with sinks": ((mx.ones((1, 4, 16, 64)), KEYS, KEYS), {"sinks": mx.ones(4)}),
}


def called(call):
    """The Python functions that a call enters."""
    frames = []
    sys.setprofile(lambda frame, event, _: event == "call" and frames.append(frame.f_code))
    call()
    sys.setprofile(None)
    return frames[1:]  # without that of the call


@pytest.mark.parametrize("path", ["host", "reference"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_like_one_before_is_eight_calls_of_python_functions(case, path):
    arrays, options = CALLS[case]
    with use_backend(path):
        for _ in range(2):
            mx.eval(attention(*arrays, scale=0.1, **options))
        frames = called(lambda: attention(*arrays, scale=0.1, **options))
    assert len(frames) <= 8, [f"{code.co_filename}:{code.co_name}" for code in frames]


def test_a_split_of_the_keys_makes_two_launches_of_one_function():
    """Besides attention and what dispatches it, which are four functions on a CPU."""
    q, k = Spec.of(Q), (Spec((1, 2, 512, 64), mx.float32),)
    config = AttentionDecodeRecord(mx.float32, 2, 64, 64, 0, 1, 512).heuristic("cuda")
    assert config.splits(512) > 1
    keys = mx.ones(k[0].shape)
    with use_backend("host"):
        run = decode.attention_decode(AttentionCall(q, k, k, Scores(0.1)), config)
        run(Q, keys, keys, None, None)
        frames = called(lambda: run(Q, keys, keys, None, None))
    assert len(frames) <= 8 - 4
