"""Plans are made once for a key, called by all calls that are alike, and never for others."""

import re
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.dispatch import Choice, Operation, Plan, dispatch, dispatcher
from mlx_qlayers.runtime.backend import Mode, advance_epoch, current, mode
from mlx_qlayers.runtime.explain import recording
from tests import machine
from tests.numerics import assert_same_sums, random


@pytest.fixture
def on_a_gpu():
    """Let plans be compiled as on a GPU, on the path that can be compiled here."""
    with machine.on_a_gpu(), use_backend("reference"):
        yield


def operation(made, compiled=False):
    """Twice its argument, which adds the specs of every plan to a list."""

    def plan(specs, factor=2):
        made.append((specs, factor, current.get().mode))
        return Plan(Choice("test", "reference", "a test"), lambda x: factor * x)

    return Operation("test", plan, compiled)


def problem(rows: int = 3):
    rng = np.random.default_rng(rows)
    return random(rng, (rows, 128)), mx.quantize(random(rng, (40, 128)))


def test_one_plan_for_a_key():
    made = []
    twice = operation(made)
    for _ in range(3):
        for size, dtype in ((3, mx.float32), (4, mx.float32), (3, mx.float16)):
            assert dispatch(twice, (mx.ones(size, dtype),)).tolist() == [2] * size
    assert len(made) == 3
    for factor in (4, 4.0, True, 4):
        dispatch(twice, (mx.ones(3),), (factor,))
    assert [factor for _, factor, _ in made[3:]] == [4, 4.0, True]
    assert [type(factor) for _, factor, _ in made[3:]] == [int, float, bool]


def test_what_a_plan_depends_on_makes_another():
    made, x = [], mx.ones(3)
    twice = operation(made)
    dispatch(twice, (x,))
    with use_backend("reference"):
        dispatch(twice, (x,))
    with mode(Mode.INFERENCE):
        dispatch(twice, (x,))
    thread = threading.Thread(target=dispatch, args=(twice, (x,)))
    thread.start()
    thread.join()
    advance_epoch()
    dispatch(twice, (x,))
    assert len(made) == 5
    graph = operation(made, compiled=True)
    dispatch(graph, (x,))
    with mx.stream(mx.new_stream(mx.cpu)):
        dispatch(graph, (x,))
    assert len(made) == 7
    dispatch(twice, (x,))
    assert len(made) == 7


def test_plans_are_bounded():
    made = []
    twice = operation(made)
    for size in range(dispatcher.MAX_PLANS + 2):
        dispatch(twice, (mx.zeros((0, size)),))
    assert dispatcher._plan.cache_info().currsize <= dispatcher.MAX_PLANS
    dispatch(twice, (mx.zeros((0, 0)),))  # made anew
    assert len(made) == dispatcher.MAX_PLANS + 3


def test_compiled_once_for_every_shape(on_a_gpu):
    made = []
    twice = operation(made, compiled=True)
    for size in (3, 4, 3, 4):
        assert dispatch(twice, (mx.ones(size),)).tolist() == [2.0] * size
    assert [mode for _, _, mode in made] == [Mode.COMPILED] * 2


def test_a_compiled_product_and_its_gradients(on_a_gpu):
    x, packed = problem()

    def loss(function):
        return lambda x, scales: mx.sin(function(x, packed[0], scales, packed[2])).sum()

    for _ in range(2):  # compiled, then as compiled before
        y, stock = quantized_matmul(x, *packed), mx.quantized_matmul(x, *packed)
        assert mx.array_equal(y, stock)
        ours, theirs = (
            mx.grad(loss(f), (0, 1))(x, packed[1]) for f in (quantized_matmul, mx.quantized_matmul)
        )
        assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    compiled = mx.compile(mx.grad(loss(quantized_matmul)))
    assert_same_sums(compiled(x, packed[1]), ours[0])


def test_every_call_is_counted_once(on_a_gpu):
    x, packed = problem()
    quantized_matmul(x, *packed)
    explain(reset=True)
    for _ in range(3):
        quantized_matmul(x, *packed)
    mx.grad(lambda x: quantized_matmul(x, *packed).sum())(x)
    calls = {d.op: d.calls for d in explain()}
    assert calls == {"quantized_matmul": 4}


def test_a_gradient_counts_the_choice_that_was_made_for_it(on_a_gpu):
    def plan(specs):
        return Plan(Choice("test", "reference", current.get().mode.name), lambda x: 2 * x)

    twice, x = Operation("test", plan, compiled=True), mx.ones(3)
    explain(reset=True)

    def counts():
        return {d.reason: d.calls for d in explain(reset=True) if d.op == "test"}

    for _ in range(2):
        dispatch(twice, (x,))
        assert counts() == {"COMPILED": 1}
        mx.grad(lambda x: dispatch(twice, (x,)).sum())(x)
        assert counts() == {"TRANSFORMED": 1}
    with recording() as rows:
        mx.grad(lambda x: dispatch(twice, (x,)).sum())(x)
    assert [row.key[2] for row in rows] == ["TRANSFORMED"]
    assert not counts()


def test_shapes_of_arrays_are_told_apart():
    """The same extents, cut elsewhere, or an array that is left out."""
    made = []

    def plan(specs):
        made.append([None if spec is None else spec.shape for spec in specs])
        return Plan(None, lambda *arrays: len(arrays))

    pair = Operation("pair", plan)
    given = [(mx.ones((2, 3)), mx.ones(4)), (mx.ones(2), mx.ones((3, 4))), (mx.ones((2, 3)), None)]
    for arrays in given * 2:
        dispatch(pair, arrays)
    assert made == [[(2, 3), (4,)], [(2,), (3, 4)], [(2, 3), None]]


def test_what_is_no_array_is_named():
    x, (w, _, biases) = problem()
    named = "arrays of MLX, not (array, array, str, array, None, None)"
    with pytest.raises(TypeError, match=re.escape(named)):
        quantized_matmul(x, w, "x", biases)


def test_options_that_cannot_be_a_key():
    x, packed = problem()
    y = quantized_matmul(x, *packed, transpose=[1])
    assert mx.array_equal(y, quantized_matmul(x, *packed))
