"""Fine-tuning the shipped model with mlx-lm's own trainer, converted and stock."""

from collections import Counter
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
from mlx_qlayers.runtime.transformed import uncompiled
from tests.numerics import assert_same_losses

STEPS, SEQUENCES = 5, 1
LAYERS = 14  # linear ones; the tied output is one more product


def shipped() -> tuple[nn.Module, object]:
    """Two layers of the model."""
    model, tokenizer = load(str(shipped_model()))
    del model.model.layers[2:]
    return model, tokenizer


def adapted(convert: bool, directory: Path) -> tuple[nn.Module, list[float]]:
    """The model in float32 with adapters in every linear layer, trained, and its losses."""
    model, tokenizer = shipped()
    model.set_dtype(mx.float32)
    if convert:
        convert_model(model, config=shipped_model())
    model.freeze()
    mx.random.seed(7)
    linear_to_lora_layers(model, 2, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    return model, curve(model, tokenizer, directory, 2 * STEPS, SEQUENCES)


@pytest.mark.slow
def test_the_loss_curve_of_compiled_steps(tmp_path):
    """Where ``mx.compile`` traces the step, as mlx-lm has it, the host backend cannot run."""
    _, stock = adapted(False, tmp_path)
    assert_learned(stock, SEQUENCES, 0.6)
    explain(reset=True)
    model, found = adapted(True, tmp_path)
    assert_same_losses(found, stock)
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(adapters) == LAYERS and all(type(m.linear) is QLinear for m in adapters)
    assert sum(d.calls for d in explain() if d.op == "quantized_matmul") >= LAYERS + 1


@pytest.fixture
def launch_by_launch():
    with use_backend("host"), uncompiled():
        yield


@pytest.mark.slow
def test_the_loss_curve_of_all_parameters(tmp_path, launch_by_launch):
    """Attention and its gradient by kernels in a dense model, of which every weight learns."""
    losses = []
    for convert in (False, True):
        model, tokenizer = shipped()
        dequantize_model(model)
        model.set_dtype(mx.float32)
        if convert:
            rows = convert_model(model, linear=False).rows
            assert sum(r.kind == "attention" and r.action == "swapped" for r in rows) == 2
        with trace() as launches:
            losses.append(curve(model, tokenizer, tmp_path, STEPS, SEQUENCES))
    assert_learned(losses[0], SEQUENCES, 0.7)
    assert_same_losses(*losses)
    counts = Counter(launch.kernel for launch in launches)
    parts = "forward", "backward_queries", "backward_keys"
    assert min(counts[f"attention_{part}"] for part in parts) >= 2 * STEPS
