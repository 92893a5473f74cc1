"""GPTQ of a block of columns, and ranges of groups, in MLX's operators."""

from __future__ import annotations

import mlx.core as mx

# Ranges that are tried for a group: all that its weights span, down to half of it.
SEARCH = 24


def fit(w: mx.array, importance: mx.array, bits: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Scales and biases (..., G) of weights (..., G, group size), by least weighted error."""
    levels = 2**bits - 1
    low, high = w.min(axis=-1), w.max(axis=-1)
    middle = 0.5 * (low + high)
    best: list[mx.array] = []
    for s in range(SEARCH):
        share = 1 - 0.5 * s / SEARCH
        scale = ((high - low) * share / levels).astype(dtype).astype(mx.float32)
        scale = mx.where(scale > 0, scale, 1)
        bias = (middle - (middle - low) * share).astype(dtype).astype(mx.float32)
        codes = mx.clip(mx.round((w - bias[..., None]) / scale[..., None]), 0, levels)
        wrong = w - (codes * scale[..., None] + bias[..., None])
        loss = (importance * wrong.square()).sum(axis=-1)
        new = [loss, scale, bias]
        best = best or new
        best = [mx.where(loss < best[0], a, b) for a, b in zip(new, best, strict=True)]
        mx.eval(best)
    return best[1].astype(dtype), best[2].astype(dtype)


def gptq_fixed_block(
    w: mx.array, u: mx.array, scales: mx.array, biases: mx.array, bits: int
) -> list[mx.array]:
    """Codes and errors, as :func:`mlx_qlayers.metal.gptq.launch.gptq_fixed_block` has them."""
    codes, errors = [], []
    for k in range(w.shape[-1]):
        scale, bias, value = scales[..., k], biases[..., k], w[..., k]
        code = mx.clip(mx.round((value - bias) / scale), 0, 2**bits - 1)
        error = (value - (code * scale + bias)) / u[:, k, k, None]
        w = w - error[..., None] * u[:, k, None]
        codes.append(code.astype(mx.uint8))
        errors.append(error)
    return [mx.stack(codes, axis=-1), mx.stack(errors, axis=-1)]


def gptq_block(
    w: mx.array, u: mx.array, group_size: int, bits: int, dtype: mx.Dtype
) -> list[mx.array]:
    """The same and scales and biases, which each group gets when its first column is reached."""
    importance = 1 / mx.diagonal(u, axis1=1, axis2=2).square()
    done: list[list[mx.array]] = []
    for k in range(0, w.shape[-1], group_size):
        end = k + group_size
        group = w[..., k:end]
        scale, bias = fit(group[:, :, None], importance[:, None, None, k:end], bits, dtype)
        step, start = (mx.broadcast_to(x.astype(mx.float32), group.shape) for x in (scale, bias))
        codes, errors = gptq_fixed_block(group, u[:, k:end, k:end], step, start, bits)
        w = mx.concatenate([w[..., :end], w[..., end:] - errors @ u[:, k:end, end:]], axis=-1)
        done.append([codes, errors, scale, bias])
    return [mx.concatenate([*parts], axis=-1) for parts in zip(*done, strict=True)]
