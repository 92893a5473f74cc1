"""The memory of a training: what it will take, and a bound on what it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..runtime.memory import return_memory
from ..tuning.calibrate import same_random_state


class Usage(NamedTuple):
    """The bytes of a training's parts, and of all of it by the length of its sequences."""

    # Of what is there between the steps.
    weights: int
    adapters: int
    optimizer: int
    loss: int  # what the loss and its gradient take while all activations are there
    batch: int  # sequences
    length: int  # of these, in tokens
    curve: tuple[float, float, float]  # a, b and c of `a + b n + c n^2` for n tokens a sequence

    def total(self, length: int | None = None) -> int:
        """Bytes at the worst moment of a step with sequences of some length, or of this one."""
        n = self.length if length is None else length
        return round(sum(x * n**i for i, x in enumerate(self.curve)))

    def longest(self, memory: float) -> int:
        """The longest sequences, in tokens, with which a step takes so many bytes; 0 for none."""
        least, most = 0, 1
        while most < 2**30 and self.total(most) <= memory:
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.total(middle) <= memory else (least, middle)
        return least

    def table(self, memory: float) -> str:
        """The parts and the sum, and the longest sequences that fit."""
        fixed = self.weights + self.adapters + self.optimizer
        parts = {
            "weights": self.weights,
            "adapters": self.adapters,
            "optimizer": self.optimizer,
            "activations, gradients": max(0, self.total() - fixed - self.loss),
            "loss": self.loss,
            f"{self.batch} x {self.length} tokens": self.total(),
        }
        lines = [f"{name:24}{size / 1e6:12,.1f} MB" for name, size in parts.items()]
        fits = f"{self.batch} x {self.longest(memory):,} tokens fit in {memory / 1e9:.3g} GB"
        return "\n".join([*lines, fits])


def plan(model: Any, optimizer: Any, loss: Callable[..., Any], batch: int, length: int) -> Usage:
    """Take steps without an effect, and tell what the training will take.

    Model, optimizer and random numbers are what they were afterwards.

    Args:
        model: with its adapters, as it will be trained.
        optimizer: of ``mlx.optimizers``.
        loss: as mlx-lm's trainer takes it.
        batch: sequences.
        length: of these, in tokens, at least 8. Steps of a half and a quarter of it are taken,
            and one of all of it where that fits without doubt.

    Example:
        >>> import mlx.optimizers as optim
        >>> from mlx_lm.models.qwen2 import Model, ModelArgs
        >>> from mlx_qlayers import fused_loss
        >>> model = Model(ModelArgs("qwen2", 64, 1, 96, 2, 1e-6, 1000, num_key_value_heads=2))
        >>> found = plan(model, optim.SGD(learning_rate=0.1), fused_loss(model), 2, 128)
        >>> found.total() > found.weights + found.adapters > 0
        True
    """
    with _unchanged(model, optimizer):
        optimizer.init(model.trainable_parameters())
        mx.eval(model.parameters(), optimizer.state)
        all_of, some, moments = map(
            _bytes, (model.parameters(), model.trainable_parameters(), optimizer.state)
        )
        return_memory()  # else what nobody needs any more goes while steps are measured
        outside, points = mx.get_active_memory() - all_of - moments, dict[int, int]()
        for n in (length // 4, length // 2, length):
            if n == length and 2 * points[length // 2] + outside > 0.7 * memory():
                break  # which leaves what follows from shorter ones
            points[n] = least_memory(_step(model, optimizer, loss, batch, n)) - outside
    alone = _loss_alone(loss, batch, length)
    return Usage(all_of - some, some, moments, alone, batch, length, _through([*points.items()]))


def memory() -> int:
    """The bytes of this device."""
    facts = mx.device_info()
    known = facts.get("memory_size") or facts.get("total_memory")
    return int(known or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def in_least_memory(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """``iterate_batches`` of mlx-lm's trainer, between which MLX is told how much a step needs.

    MLX hands work over long before it runs, and holds what that will need. A step with more
    tokens than any before it waits for each operation; the others for what was handed over,
    where they would take more memory than that one did.
    """

    def iterate(*args: Any, **options: Any) -> Iterator[Any]:
        most, before = 0, mx.set_memory_limit(0)
        mx.set_memory_limit(before)
        try:
            for batch, lengths in batches(*args, **options):
                if is_larger := batch.size > most:
                    most = batch.size
                    mx.reset_peak_memory()
                    mx.set_memory_limit(0)
                yield batch, lengths
                if is_larger:
                    mx.set_memory_limit(mx.get_peak_memory())
        finally:
            mx.set_memory_limit(before)

    return iterate


def least_memory(run: Callable[[], Any]) -> int:
    """The most bytes at once in a second call, of which nothing is handed over ahead of time."""
    limit = mx.set_memory_limit(0)
    try:
        mx.eval(run())
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(run())
        mx.synchronize()
        return mx.get_peak_memory()
    finally:
        mx.set_memory_limit(limit)


def _bytes(tree: Any) -> int:
    flat: Any = tree_flatten(tree)
    return sum(a.nbytes for _, a in flat if isinstance(a, mx.array))


@contextmanager
def _unchanged(model: Any, optimizer: Any) -> Iterator[None]:
    parameters = tree_map(lambda a: a, model.trainable_parameters())
    state, began = tree_map(lambda a: a, optimizer.state), optimizer._initialized
    training = [module for module in model.modules() if not module.training]
    model.train()
    try:
        with same_random_state():
            yield
    finally:
        model.update(parameters)
        optimizer._initialized = began
        optimizer.state.clear()  # in place: a step that was compiled before has this dict
        optimizer.state.update(state)
        for module in training:
            module._training = False


def _step(model: Any, optimizer: Any, loss: Any, batch: int, length: int) -> Callable[[], Any]:
    """A step of mlx-lm's trainer."""
    tokens, lengths = mx.zeros((batch, length + 1), mx.int32), mx.array([[1, length]] * batch)
    gradients, state = nn.value_and_grad(model, loss), [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step() -> mx.array:
        (value, _), found = gradients(model, tokens, lengths)
        optimizer.update(model, found)
        return value

    return lambda: (step(), state)


def _loss_alone(loss: Any, batch: int, length: int) -> int:
    """The memory of a fused loss beside its inputs and outputs; 0 for others."""
    head = getattr(loss, "head", None)
    if head is None:
        return 0
    layer = head.module
    width = layer["weight"].shape[1]
    if "scales" in layer:
        width = layer["scales"].shape[1] * layer.group_size
    dtype = layer["scales"].dtype if layer.get("biases") is not None else mx.bfloat16
    x = mx.zeros((batch, length, width), dtype if "scales" in layer else layer["weight"].dtype)
    targets, mask = mx.zeros((batch, length), mx.int32), mx.ones((batch, length))
    run = partial(mx.compile(mx.grad(head.loss)), x, targets, mask)
    mx.eval(x, targets, mask)
    before = mx.get_active_memory()
    return max(0, least_memory(run) - before - x.nbytes)


def _through(points: list[tuple[int, int]]) -> tuple[float, float, float]:
    """The parabola through three points, or the line through two."""
    (m, q), (n, r) = points[-2:]
    slope, c = (r - q) / (n - m), 0.0
    if len(points) > 2:
        k, p = points[-3]
        c = max(c, (slope - (q - p) / (m - k)) / (n - k))
    b = slope - c * (m + n)
    return r - b * n - c * n * n, b, c
