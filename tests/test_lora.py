"""Fine-tuning the shipped model with mlx-lm's own trainer, converted and stock."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_qlayers import QLinear, backend, convert_model, explain
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.runtime import trace

TEXT = Path(__file__).parents[1] / "models" / "data" / "grimms_fairy_tales.txt"
STEPS, SEQUENCES, TOKENS = 50, 10, 16
LAYERS = 42  # linear ones; the tied output is one more product


class Losses(TrainingCallback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_loss_report(self, train_info: dict) -> None:
        self.losses.append(train_info["train_loss"])


def adapted(convert: bool) -> tuple[nn.Module, list[list[int]]]:
    """The model in float32 with fresh adapters in every linear layer, and what it is trained on."""
    model, tokenizer = load(str(shipped_model()))
    model.set_dtype(mx.float32)
    if convert:
        convert_model(model, config=shipped_model())
    model.freeze()
    mx.random.seed(7)
    linear_to_lora_layers(model, 6, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    return model, tokenizer.encode(TEXT.read_text()[20_000:22_000])


def curve(convert: bool, directory: Path) -> tuple[nn.Module, list[float]]:
    """Train for ``STEPS`` steps, over and over on a few sequences: the model, and its losses."""
    model, text = adapted(convert)
    starts = range(0, (TOKENS + 1) * SEQUENCES, TOKENS + 1)
    sequences = [(text[i : i + TOKENS + 1], 0) for i in starts]
    args = TrainingArgs(
        batch_size=1,
        iters=STEPS,
        steps_per_report=1,
        steps_per_save=STEPS + 1,
        max_seq_length=TOKENS + 1,
        adapter_file=directory / "adapters.safetensors",
    )
    callback = Losses()
    np.random.seed(3)  # the order of the batches
    train(model, optim.Adam(learning_rate=3e-5), sequences, None, args, training_callback=callback)
    return model, callback.losses


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    _, losses = curve(False, tmp_path_factory.mktemp("stock"))
    first, last = losses[:SEQUENCES], losses[-SEQUENCES:]
    assert np.mean(last) < 0.6 * np.mean(first), "the stock model learns nothing"
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "launch by launch"])
def test_the_loss_curve_is_that_of_the_stock_model(tmp_path, stock, compiled):
    """Where ``mx.compile`` traces the step, as mlx-lm has it, the host backend cannot run."""
    explain(reset=True)
    if not compiled:
        mx.disable_compile()
    try:
        with trace() as launches:
            model, found = curve(True, tmp_path)
    finally:
        mx.enable_compile()
    np.testing.assert_allclose(found, stock, rtol=0.01)
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(adapters) == LAYERS and all(type(m.linear) is QLinear for m in adapters)
    products = sum(d.calls for d in explain() if d.op == "quantized_matmul")
    assert products >= (LAYERS + 1) * (1 if compiled else STEPS)
    ran = [launch for launch in launches if "quantized_matmul" in launch.kernel]
    if backend() == "host" and not compiled:
        assert len(ran) >= (LAYERS + 1) * STEPS and {launch.backend for launch in ran} == {"host"}
