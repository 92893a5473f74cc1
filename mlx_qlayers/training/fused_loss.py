"""The loss of mlx-lm's trainer, by an operation that never has all logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..layers.qlinear import QEmbedding, QLinear
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..tuning.calibrate import same_random_state

# The method by which each class makes logits.
_METHODS: dict[type[nn.Module], str] = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    QLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
    QEmbedding: "as_linear",
}


class Head(NamedTuple):
    """The logits of a model: ``softcap`` of ``scale`` times the output of a layer.

    Attributes:
        name: of the layer in the model.
        module: the layer.
        scale: a factor behind it.
        softcap: the c of ``c tanh(logits / c)`` behind that, or None.
    """

    name: str
    module: nn.Module
    scale: float
    softcap: float | None

    def loss(self, x: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
        """The sum of the cross entropies of rows that the layer is given."""
        layer: Any = self.module
        bias = layer.get("bias")
        if self.scale != 1:
            x, bias = x * self.scale, None if bias is None else bias * self.scale
        packed = "scales" in layer
        return linear_cross_entropy(
            x,
            targets,
            *(layer.get(name) for name in ("weight", "scales", "biases")),
            bias=bias,
            **{k: getattr(layer, k) for k in ("group_size", "bits", "mode") if packed},
            mask=mask,
            softcap=self.softcap,
            reduction="sum",
        )


class FusedLoss:
    """mlx-lm's ``default_loss`` of one model; see :func:`fused_loss`.

    Attributes:
        head: what makes the model's logits, or None where its loss is mlx-lm's own.
        reason: why that is so.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        with same_random_state():  # dropout draws numbers
            self.head, self.reason = _found(model)

    def __call__(
        self, model: nn.Module, batch: mx.array, lengths: mx.array
    ) -> tuple[mx.array, mx.array]:
        from mlx_lm.tuner.trainer import default_loss

        if model is not self._model:
            raise ValueError("model: this loss was made for another one")
        if self.head is None:
            loss: tuple[mx.array, mx.array] = default_loss(model, batch, lengths)
            return loss
        inputs, targets = batch[:, :-1], batch[:, 1:]
        layer: Any = self.head.module
        size = layer["weight"].shape[0]
        zero = mx.array(0.0)
        with _standing_in(layer, lambda x: mx.broadcast_to(zero, (*x.shape[:-1], size))) as given:
            model(inputs)  # as far as to what the layer is given; nobody asks for its output
        if len(given) != 1:
            raise ValueError(f"model: {self.head.name} makes its logits no more; make a new loss")
        x = given.pop()  # which the class that stood in would hold until Python collects it
        steps = mx.arange(1, targets.shape[1] + 1)
        mask = (steps >= lengths[:, 0:1]) & (steps <= lengths[:, 1:])
        count = mask.sum()
        return self.head.loss(x, targets, mask) / count, count

    def __repr__(self) -> str:
        if self.head is None:
            return f"mlx-lm's loss: {self.reason}"
        scale, cap = self.head.scale, self.head.softcap
        more = [f"scaled by {scale:g}"] * (scale != 1) + [f"capped at {cap}"] * (cap is not None)
        return " ".join([f"fused loss of {self.head.name}", ", ".join(more)]).strip()


def fused_loss(model: nn.Module) -> FusedLoss:
    """mlx-lm's loss of a language model, by ``linear_cross_entropy`` of what its head is given.

    In each call the layer that makes the logits, ``lm_head`` or a tied embedding, gives zeros
    instead, which nobody evaluates. It is known from trials with numbers in the place of logits:
    the model's output must be these, times a factor, capped by ``c tanh(z / c)``, or both. Any
    other model has mlx-lm's own loss, and what is printed of the result says why.

    Args:
        model: one of mlx-lm, converted or not, with its adapters. It is called with two tokens a
            few times.

    Returns:
        A function of a model, this one; a batch of tokens (B, L); and lengths (B, 2), the first
        and the last token of each sequence that counts. It gives the mean loss of these tokens
        and their number, as ``mlx_lm.tuner.trainer.default_loss`` does, whose place it takes in
        ``mlx_lm.tuner.train(..., loss=fused_loss(model))``.

    Example:
        >>> from mlx_lm.models.qwen2 import Model, ModelArgs
        >>> sizes = 64, 1, 96, 2, 1e-6, 1000  # of the layers, the heads and the vocabulary
        >>> model = Model(ModelArgs("qwen2", *sizes, num_key_value_heads=2))
        >>> loss = fused_loss(model)
        >>> loss
        fused loss of model.embed_tokens
        >>> value, tokens = loss(model, mx.array([[5, 6, 7, 8]]), mx.array([[0, 3]]))
        >>> tokens.item()
        3

    Source: ``mlx_lm.tuner.trainer.default_loss``; :func:`linear_cross_entropy`.
    """
    return FusedLoss(model)


@contextmanager
def _standing_in(layer: nn.Module, results: Callable[..., mx.array]) -> Iterator[list[mx.array]]:
    """Have a layer make logits by another function; yields what it is given."""
    cls, given = type(layer), list[mx.array]()

    def call(self: nn.Module, x: mx.array) -> mx.array:
        given.append(x)
        return results(x)

    layer.__class__ = type(cls.__name__, (cls,), {_METHODS[cls]: call})
    try:
        yield given
    finally:
        layer.__class__ = cls


def _found(model: nn.Module) -> tuple[Head | None, str]:
    tokens = mx.zeros((1, 2), mx.int32)
    logits = model(tokens)
    if not isinstance(logits, mx.array):
        return None, f"the model gives a {type(logits).__name__}, not logits"
    vocabulary = logits.shape[-1]
    z = _numbers(vocabulary)
    for name, module in model.named_modules():
        if type(module) not in _METHODS or module["weight"].shape[0] != vocabulary:
            continue
        with _standing_in(module, lambda x: z) as given:
            y = model(tokens)
        if [x.shape[:-1] for x in given] == [(1, 2)] and (form := _form(z, y)) is not None:
            return Head(name, module, *form), ""
    return None, f"no layer gives its {vocabulary} logits but for a factor and a softcap"


# Numbers of which a function of the form c tanh(s z / c) shows s and c.
_SMALL, _LARGE = 2.0**-10, 2.0**60


def _numbers(vocabulary: int) -> mx.array:
    z = mx.random.uniform(-90, 90, (1, 2, vocabulary), key=mx.random.key(0))
    z[0, 0, :2] = mx.array([_SMALL, _LARGE])
    return z


def _form(z: mx.array, y: Any) -> tuple[float, float | None] | None:
    """The factor and the cap by which one array follows from another, if it does."""
    if not isinstance(y, mx.array) or y.shape != z.shape:
        return None
    small: Any
    large: Any
    small, large = (y[0, 0, i].astype(mx.float32).item() for i in range(2))
    scale, cap = small / _SMALL, large if abs(large) < _LARGE * 2.0**-30 else None
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale  # a cap rounds it
    if not scale or (cap is not None and cap <= 0):
        return None
    same = z * scale if cap is None else cap * mx.tanh(z * (scale / cap))
    return (scale, cap) if mx.allclose(same, y, rtol=1e-5, atol=1e-6).item() else None
