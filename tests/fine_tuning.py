"""mlx-lm's own trainer over a few sequences of the tales, and the losses that it reports."""

from pathlib import Path

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import TrainingArgs, train

TEXT = Path(__file__).parents[1] / "models" / "data" / "grimms_fairy_tales.txt"
TOKENS = 16


class Losses(TrainingCallback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_loss_report(self, train_info: dict) -> None:
        self.losses.append(train_info["train_loss"])


def curve(
    model: nn.Module, tokenizer: object, directory: Path, steps: int, sequences: int
) -> list[float]:
    """The loss of every step, over and over on so many sequences."""
    return losses(
        model, tokenizer.encode(TEXT.read_text()[20_000:22_000]), directory, steps, sequences
    )


def losses(
    model: nn.Module, text: list[int], directory: Path, steps: int, sequences: int, batch: int = 1
) -> list[float]:
    """The same on a text in tokens, with so many sequences a batch, of all ranks together."""
    starts = range(0, (TOKENS + 1) * sequences, TOKENS + 1)
    args = TrainingArgs(
        batch_size=batch,
        iters=steps,
        steps_per_report=1,
        steps_per_save=steps + 1,
        max_seq_length=TOKENS + 1,
        adapter_file=directory / "adapters.safetensors",
    )
    callback = Losses()
    np.random.seed(3)  # the order of the batches
    data = [(text[i : i + TOKENS + 1], 0) for i in starts]
    train(model, optim.Adam(learning_rate=3e-5), data, None, args, training_callback=callback)
    return callback.losses


def assert_learned(losses: list[float], sequences: int, share: float) -> None:
    """Hold the last losses of all sequences against the first ones."""
    first, last = losses[:sequences], losses[-sequences:]
    assert np.mean(last) < share * np.mean(first), "the stock model learns nothing"
