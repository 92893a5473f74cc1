"""What is compiled for a GPU, and when."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import mlx.core as mx

from mlx_qlayers import use_backend
from mlx_qlayers.conversion import compiled
from mlx_qlayers.runtime import health_checks, trace
from mlx_qlayers.runtime.backend import Mode, advance_epoch, current, mode


def test_graphs_belong_to_a_thread_a_stream_and_a_backend(monkeypatch):
    assert compiled.context() is None  # on a CPU nothing is compiled
    device, default_stream = mx.default_device(), mx.default_stream
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(mx, "default_stream", lambda _: default_stream(device))
    first = compiled.context()
    assert first == compiled.context()
    found = []
    thread = threading.Thread(target=lambda: found.append(compiled.context()))
    thread.start()
    thread.join()
    with mx.stream(mx.new_stream(mx.cpu)):
        found.append(compiled.context())
    with use_backend("reference"):
        found.append(compiled.context())
    assert len({first, *found}) == 4 and compiled.context() == first
    with health_checks():
        assert compiled.context() is None
    with trace():
        assert compiled.context() is None
    with mode(Mode.INFERENCE):
        assert compiled.context() is None
    advance_epoch()
    assert compiled.context() != first


def test_operations_are_compiled_once_for_their_static_arguments_and_a_context():
    made = []

    @compiled.operation
    def scaled(factor):
        """Documented."""
        made.append(factor)
        return lambda x, y: x * factor + (0 if y is None else y)

    x = mx.array([1.0, 2.0])
    assert scaled.__doc__ == "Documented."
    here = "reference", threading.get_ident(), "stream"
    for where, factor in ((None, 2), (None, 2), (here, 2), (here, 2), (here, 3)):
        assert scaled(where, factor)(x, None).tolist() == [factor, 2 * factor]
    assert scaled(here, 3)(x, x).tolist() == [4, 8]
    assert made == [2, 2, 3]


def test_a_graph_is_traced_for_each_shape_up_to_a_number_of_them(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_SHAPES", 2)
    calls = []

    @compiled.operation
    def squared():
        return lambda x, y: calls.append(x.shape) or x * x

    graph = squared(("here", 0))
    for _ in range(2):
        for n in (1, 2, 3):
            assert graph(mx.full((n,), 3.0), None).tolist() == [9.0] * n
    assert calls == [(1,), (2,), (3,), (3,)]


def test_nodes_that_carry_gradients_are_in_a_graph_only_where_one_is_taken():
    modes = []

    @compiled.operation
    def squared():
        return lambda x, y: modes.append(current.get().mode) or x * x

    graph, x = squared(("there", 0)), mx.array([3.0])
    assert graph(x, None).item() == graph(x, None).item() == 9.0
    assert modes == [Mode.INFERENCE]
    assert mx.grad(lambda x: graph(x, None).sum())(x).item() == 6.0
    assert set(modes[1:]) == {Mode.TRANSFORMED}
