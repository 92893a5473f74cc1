"""The memory of a training, foretold, against what mlx-lm's trainer then takes."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, iterate_batches, train
from training.test_fused_loss import adapted, small

from mlx_qlayers import fused_loss, recompute_activations, use_backend
from mlx_qlayers.runtime.memory import return_memory
from mlx_qlayers.training.plan import Usage, in_least_memory, plan

BATCH, LENGTH = 4, 127


@pytest.mark.parametrize("layers", [False, True])
def test_a_plan_is_within_a_tenth_of_what_is_measured(layers, tmp_path):
    mx.random.seed(2)
    model = adapted(small(words=200, layers=4))
    recompute_activations(model, layers=layers)
    loss, optimizer = fused_loss(model), optim.Adam(learning_rate=1e-3)
    before = [mx.array(a) for _, a in tree_flatten(model.parameters())]
    with use_backend("reference"):
        found = plan(model, optimizer, loss, BATCH, LENGTH)
        after = [a for _, a in tree_flatten(model.parameters())]
        assert all(map(mx.array_equal, before, after))
        del before, after
        mx.eval(model.parameters())
        return_memory()
        others = mx.get_active_memory() - found.weights - found.adapters
        file = str(tmp_path / "adapters.safetensors")
        args = TrainingArgs(BATCH, 2, max_seq_length=LENGTH + 1, adapter_file=file)
        data, batches = [([*range(LENGTH + 1)], 0)] * BATCH, in_least_memory(iterate_batches)
        train(model, optimizer, data, None, args, loss, batches)
    measured = mx.get_peak_memory() - others
    assert found.total() == pytest.approx(measured, rel=0.1)
    parts = found.weights + found.adapters + found.optimizer
    assert found.optimizer == pytest.approx(2 * found.adapters, rel=0.01) and parts < measured


def test_the_longest_sequences_that_fit():
    found = Usage(0, 0, 0, 0, 1, 100, (500.0, 20.0, 0.25))
    assert found.total() == 500 + 2000 + 2500
    assert found.longest(5000) == 100 and found.longest(4999) == 99
    assert found.longest(100) == 0
