"""Trains the small Qwen2 model that ships with the repository, from the texts in models/data.

    python models/train.py                        # the model as shipped; minutes on a GPU
    python models/card.py                         # its model card, with samples
    python models/train.py --smoke --out /tmp/m   # seconds on a CPU

A run can be interrupted at any point and started again with the same options: it goes on from
its last checkpoint, and ends with the weights of an uninterrupted run.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from corpus import Sampler, Text, encode, encode_copies, read_plays, read_tales, train_tokenizer
from evaluate import figures, score, total_loss
from export import export, measure, model_config
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.qwen2 import ModelArgs
from network import TrainingModel, compiled_losses, init_parameters, token_losses
from numpy.typing import NDArray
from settings import SMOKE, Settings, add_options, from_options
from tokenizers import Tokenizer
from tqdm import tqdm

HERE = Path(__file__).parent


def prepare(
    settings: Settings,
) -> tuple[Tokenizer, Sampler, dict[str, tuple[NDArray[np.int32], int]]]:
    """Return the tokenizer, the training sampler, and the held-out streams with their sizes."""
    texts = [read_tales(), read_plays()]
    if settings.limit_bytes:
        texts = [_shorten(text, settings.limit_bytes) for text in texts]
    tokenizer = train_tokenizer(texts, settings.vocab)
    sampler = Sampler(
        plain=[encode(tokenizer, text.train) for text in texts],
        varied=[
            encode_copies(tokenizer, t.train, settings.copies, settings.bpe_dropout, settings.seed)
            for t in texts
        ],
        weights=[settings.tales_weight, 1 - settings.tales_weight],
        seed=settings.seed,
    )
    valid = {
        text.name: (encode(tokenizer, text.valid), sum(len(d.encode()) for d in text.valid))
        for text in texts
    }
    return tokenizer, sampler, valid


def _shorten(text: Text, size: int) -> Text:
    train, valid = ("\n".join(part) for part in (text.train, text.valid))
    return Text(text.name, [train[:size]], [valid[: size // 10]])


def make_step(
    model: TrainingModel, optimizer: optim.Optimizer, settings: Settings, quantized: bool
) -> Callable[..., tuple[mx.array, Any, Any]]:
    """Return a compiled `(params, average, tokens, decay) -> loss, params, average`."""

    def loss(params: Any, tokens: mx.array) -> mx.array:
        model.train()
        return token_losses(model, params, tokens, settings.compute_dtype, quantized).mean()

    def step(params: Any, average: Any, tokens: mx.array, decay: mx.array) -> Any:
        value, gradients = mx.value_and_grad(loss)(params, tokens)
        # A norm is summed in the order of the tree, which the optimizer makes that of a set.
        gradients = tree_unflatten(sorted(tree_flatten(gradients)))
        gradients, _ = optim.clip_grad_norm(gradients, settings.clip)
        params = optimizer.apply_gradients(gradients, params)
        average = tree_map(lambda a, p: decay * a + (1 - decay) * p, average, params)
        return value, params, average

    state = [optimizer.state, mx.random.state]
    return mx.compile(step, inputs=state, outputs=state)


def make_optimizer(settings: Settings) -> optim.MultiOptimizer:
    """Return AdamW that decays the matrices and leaves norms and biases alone."""
    decayed, plain = (
        optim.AdamW(settings.lr, betas=[0.9, 0.98], weight_decay=decay, bias_correction=True)
        for decay in (settings.weight_decay, 0.0)
    )
    return optim.MultiOptimizer([decayed, plain], [lambda _, p: p.ndim > 1])


def learning_rate(settings: Settings, step: int, progress: float) -> float:
    """Return the rate: a linear warm-up by steps, then a cosine by the fraction of the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    rate = settings.lr * (settings.min_lr + (1 - settings.min_lr) * cosine)
    return rate * min(1.0, (step + 1) / settings.warmup)


class Trainer:
    """The state of a run: parameters, their average, the best average so far, and the optimizer."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.path = folder / "checkpoint.safetensors"
        self.tokenizer, self.sampler, self.valid = prepare(settings)
        # Group-quantized layers want widths that are multiples of 64.
        vocab_size = -(-self.tokenizer.get_vocab_size() // 64) * 64
        end = int(self.sampler.plain[0][0])
        self.config = model_config(settings, vocab_size, end)
        self.model = TrainingModel(
            ModelArgs.from_dict(self.config), settings.dropout, settings.token_dropout
        )
        mx.random.seed(settings.seed)
        self.params = init_parameters(self.model)
        self.average = self.best = self.params
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(self.params)
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "history": []}
        self._quick_losses = compiled_losses(self.model, settings.compute_dtype, quantized=True)

    def fraction(self) -> float:
        """How much of the run is over, by its steps or its time limit."""
        step, seconds = self.progress["step"], self.progress["seconds"]
        limit = 60 * self.settings.minutes
        return max(step / self.settings.steps, seconds / limit if limit else 0.0)

    def save(self) -> None:
        """Write a checkpoint; the random state is a function of the step and needs no place."""
        arrays = {
            "params": self.params,
            "average": self.average,
            "best": self.best,
            "optimizer": self.optimizer.state,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(self.path, arrays, self.progress | {"settings": self.settings.to_dict()})

    def resume(self) -> bool:
        """Go on from the checkpoint if there is one; refuse that of a run with other settings."""
        if not self.path.exists():
            return False
        arrays, progress = checkpoint.load(self.path)
        if progress.pop("settings") != self.settings.to_dict():
            raise SystemExit(
                f"{self.path} belongs to a run with other settings: delete it, or name another "
                "folder with --checkpoints"
            )
        self.params, self.average, self.best = (arrays[k] for k in ("params", "average", "best"))
        self.optimizer.state = arrays["optimizer"]
        self.progress = progress
        return True

    def train(self, checkpoint_every: int) -> None:
        """Run to the end of the schedule, or until validation has stopped improving."""
        plain, rounded = (
            make_step(self.model, self.optimizer, self.settings, quantized)
            for quantized in (False, True)
        )
        started, pending = time.perf_counter() - self.progress["seconds"], None
        bar = tqdm(
            total=self.settings.steps, initial=self.progress["step"], unit="step", disable=None
        )
        with bar:
            while self.fraction() < 1 and not self._exhausted():
                step, late = self.progress["step"], self.fraction() >= 1 - self.settings.qat
                loss = self._step(rounded if late else plain, augment=not late)
                # One step is queued while the one before it is computed.
                mx.async_eval(loss, self.params, self.average, self.optimizer.state)
                mx.eval(pending if pending is not None else [])
                pending = loss
                self.progress["step"] = step + 1
                self.progress["seconds"] = time.perf_counter() - started
                bar.update()
                if step == 50:
                    each = self.progress["seconds"] / (step + 1)
                    tqdm.write(f"{1000 * each:.0f} ms a step, the first ones included")
                if (step + 1) % self.settings.eval_every == 0 or self.fraction() >= 1:
                    self._validate(loss.item(), bar)
                if (step + 1) % checkpoint_every == 0:
                    self.save()
        self.save()

    def _step(self, function: Callable[..., Any], augment: bool) -> mx.array:
        s, step = self.settings, self.progress["step"]
        mx.random.seed((s.seed << 32) + step + 1)
        self.optimizer.learning_rate = learning_rate(s, step, self.fraction())
        tokens = self.sampler.batch(step, s.batch, s.context, s.augment if augment else 0.0)
        decay = mx.array(min(s.ema, (1 + step) / (10 + step)))
        loss, self.params, self.average = function(
            self.params, self.average, mx.array(tokens), decay
        )
        return loss

    def _validate(self, loss: float, bar: tqdm) -> None:
        row: dict[str, Any] = {"step": self.progress["step"], "loss": loss}
        for name, (stream, size) in self.valid.items():
            length = self.settings.context
            nats = total_loss(lambda t: self._quick_losses(self.average, t), stream, length, length)
            row[name] = figures(nats, len(stream) - 1, size)["bits_per_byte"]
        row["score"] = score(row)
        if row["score"] < min((r["score"] for r in self.progress["history"]), default=math.inf):
            self.best = self.average
        self.progress["history"].append(row)
        shown = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k != "step")
        tqdm.write(f"step {row['step']:5d}  {self.progress['seconds']:5.0f} s  {shown}")

    def _exhausted(self) -> bool:
        scores = [row["score"] for row in self.progress["history"]]
        patience = self.settings.patience
        return bool(patience and scores and len(scores) - 1 - int(np.argmin(scores)) >= patience)


def main() -> None:
    """Train, export and measure."""
    parser = argparse.ArgumentParser(description="Train the model that ships with the repository.")
    parser.add_argument("--out", type=Path, default=HERE / "tales-qwen2", help="model folder")
    parser.add_argument("--checkpoints", type=Path, help="default: models/checkpoints/NAME")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps (default: 250)")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that checks the machinery")
    add_options(parser)
    options = parser.parse_args()
    settings = from_options(options, SMOKE if options.smoke else Settings())

    trainer = Trainer(settings, options.checkpoints or HERE / "checkpoints" / options.out.name)
    if trainer.resume():
        print(f"resuming at step {trainer.progress['step']}")
    trainer.train(options.checkpoint_every)

    export(trainer.best, trainer.config, trainer.tokenizer, options.out)
    validation = measure(trainer.best, trainer.config, options.out, trainer.valid, settings)
    device = mx.device_info().get("device_name", str(mx.default_device()))
    made = {"device": device, "mlx": mx.__version__}
    record = {"settings": settings.to_dict(), **made, "validation": validation, **trainer.progress}
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(validation, indent=1))


if __name__ == "__main__":
    main()
