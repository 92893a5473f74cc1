"""Latent attention of a token, and the products by head around it.

A ``Latent`` node takes what :func:`~mlx_qlayers.ops.latent_attention.latent_attention` does; its
argument is the scale. A ``Heads`` node takes (B, H, 1, K) and the arrays of H packed matrices, one
for each head; its arguments are group size, bits and mode.
"""

from __future__ import annotations

from math import isclose
from typing import Any

import mlx.core as mx

from ..graph import Node, P, Rule, Spec, first_rows, fits, less
from ..primitives import MODES
from .products import is_weight

_BESIDE = P("Matmul(Multiply(r, -factor), ~Broadcast(transposed @ Transpose(p)))")
_MASK = P("Select(shown, beside, _) | beside", beside=_BESIDE)


def _heads(root: Node) -> Node | None:
    size, bits, mode, transposed = root.arg
    x, *packed = root.src
    matrices = [each.src[0] if each.op == "Broadcast" else each for each in packed]
    if not transposed or not all(map(is_weight, matrices)):
        return None
    fit = len(matrices[0].shape) == 3 and x.shape[1:3] == (matrices[0].shape[0], 1)
    return root.like("Heads", x, *matrices, arg=(size, bits, MODES[mode])) if fit else None


def _rows(node: Node) -> tuple[Node, Any]:
    """The whole buffer, and the last row that counts."""
    buffer, count = first_rows(node)
    return buffer, less(node.shape[2] if count is None else count, 1)


def _latent(root: Node) -> Node | None:
    """Attention to what are keys and values at once, whose mask is scores of other rows."""
    q, c, v, mask, sinks = root.src
    scale, causal = root.arg
    found = fits(_MASK, mask) if c is v and sinks is None and not causal else None
    if found is None or q.shape[2] != 1 or c.shape[1] != 1 or len(found["p"].shape) != 4:
        return None
    (keys, last), (beside, other) = _rows(c), _rows(found["p"])
    alike = last == other and isclose(found["factor"], scale, rel_tol=1e-6)
    if not alike or found["transposed"].arg[0][-2:] != (3, 2):
        return None
    r, shown = found["r"], found.get("shown")
    rows = [keys, beside] if shown is None else [c, found["p"]]
    at = Node("Numbers", (), (last,), (Spec((), mx.int32),))
    dtypes = {each.dtype for each in (q, r, *rows)}
    fit = r.shape[:3] == q.shape[:3] and len(dtypes) == 1
    if shown is not None and (shown.dtype != mx.bool_ or len(shown.shape) != 4):
        return None
    return root.like("Latent", q, r, *rows, at, shown, arg=(scale,)) if fit else None


LATENT: list[Rule] = [(P("Attention"), _latent), (P("QuantizedMatmul"), _heads)]
