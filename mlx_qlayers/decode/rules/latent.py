"""Latent attention of a token, and the products by head around it.

A ``Latent`` node takes what :func:`~mlx_qlayers.ops.latent_attention.latent_attention` does; its
argument is the scale. A ``Heads`` node takes (B, H, 1, K) and the arrays of H packed matrices, one
for each head; its arguments are group size, bits and mode.
"""

from __future__ import annotations

from math import isclose
from typing import NamedTuple

import mlx.core as mx

from ..graph import Either, Node, P, Pattern, Rule, Size, Spec, any_, fits, maybe, number_of, under
from ..primitives import MODES
from .products import is_weight

_BESIDE = P(
    "Matmul",
    P("Multiply", any_("r"), any_("factor")),
    maybe("Broadcast", P("Transpose", any_("p"), name="turned")),
)
_MASK = Either((P("Select", any_("shown"), _BESIDE, any_()), _BESIDE))


def _heads(root: Node) -> Node | None:
    size, bits, mode, transposed = root.arg
    x, *packed = root.src
    matrices = [under(each) for each in packed if each is not None]
    if x is None or not transposed or not all(map(is_weight, matrices)):
        return None
    fit = len(matrices[0].shape) == 3 and x.shape[1:3] == (matrices[0].shape[0], 1)
    return root.like("Heads", x, *matrices, arg=(size, bits, MODES[mode])) if fit else None


class _Rows(NamedTuple):
    """Rows of a cache: those that count, all, and which is the last that counts."""

    counted: Node
    buffer: Node
    last: Size


def _rows(node: Node) -> _Rows | None:
    update = node.src[0] if node.op == "Slice" else node
    if update is None or update.op != "SliceUpdate" or len(update.shape) != 4:
        return None
    _, start, stop, _ = update.arg
    last = start[2]
    whole = node.op != "Slice" or (not any(node.arg[0]) and node.arg[1][2] == stop[2])
    if not isinstance(last, Size) or stop[2] != last._replace(const=last.const + 1) or not whole:
        return None
    return _Rows(node, update, last)


def _latent(root: Node) -> Node | None:
    """Attention to what are keys and values at once, whose mask is scores of other rows."""
    q, c, v, mask, sinks = root.src
    scale, causal = root.arg
    found = fits(_MASK, mask) if q and c is v and sinks is None and not causal else None
    if found is None or q is None or c is None or q.shape[2] != 1 or c.shape[1] != 1:
        return None
    factor, keys, beside = number_of(under(found["factor"])), _rows(c), _rows(found["p"])
    if keys is None or beside is None or keys.last != beside.last or factor is None:
        return None
    if not isclose(factor, scale, rel_tol=1e-6) or found["turned"].arg[0][-2:] != (3, 2):
        return None
    r, shown = found["r"], found.get("shown")
    rows = [each.buffer if shown is None else each.counted for each in (keys, beside)]
    last = Node("Numbers", (), (keys.last,), (Spec((), mx.int32),))
    dtypes = {each.dtype for each in (q, r, *rows)}
    fit = r.shape[:3] == q.shape[:3] and len(dtypes) == 1
    if shown is not None and (shown.dtype != mx.bool_ or len(shown.shape) != 4):
        return None
    return root.like("Latent", q, r, *rows, last, shown, arg=(scale,)) if fit else None


LATENT: list[Rule] = [
    (Pattern(("Attention",)), _latent),
    (Pattern(("QuantizedMatmul",)), _heads),
]
