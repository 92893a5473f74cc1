"""Fine-tuning the shipped model with mlx-lm's own trainer, converted and stock."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from fine_tuning import assert_learned, curve
from mlx_lm import load
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import dequantize_model

from mlx_qlayers import QLinear, convert_model, explain, use_backend
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.runtime import trace
from tests.numerics import assert_same_losses

STEPS, SEQUENCES = 5, 1
LAYERS = 42  # linear ones; the tied output is one more product


def adapted(convert: bool, directory: Path) -> tuple[nn.Module, list[float]]:
    """The model in float32 with adapters in every linear layer, trained, and its losses."""
    model, tokenizer = load(str(shipped_model()))
    model.set_dtype(mx.float32)
    if convert:
        convert_model(model, config=shipped_model())
    model.freeze()
    mx.random.seed(7)
    linear_to_lora_layers(model, 6, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    return model, curve(model, tokenizer, directory, STEPS, SEQUENCES)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    _, losses = adapted(False, tmp_path_factory.mktemp("stock"))
    assert_learned(losses, SEQUENCES, 0.6)
    return losses


@pytest.mark.slow
def test_the_loss_curve_of_compiled_steps(tmp_path, stock):
    """Where ``mx.compile`` traces the step, as mlx-lm has it, the host backend cannot run."""
    explain(reset=True)
    model, found = adapted(True, tmp_path)
    assert_same_losses(found, stock)
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(adapters) == LAYERS and all(type(m.linear) is QLinear for m in adapters)
    assert sum(d.calls for d in explain() if d.op == "quantized_matmul") >= LAYERS + 1


@pytest.fixture
def launch_by_launch():
    mx.disable_compile()
    with use_backend("host"):
        yield
    mx.enable_compile()


def kernels(launches: list, *names: str) -> list[int]:
    """How often the kernels ran whose names begin like these."""
    return [sum(launch.kernel.startswith(name) for launch in launches) for name in names]


ATTENTION = ("attention_forward", "attention_backward_queries", "attention_backward_keys")


@pytest.mark.slow
def test_the_loss_curve_by_kernels(tmp_path, stock, launch_by_launch):
    """Products, attention and both gradients by kernels, in each layer and step."""
    with trace() as launches:
        _, found = adapted(True, tmp_path)
    assert_same_losses(found, stock)
    assert {launch.backend for launch in launches} == {"host"}
    assert min(kernels(launches, *ATTENTION)) >= 6 * STEPS
    assert sum(kernels(launches, "qm", "qvm")) >= (LAYERS + 1) * STEPS


@pytest.mark.slow
def test_the_loss_curve_of_all_parameters(tmp_path, launch_by_launch):
    """Attention and its gradient by kernels in a dense model, of which every weight learns."""
    losses = []
    for convert in (False, True):
        model, tokenizer = load(str(shipped_model()))
        dequantize_model(model)
        model.set_dtype(mx.float32)
        if convert:
            rows = convert_model(model, linear=False).rows
            assert sum(r.kind == "attention" and r.action == "swapped" for r in rows) == 6
        with trace() as launches:
            losses.append(curve(model, tokenizer, tmp_path, STEPS, SEQUENCES))
    assert_learned(losses[0], SEQUENCES, 0.7)
    assert_same_losses(*losses)
    assert min(kernels(launches, *ATTENTION)) >= 6 * STEPS
