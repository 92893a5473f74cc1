"""Measuring behind a gate, with MLX's own operators in place of kernels."""

import mlx.core as mx
import pytest

from mlx_qlayers.tuning import gate, judge
from mlx_qlayers.tuning.families.few_rows import FewRowsFamily
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import Measured, judge_of

PROBLEM = Problem((1, 256, 512), mx.float32, "affine-64-4-t")


class Stock(FewRowsFamily):
    """A family without kernels of its own; one of its configurations takes long."""

    def run(self, inputs, problem, config):
        x, w, scales, biases = inputs
        y = mx.quantized_matmul(x, w, scales, biases)
        for _ in range(10 if config.outputs == 1 else 0):
            y = mx.quantized_matmul(x + 1e-30 * y[:, :1], w, scales, biases)
        return y

    def paths(self, problem):
        fast = self.heuristic(problem, "cuda")
        return {"stock": lambda inputs: self.run(inputs, problem, fast)}


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(judge, "backend", lambda: "cuda")
    monkeypatch.setattr(judge, "_COLD", 1 << 19)
    monkeypatch.setattr(gate, "_LARGEST", 512)
    monkeypatch.setattr(gate, "_MOST", 1e-3)
    found = judge_of(Stock(), PROBLEM)
    assert isinstance(found, Measured)
    return found


def test_what_takes_longer_is_rated_so(measured):
    fast = measured.family.heuristic(PROBLEM, "cuda")
    slow = next(c for c in measured.family.near(fast, PROBLEM) if c.outputs == 1)
    assert measured.attempt(fast).problem == ""
    (first, second), paths = measured.compare([fast, slow])
    assert second > 3 * max(first, paths["stock"]) and set(paths) == {"stock"}
    assert measured.rate(slow) > 3 * first


def test_every_launch_has_a_set_of_its_own_and_waits_for_the_last(measured):
    assert len(measured.sets) > 2
    ran = []

    def path(inputs):
        ran.append(inputs[1:])
        return inputs[0] + 1

    run = measured._chain(path)
    run(mx.zeros((1, 1)))
    assert [list(map(id, others)) for others in ran] == [
        list(map(id, others)) for _, *others in measured.sets
    ]
