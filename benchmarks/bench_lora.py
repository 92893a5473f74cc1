"""Training with adapters and the loss of an output layer: time and memory beside stock.

    python benchmarks/bench_lora.py loss            # 4,096 rows x 3,584 to 152,064 words, 4 bits
    python benchmarks/bench_lora.py step            # 7B shape, 14 layers, 4 x 1,024 tokens
    python benchmarks/bench_lora.py checkpoints     # the same with gradient checkpointing
    python benchmarks/bench_lora.py long            # 28 layers, 1 x 16,384 tokens, checkpointing
    python benchmarks/bench_lora.py shipped         # the shipped model, 1 x 128 tokens: for a CPU
    python benchmarks/bench_lora.py curves --only float32 --csv benchmarks/results/lora_curves.csv
    python benchmarks/bench_lora.py curves --only bfloat16  # hours by stock's products on a CPU
    python benchmarks/bench_lora.py step --only recomputing --repeats 3 --csv

A step is that of mlx-lm's trainer: loss, gradients of adapters of rank 8 beside all linear layers,
Adam; compiled, but where kernels run on a CPU. Its peak is the model, adapters, moments and all
else at the worst moment: by MLX's allocator on a GPU, by the process's resident memory on a CPU,
where kernels allocate their own. On a GPU it stands beside the plan of `mlx-qlayers lora --plan`,
by MLX's allocator. That of a loss is above its inputs and results; on a GPU also under the memory
limit that `mlx-qlayers lora` sets. Losses and gradients are held against stock's before anything is
timed.

Curves are the losses of 200 steps of the shipped model on the tales, 1 x 32 tokens each, at
mlx-lm's learning rate: in float32 how far ours are from stock's, in bfloat16 the means of the last
50 of three seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from common import Table, arguments, output
from decoding_model import QWEN2_7B, build
from harness import GPU, Run, arrays, emptied, measure, peak
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_qlayers import convert_model, fused_loss, linear_cross_entropy, recompute_activations
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.runtime.backend import backend
from mlx_qlayers.runtime.memory import return_memory
from mlx_qlayers.training.plan import least_memory, plan

# Rows, columns and words of the output layer.
HEAD = 4096, 3584, 152064
# Layers of the 7B shape, None for the shipped model; batch and length; whether checkpointed.
STEPS = {
    "step": (14, (4, 1024), False),
    "checkpoints": (14, (4, 1024), True),
    "long": (28, (1, 16384), True),
    "shipped": (None, (1, 128), False),
}
# Whether the model is converted, its loss is fused, and it recomputes activations in as little
# memory as that takes.
CONTENDERS = {
    "stock": (False, False, False),
    "converted": (True, False, False),
    "fused": (True, True, False),
    "recomputing": (True, True, True),
}
# How far from stock's a loss may be, and all gradients by their norm: stock's logits are bfloat16.
LOSS, GRADIENTS = 0.01, 0.5
Result = dict[str, mx.array]
DATA = Path(__file__).parents[1] / "models" / "data"
LENGTH = 32  # of the sequences of curves


def losses() -> dict[str, Run]:
    """The loss of an output layer and the gradient of what it is given."""
    rows, width, words = HEAD
    mx.random.seed(0)
    head = mx.quantize((mx.random.normal((words, width)) / 20).astype(mx.bfloat16))
    x = mx.random.normal((rows, width)).astype(mx.bfloat16)
    targets = mx.random.randint(0, words, (rows,))
    mx.eval(head, x, targets)

    def stock(loss: Callable[..., mx.array], x: mx.array) -> mx.array:
        return loss(mx.quantized_matmul(x, *head), targets).astype(mx.float32).mean()

    ways = {
        "stock": partial(stock, nn.losses.cross_entropy),
        "stock, mx.fast": partial(stock, mx.fast.cross_entropy),
        "fused": lambda x: linear_cross_entropy(x, targets, *head),
    }

    def run(way: Any) -> Result:
        return dict(zip(("loss", "x"), way(x), strict=True))

    return {name: partial(run, mx.value_and_grad(way)) for name, way in ways.items()}


class Training:
    """A model with adapters, its optimizer and one batch."""

    def __init__(
        self, model: Any, shape: tuple[int, int], converted: bool, fused: bool, seed: int = 7
    ) -> None:
        if converted:
            convert_model(model)
        model.freeze()
        mx.random.seed(seed)
        config = {"rank": 8, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), config)
        # Adapters start with zeros, before which half of the gradients are none.
        names = dict(tree_flatten(model.trainable_parameters()))
        moved = {k: mx.random.normal(a.shape) / 100 for k, a in names.items() if "lora_b" in k}
        model.load_weights([*moved.items()], strict=False)
        model.train()
        self.model, self.optimizer = model, optim.Adam(learning_rate=1e-5)
        self.optimizer.init(model.trainable_parameters())
        words = model.model.embed_tokens.weight.shape[0]
        batch, length = shape
        self.batch = mx.random.randint(0, words, (batch, length + 1), key=mx.random.key(1))
        self.lengths = mx.array([[1, length]] * batch)
        self.loss = fused_loss(model) if fused else default_loss
        self.gradients = nn.value_and_grad(model, self.loss)
        state = [model.state, self.optimizer.state, mx.random.state]
        on_cpu = converted and backend() == "host"
        traced = (lambda f: f) if on_cpu else partial(mx.compile, inputs=state, outputs=state)
        self.step = traced(self._step)
        mx.eval(state, self.batch, self.lengths)

    def _step(self, batch: mx.array) -> mx.array:
        (value, _), gradients = self.gradients(self.model, batch, self.lengths)
        self.optimizer.update(self.model, gradients)
        return value

    def run(self) -> list[Any]:
        """A step, with all that it changes."""
        return [self.step(self.batch), self.model.trainable_parameters(), self.optimizer.state]

    def first(self) -> Result:
        """The loss and the gradients."""
        (value, _), gradients = self.gradients(self.model, self.batch, self.lengths)
        return {"loss": value, **dict(tree_flatten(gradients))}

    @property
    def bytes(self) -> int:
        """Of the model and the optimizer."""
        return sum(a.nbytes for a in arrays([self.model.parameters(), self.optimizer.state]))


@contextmanager
def checkpoints(layer: nn.Module, asked: bool) -> Iterator[None]:
    """Have layers of a class compute their activations again for gradients, if asked for."""
    cls: Any = type(layer)
    with mock.patch.object(cls, "__call__", cls.__call__):  # what it was is put back
        if asked:
            grad_checkpoint(layer)
        yield


def difference(found: Result, stock: Result | None) -> float:
    """Of gradients, relative to stock's, by norms; 0 where there are none to compare with."""
    if stock is None:
        return 0.0
    loss, right = found["loss"].item(), stock["loss"].item()
    assert abs(loss - right) <= LOSS * right, f"a loss of {loss}, where stock's is {right}"
    names = found.keys() - {"loss"}
    wrong, norm = (
        sum(mx.square(a.astype(mx.float32)).sum() for a in each)
        for each in ((found[k] - stock[k] for k in names), (stock[k] for k in names))
    )
    error = mx.sqrt(wrong / norm).item()
    assert error <= GRADIENTS, f"gradients differ from stock's by {error:.1%}"
    return error


def above(run: Run) -> float:
    """Megabytes at the worst moment of a call besides what was there, and its results."""
    if GPU or not (status := Path("/proc/self/status")).exists():
        return peak(run, results=False)

    def read(name: str) -> float:
        return int(status.read_text().split(f"{name}:")[1].split()[0]) / 1e3

    return_memory()  # else what was freed before is taken again, and not seen
    status.with_name("clear_refs").write_text("5")  # the maximum begins anew
    before = read("VmRSS")
    mx.eval(run())
    return read("VmHWM") - before


def bench_loss(only: list[str], repeats: int) -> None:
    """Time and memory of all contenders."""
    ways, stock = {n: way for n, way in losses().items() if not only or n in only}, None
    table = Table()
    mx.set_memory_limit(before := mx.set_memory_limit(0))
    limited = {"fused, limited": ways["fused"]} if GPU and "fused" in ways else {}
    for name, way in (ways | limited).items():
        found = way()
        stock = stock or (found if name == "stock" else None)
        row = {"loss": found["loss"].item(), "error": difference(found, stock)}
        del found
        if name in limited:  # as mlx-qlayers lora limits a step
            mx.set_memory_limit(least_memory(way))
        memory = above(way)
        time = measure({name: way}, repeats=repeats)[name].scaled(1e3)
        table.add(task="loss", path=name, ms=time, **{"peak MB": memory}, **row)
    mx.set_memory_limit(before)


def bench_step(part: str, only: list[str], repeats: int) -> None:
    """One contender after the other: they do not fit together."""
    (layers, shape, checkpointed), table = STEPS[part], Table()
    stock: Result | None = None
    mx.set_memory_limit(before := mx.set_memory_limit(0))
    for name, (converted, fused, recomputes) in CONTENDERS.items():
        if only and name not in only:
            continue
        if layers is None:
            model: Any = load(str(shipped_model()))[0]
        else:
            model = build(QWEN2_7B | {"num_hidden_layers": layers}, 64, 4)
        training = Training(model, shape, converted, fused)
        del model
        if recomputes:
            recompute_activations(training.model, layers=checkpointed)
        row: dict[str, Any] = {"task": part, "path": name}
        try:
            with checkpoints(training.model.layers[0], checkpointed and not recomputes):
                found = tree_map(lambda a: a.astype(mx.float32), training.first())
                mx.eval(found)
                stock = stock or (found if name == "stock" else None)
                row |= {"loss": found["loss"].item(), "error": difference(found, stock)}
                if recomputes:  # as mlx-qlayers lora does
                    if GPU:
                        planned = plan(training.model, training.optimizer, training.loss, *shape)
                        row["plan MB"] = planned.total() / 1e6
                    else:
                        mx.set_cache_limit(0)
                    mx.set_memory_limit(least_memory(training.run))
                training.run()
                most = above(training.run) + training.bytes / 1e6
                time = measure({name: training.run}, repeats=repeats)[name].scaled(1e3)
                row |= {"peak MB": most, "ms": time}
        except RuntimeError as error:  # no memory is left
            row["ms"] = f"fails: {str(error)[:40]}"
        table.add(**row)
        mx.set_memory_limit(before)
        del training
        emptied()


def curve(dtype: mx.Dtype, seed: int, ours: bool, steps: int = 200) -> list[float]:
    """The loss of each step."""
    model, tokenizer = load(str(shipped_model()))
    model.set_dtype(dtype)
    training = Training(model, (1, LENGTH), ours, ours, seed)
    if ours:
        recompute_activations(model)
    tokens = mx.array(tokenizer.encode((DATA / "grimms_fairy_tales.txt").read_text()[:200_000]))
    starts = np.random.default_rng(seed).integers(0, tokens.size - LENGTH - 1, steps).tolist()
    found = []
    for start in starts:
        training.batch = tokens[None, start : start + LENGTH + 1]
        found.append(training.run()[0].item())
    return found


def bench_curves(only: list[str]) -> None:
    """Ours beside stock's in both dtypes, or the one that is asked for."""
    table = Table()
    for dtype, seeds in (("float32", 1), ("bfloat16", 3)):
        for seed in range(seeds) if not only or dtype in only else ():
            stock, ours = (
                np.array(curve(getattr(mx, dtype), seed, each)) for each in (False, True)
            )
            error = float(np.abs(ours / stock - 1).max())
            for name, found in (("stock", stock), ("ours", ours)):
                path, loss = f"{name}, seed {seed}", float(found[-50:].mean())
                table.add(task=dtype, path=path, loss=loss, error=error)
            # In float32 each loss is stock's.
            assert error <= 1e-4 or dtype != "float32", f"a loss differs by {error:.1e}"


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"loss, curves, {', '.join(STEPS)}"
    )
    parser.add_argument("--only", nargs="+", default=[], help="contenders")
    args = parser.parse_args()
    with output(args, "lora"):
        for part in args.parts or ["loss", *STEPS]:
            if part == "curves":
                bench_curves(args.only)
            elif part == "loss":
                bench_loss(args.only, args.repeats)
            else:
                bench_step(part, args.only, args.repeats)


if __name__ == "__main__":
    main()
