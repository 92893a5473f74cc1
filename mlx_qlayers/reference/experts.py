"""How rows choose experts, in stock operators, as mlx-lm's models do it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..options import Router


def experts_chosen(
    logits: mx.array, bias: mx.array | None, factors: mx.array | None, *, router: Router
) -> list[mx.array]:
    """The experts of rows and their weights: see :func:`mlx_qlayers.ops.experts.experts_chosen`."""
    if router.score == "sparsemixer":
        return _sparsemixer(logits, factors, router)
    exact, count = logits.astype(mx.float32), router.top_k
    if router.score == "softmax":
        scores = mx.softmax(exact, axis=-1)
    elif router.score == "sigmoid":
        scores = mx.sigmoid(exact)
    else:
        scores = mx.sqrt(nn.softplus(exact)) if router.score == "sqrtsoftplus" else exact
    numbers = scores if bias is None else scores + bias
    if router.dropped:
        in_groups = mx.unflatten(numbers, -1, (router.groups, -1))
        largest = mx.topk(in_groups, min(2, in_groups.shape[-1]) if router.pairs else 1, axis=-1)
        lowest = mx.argpartition(largest.sum(axis=-1, keepdims=True), router.dropped - 1, axis=-2)
        fill = mx.array(router.fill, mx.float32)
        dropped = mx.stop_gradient(lowest[..., : router.dropped, :])
        numbers = mx.put_along_axis(in_groups, dropped, fill, axis=-2).flatten(-2, -1)
    # The largest first, as the kernel gives them: gradients go by the place among them.
    order = (
        mx.argsort(numbers, axis=-1)[..., ::-1] if router.last else mx.argsort(-numbers, axis=-1)
    )
    chosen = order[..., :count]
    # Not of what is returned: mx.vjp would give the next output this one's cotangent.
    at = mx.stop_gradient(chosen)
    weights = mx.take_along_axis(numbers if router.masked else scores, at, axis=-1)
    if router.score == "logits":
        weights = mx.softmax(weights, axis=-1)
    elif router.normed:
        total = weights.sum(axis=-1, keepdims=True) + router.epsilon
        weights = weights / mx.maximum(total, router.floor)
    weights = weights * router.scale
    if factors is not None:
        weights = weights * factors[at]
    return [chosen, weights.astype(router.dtype)]


def _sparsemixer(logits: mx.array, factors: mx.array | None, router: Router) -> list[mx.array]:
    """Of each choice a softmax of what is left, in float32, compared in the dtype of the logits."""
    left, chosen, weights = logits, [], []
    for _ in range(router.top_k):
        order = mx.argsort(left, axis=-1)[..., ::-1] if router.last else mx.argsort(-left, axis=-1)
        at = mx.stop_gradient(order[..., :1])
        top = mx.take_along_axis(left, at, axis=-1)
        far = (top - logits) / mx.maximum(mx.abs(logits), top) > router.epsilon
        band = mx.where(far, -mx.inf, left).astype(mx.float32)
        weights.append(mx.take_along_axis(mx.softmax(band, axis=-1), at, axis=-1))
        chosen.append(order[..., :1])
        left = mx.put_along_axis(left, at, mx.array(-mx.inf, left.dtype), axis=-1)
    weight, at = mx.concatenate(weights, axis=-1) * router.scale, mx.concatenate(chosen, axis=-1)
    if factors is not None:
        weight = weight * factors[mx.stop_gradient(at)]
    return [at, weight.astype(router.dtype)]
