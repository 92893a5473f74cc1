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

from mlx_qlayers import QLinear, convert_model, explain
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.runtime import trace

TEXT = Path(__file__).parents[1] / "models" / "data" / "grimms_fairy_tales.txt"
STEPS, SEQUENCES = 50, 10


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
    return model, tokenizer.encode(TEXT.read_text()[20_000:60_000])


def curve(convert: bool, tokens: int, directory: Path) -> tuple[nn.Module, list[float]]:
    """Train ``STEPS`` steps on sequences of so many tokens; the losses."""
    model, text = adapted(convert)
    starts = range(0, (tokens + 1) * SEQUENCES, tokens + 1)
    sequences = [(text[i : i + tokens + 1], 0) for i in starts]
    args = TrainingArgs(
        batch_size=1,
        iters=STEPS,
        steps_per_report=1,
        steps_per_save=STEPS + 1,
        max_seq_length=tokens + 1,
        adapter_file=directory / "adapters.safetensors",
    )
    callback = Losses()
    np.random.seed(3)  # the order of the batches
    train(model, optim.Adam(learning_rate=3e-5), sequences, None, args, training_callback=callback)
    return model, callback.losses


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 32])
def test_the_loss_curve_is_that_of_the_stock_model(tmp_path, tokens):
    _, stock = curve(False, tokens, tmp_path)
    explain(reset=True)
    with trace() as launches:
        model, found = curve(True, tokens, tmp_path)
    assert len(found) == STEPS
    print(stock)
    assert np.mean(stock[-SEQUENCES:]) < 0.9 * np.mean(stock[:SEQUENCES]), "stock learns nothing"
    np.testing.assert_allclose(found, stock, rtol=0.01)
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert adapters and all(type(m.linear) is QLinear for m in adapters)
    print(len(adapters), len(launches), *explain(), sep="\n")
