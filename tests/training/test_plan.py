"""The memory of a training, foretold, against what mlx-lm's trainer then takes."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train
from training.test_fused_loss import adapted, small

from mlx_qlayers import convert_model, fused_loss, recompute_activations, use_backend
from mlx_qlayers.runtime.memory import return_memory
from mlx_qlayers.runtime.transformed import uncompiled
from mlx_qlayers.training.plan import Usage, in_least_memory, plan

BATCH = 4


@pytest.mark.parametrize(
    ("backend", "layers", "length"),
    [("reference", False, 63), ("reference", True, 63), ("host", False, 63)],
)
def test_a_plan_is_within_a_tenth_of_what_is_measured(backend, layers, length, tmp_path):
    """On a CPU of quantized weights by kernels, and of the longest sequences that fit, too."""
    mx.random.seed(2)
    by_kernels = backend == "host"
    # Many layers elsewhere, as MLX takes an array more than its limit.
    model = small(words=200, layers=4 if by_kernels else 12)
    if by_kernels:
        nn.quantize(model)
    adapted(model)
    if by_kernels:
        convert_model(model, calibrate=False)
    loss, optimizer = fused_loss(model), optim.Adam(learning_rate=1e-3)
    before = [mx.array(a) for _, a in tree_flatten(model.parameters())]
    batches = iterate_batches if by_kernels else in_least_memory(iterate_batches)
    with use_backend(backend), uncompiled(by_kernels):  # as mlx-qlayers lora trains
        recompute_activations(model, layers=layers)
        found = plan(model, optimizer, loss, BATCH, length)
        after = [a for _, a in tree_flatten(model.parameters())]
        assert all(map(mx.array_equal, before, after))
        del before, after
        mx.eval(model.parameters())
        return_memory()
        others = mx.get_active_memory() - found.weights - found.adapters
        room = 1.5 * found.total()
        for size in (length, found.longest(room)) if by_kernels else (length,):
            mx.reset_peak_memory()
            file = str(tmp_path / "adapters.safetensors")
            args = TrainingArgs(BATCH, 2, max_seq_length=size + 1, adapter_file=file)
            train(model, optimizer, [([*range(size + 1)], 0)] * BATCH, None, args, loss, batches)
            measured = mx.get_peak_memory() - others
            assert found.total(size) == pytest.approx(measured, rel=0.1) and measured < room
    parts = found.weights + found.adapters + found.optimizer
    assert found.optimizer == pytest.approx(2 * found.adapters, rel=0.01) and parts < measured


def test_the_longest_sequences_that_fit():
    found = Usage(0, 0, 0, 0, 1, 100, (500.0, 20.0, 0.25))
    assert found.total() == 500 + 2000 + 2500
    assert found.longest(5000) == 100 and found.longest(4999) == 99
    assert found.longest(100) == 0


def test_a_step_that_was_compiled_before_a_plan_still_runs():
    model = small(words=50, layers=1)
    loss, optimizer = fused_loss(model), optim.Adam(learning_rate=1e-3)
    optimizer.init(model.trainable_parameters())
    gradients, state = nn.value_and_grad(model, loss), [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step():
        (value, _), found = gradients(model, mx.zeros((2, 17), mx.int32), mx.array([[1, 16]] * 2))
        optimizer.update(model, found)
        return value

    plan(model, optimizer, loss, 2, 16)
    assert step().item() > step().item() and optimizer.step.item() == 2
