"""Launches with the gradient of a composition, and without any where nobody takes one."""

from __future__ import annotations

import threading

import mlx.core as mx

from mlx_qlayers.ops.differentiable import with_gradient_of, without_gradients


def composed(x, pair, extra):
    return [x * pair[0] + (0 if extra is None else extra), x**2 * pair[1].astype(x.dtype)]


def launch(x, pair, extra):
    return composed(mx.stop_gradient(x), pair, extra)


run = with_gradient_of(composed, launch)
X, PAIR = mx.array([1.0, 2.0]), (mx.array([3.0, 4.0]), mx.array([5, 6], mx.uint32))


def total(x, pair, extra=None):
    return sum(y.sum() for y in run(x, pair, extra))


def test_gradients_of_trees():
    assert [y.tolist() for y in run(X, PAIR, None)] == [[3, 8], [5, 24]]
    gradients = mx.grad(total, argnums=(0, 1, 2))(X, PAIR, mx.array([7.0, 8.0]))
    assert gradients[0].tolist() == [3 + 10, 4 + 24]
    assert gradients[1][0].tolist() == [1, 2] and gradients[1][1].tolist() == [0, 0]
    assert gradients[1][1].dtype == mx.uint32 and gradients[2].tolist() == [1, 1]


def test_without_gradients_only_the_launch_is_made():
    with without_gradients():
        assert mx.grad(total)(X, PAIR).tolist() == [0, 0]
    assert mx.grad(total)(X, PAIR).tolist() == [13, 28]


def test_the_state_is_that_of_a_thread_and_nests():
    found = []

    def other():
        found.append(mx.grad(total)(X, PAIR).tolist())

    with without_gradients():
        with without_gradients():
            pass
        assert mx.grad(total)(X, PAIR).tolist() != [13, 28]
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [[13, 28]] and mx.grad(total)(X, PAIR).tolist() == [13, 28]
