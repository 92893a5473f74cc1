"""Recurrent layers: the gated delta rule, and rows of a depthwise convolution.

A ``GatedDelta`` node takes what :func:`~mlx_qlayers.ops.gated_delta.gated_delta` does; its argument
is that of norms. A ``Depthwise`` node takes rows (B, L + K - 1, C) and a weight (C, K, 1).
"""

from __future__ import annotations

from ..graph import Node, P, Rule, fits


def _normed(root: Node) -> Node | None:
    """Queries and keys before their norms."""
    one, other = (fits(_NORMED, each) for each in root.src[:2])
    if one is None or other is None or one["norm"].arg != other["norm"].arg:
        return None
    if one["norm"].src[1] or other["norm"].src[1]:
        return None
    src, norms = (one["x"], other["x"], *root.src[2:]), (one["factor"], other["factor"])
    return Node(root.op, src, ((one["norm"].arg[0], *norms),), root.outputs)


_NORMED = P("Multiply(norm @ RMSNorm(x, ...), -factor)")


def _depthwise(x: Node, w: Node, root: Node) -> Node | None:
    stride, low, high, kernel, inputs, groups, flip = root.arg
    plain = {*stride, *kernel, *inputs} == {1} and not (any(low) or any(high) or flip)
    one = len(x.shape) == 3 and (w.shape[0], w.shape[2:]) == (x.shape[-1], (1,))
    return root.like("Depthwise", x, w) if plain and one and groups == x.shape[-1] else None


RECURRENT: list[Rule] = [(P("Convolution(x, w)"), _depthwise), (P("GatedDelta"), _normed)]
