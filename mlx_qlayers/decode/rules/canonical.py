"""Rules that let the same computation look the same, wherever it was traced.

On a GPU ``mx.fast`` operations are primitives; on a CPU MLX spells them out, and activations
everywhere. These rules put them together again, so that all other rules see one form.
"""

from __future__ import annotations

from functools import partial
from math import pi, sqrt

import mlx.core as mx

from ..graph import Node, P, Pattern, Rule, under
from ..primitives import MODES
from ..twin import EMBEDDING

ELEMENTWISE = (
    *("Add", "Subtract", "Multiply", "Divide", "Power", "Maximum", "Minimum", "Select"),
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"),
    *("LogicalOr", "Remainder", "LogAddExp", "BitwiseBinary"),
)


def _unbroadcast(root: Node) -> Node | None:
    """An operation broadcasts by itself, where another operand has the shape of the result."""
    for i, source in enumerate(root.src):
        others = *root.src[:i], *root.src[i + 1 :]
        if source.op == "Broadcast" and any(s.shape == root.shape for s in others):
            src = (*root.src[:i], source.src[0], *root.src[i + 1 :])
            return Node(root.op, src, root.arg, root.outputs)
    return None


def as_it_is(x: Node, root: Node) -> Node | None:
    return x if x.outputs == root.outputs else None


def _embedding(root: Node) -> Node | None:
    """The rows that an embedding of a twin stands for."""
    _, *packed, last = root.src
    kind = last.arg[0].array if last.op == "Constant" else None
    if kind is None or kind.shape != (4,) or kind[0].item() != EMBEDDING:
        return None
    _, size, bits, mode = kind.tolist()
    src = (*packed, None)[:4]  # without biases, if there are none
    return root.like("Embedding", *src, arg=(size, bits, MODES[mode]))


def _is_mean(sum: Node, part: float) -> bool:
    shape, (_, axes) = sum.src[0].shape, sum.arg
    return axes == (len(shape) - 1,) and abs(part * shape[-1] - 1) < 1e-4


def _rms(x: Node, sum: Node, part: float, eps: float, root: Node) -> Node | None:
    return root.like("RMSNorm", x, None, arg=(eps,)) if _is_mean(sum, part) else None


def _layer(
    x: Node, sum: Node, part: float, mean: Node, share: float, eps: float, root: Node, **_: Node
) -> Node | None:
    fit = _is_mean(sum, part) and _is_mean(mean, share)
    return root.like("LayerNorm", x, None, None, arg=(eps,)) if fit else None


def _in_dtype(norm: Node, x: Node, root: Node) -> Node | None:
    """A norm computes in float32 whatever it takes, and gives the dtype of what it takes."""
    if x.dtype != root.dtype or norm.src[1] is not None:
        return None
    return root.like(norm.op, x, *norm.src[1:], arg=norm.arg)


def _scaled_or_shifted(norm: Node, array: Node, root: Node) -> Node | None:
    """A norm times a weight, or one plus a bias."""
    at, array = 1 if root.op == "Multiply" else 2, under(array)
    if norm.src[at] or array.shape != norm.shape[-1:] or array.dtype != root.dtype:
        return None
    src = (*norm.src[:at], array, *norm.src[at + 1 :])
    return root.like(norm.op, *src, arg=norm.arg)


def _primitive_norm(root: Node) -> Node | None:
    """MLX has a number in the place of a weight that is left out."""
    src = [None if s is None or not s.shape else s for s in root.src]
    return None if src == [*root.src] else root.like(root.op, *src, arg=root.arg)


def _as(op: str, x: Node, root: Node) -> Node:
    return root.like(op, x)


# Pairs that cancel: a cast to a wider type and back, an axis put in and taken out.
CANCELLED: list[Rule] = [
    (P("(Squeeze | ExpandDims)((Squeeze | ExpandDims)(x))"), as_it_is),
    (P("AsType(wide(x))", wide=Pattern(("AsType",), arg=(mx.float32,))), as_it_is),
]
UNBROADCAST: list[Rule] = [
    (Pattern(ELEMENTWISE), _unbroadcast),
    (P("(Broadcast | Reshape | AsType)(x)"), as_it_is),
    (P("Depends"), _embedding),
]
# One through the root of a mean of squares.
_ROOT = "~Broadcast(Sqrt[True](Add(Multiply(sum @ Reduce[2, _](Square({})), -part), -eps)))"
_CENTRED = P("c @ Subtract(x, ~Broadcast(Multiply(mean @ Reduce(x), -share)))")
FAST: list[Rule] = [
    (P("Multiply(centred, root)", centred=_CENTRED, root=P(_ROOT.format("c"))), _layer),
    (P("Multiply(x, root)", root=P(_ROOT.format("x"))), _rms),
    (P("AsType(norm @ (RMSNorm | LayerNorm)(AsType(x), ...))"), _in_dtype),
    (P("Multiply(norm @ +(RMSNorm | LayerNorm), array)"), _scaled_or_shifted),
    (P("Add(norm @ +LayerNorm, array)"), _scaled_or_shifted),
    (P("RMSNorm | LayerNorm"), _primitive_norm),
]
_ERF = f"Erf(Divide(x, {sqrt(2)}))"
_TANH = f"Tanh(Multiply(Add(x, Multiply(Power(x, 3), 0.044715)), {sqrt(2 / pi)}))"
ACTIVATIONS: list[Rule] = [
    (P("Multiply(x, Sigmoid(x))"), partial(_as, "Silu")),
    (P(f"Divide(Multiply(x, Add({_ERF}, 1)), 2)"), partial(_as, "Gelu")),
    (P(f"Multiply(Multiply(x, 0.5), Add({_TANH}, 1))"), partial(_as, "GeluApprox")),
]
