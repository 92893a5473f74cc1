"""Attention, as MLX spells it out on a CPU: to one node.

An ``Attention`` node takes queries (B, H, L, D), keys and values (B, Hkv, S, D), a mask or None and
sinks or None. Its arguments are the scale and whether the mask is causal.
"""

from __future__ import annotations

from ..graph import Node, P, Pattern, Rule

_SCORES = P(
    "Matmul(~Unflatten(Multiply(q, -scale)), ~Broadcast(turned @ Transpose(~ExpandDims(k))))"
)
_MASKED = P("Select(mask, scores, least) | Add(scores, mask) | scores", scores=_SCORES)


def _is_behind_first(start: tuple[int, ...], *_: object) -> bool:
    return (*start[:-1], start[-1]) == (0,) * (len(start) - 1) + (1,)


# The shares of keys, alone or beside those of one number of each head.
_SHARES = P(
    "Softmax(scores) | rest(Softmax(Concatenate(sinks, scores)))",
    scores=_MASKED,
    rest=Pattern(("Slice",), arg=_is_behind_first),
)


def _attention(
    q: Node, k: Node, v: Node, scale: float, turned: Node, root: Node, **found: Node
) -> Node | None:
    last = len(turned.shape) - 1
    if turned.arg[0][-2:] != (last, last - 1) or len(q.shape) != 4:
        return None
    if q.shape[1] != root.shape[1] or len(root.shape) != 4 or len(k.shape) != 4:
        return None
    mask = found.get("mask")
    if mask is not None and (mask := of_heads(mask)) is None:
        return None
    sinks = found.get("sinks")
    while sinks is not None and len(sinks.shape) > 1:
        known = sinks.op in ("Broadcast", "ExpandDims", "Unflatten", "AsType", "Reshape")
        sinks = sinks.src[0] if known else None
    if ("sinks" in found) != (sinks is not None) or (sinks and sinks.shape != (q.shape[1],)):
        return None
    return root.like("Attention", q, k, v, mask, sinks, arg=(scale, False))


def of_heads(mask: Node) -> Node | None:
    """A mask as it was before its heads were split into those of keys and their shares."""
    while mask.op in ("Broadcast", "ExpandDims", "Unflatten") and len(mask.shape) != 4:
        mask = mask.src[0]
    if mask.op == "ExpandDims" and len(mask.src[0].shape) == 4:
        mask = mask.src[0]
    return mask if len(mask.shape) <= 4 else None


def _primitive(root: Node) -> Node | None:
    scale, causal, has_sinks, *_ = root.arg
    q, k, v, *rest = root.src
    sinks = rest.pop() if has_sinks else None
    mask = rest.pop() if rest else None
    return root.like("Attention", q, k, v, mask, sinks, arg=(scale, bool(causal)))


ATTENTION: list[Rule] = [
    (P("Flatten[1, 2](Matmul(s, ~Broadcast(~ExpandDims(v))))", s=_SHARES), _attention),
    (P("Matmul(s, v)", s=_SHARES), _attention),
    (P("ScaledDotProductAttention"), _primitive),
]
