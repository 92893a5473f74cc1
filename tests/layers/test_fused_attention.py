"""The module on its own: caches, windows, norms, gradients, and the numbers it computes."""

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from numerics import (
    EIGHT_BITS,
    assert_same_losses,
    assert_same_sums,
)

from mlx_qlayers import attention, use_backend
from mlx_qlayers.layers.fused_attention import FusedAttention
from mlx_qlayers.runtime import trace

DIMS, LENGTH = 48, 23


def make(seed=1, **options):
    mx.random.seed(seed)
    options = {"num_kv_heads": 2, "head_dim": 32, "bias": True, **options}
    layer = FusedAttention(DIMS, 6, **options)
    return layer, mx.random.normal((2, LENGTH, DIMS))


def in_steps(layer, x, cache, mask=None):
    """A prompt, a few more tokens at once, then one after the other."""
    edges = [0, 9, 12, *range(13, LENGTH + 1)]
    parts = []
    for start, stop in pairwise(edges):
        part_mask = mask if stop - start > 1 else None
        parts.append(layer(x[:, start:stop], mask=part_mask, cache=cache))
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}, {"window": 5}, {"bias": False}])
def test_is_attention_between_projections(options):
    layer, x = make(**options)
    q, k, v = (
        layer[f"{name}_proj"](x).reshape(2, LENGTH, heads, 32).swapaxes(1, 2)
        for name, heads in zip("qkv", (6, 2, 2), strict=True)
    )
    extra = {name: options.get(name) for name in ("softcap", "window")}
    y = attention(q, k, v, scale=32**-0.5, mask="causal", **extra)
    y = layer.o_proj(y.swapaxes(1, 2).reshape(2, LENGTH, -1))
    assert_same_sums(layer(x, mask="causal"), y)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", [KVCache, QuantizedKVCache, ChunkedKVCache, RotatingKVCache])
def test_caches_give_what_the_whole_text_gives(kind, window):
    layer, x = make(rope=nn.RoPE(32), qk_norm=True, window=window)
    whole = layer(x, mask="causal")
    if kind is RotatingKVCache:
        cache = RotatingKVCache(max_size=window or 64)
    elif kind is ChunkedKVCache:
        cache = ChunkedKVCache(64)
    else:
        cache = kind(group_size=32) if kind is QuantizedKVCache else kind()
    found = in_steps(layer, x, cache, mask=None if window else "causal")
    if kind is QuantizedKVCache:
        assert mx.abs(found - whole).max() <= EIGHT_BITS * mx.abs(whole).max()
    else:
        assert_same_sums(found, whole)


def test_parameters_and_gradients():
    layer, x = make(rope=nn.RoPE(32), qk_norm=True)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rope"}
    assert set(layer.children()) == names
    assert layer.q_proj.weight.shape == (192, DIMS) and layer.k_proj.weight.shape == (64, DIMS)

    def loss(x):
        return (layer(x, mask="causal") ** 2).mean()

    _, gradients = nn.value_and_grad(layer, loss)(x)
    for name in names - {"rope"}:
        gradient = gradients[name]["weight"]
        assert gradient.shape == layer[name].weight.shape
        assert 0 < mx.abs(gradient).max().item() < 1e3


def test_defaults():
    layer = FusedAttention(64, 4)
    assert layer(mx.zeros((1, 3, 64))).shape == (1, 3, 64)
    assert layer.k_proj.weight.shape == (64, 64) and "bias" not in layer.q_proj
    assert "num_heads=4, num_kv_heads=4" in repr(layer)


def trained(steps=60, **options):
    """Losses of a layer that learns from scratch to copy the token before."""
    mx.random.seed(3)
    layer = FusedAttention(64, 2, rope=nn.RoPE(32), **options)
    x = mx.random.normal((4, 12, 64))
    losses = []

    def loss(x):
        return ((layer(x, mask="causal")[:, 1:] - x[:, :-1]) ** 2).mean()

    step = nn.value_and_grad(layer, loss)
    for _ in range(steps):
        value, gradients = step(x)
        layer.update(
            nn.utils.tree_map(lambda p, g: p - 1.0 * g, layer.trainable_parameters(), gradients)
        )
        mx.eval(layer.parameters())
        losses.append(value.item())
    return losses


def test_learns_to_copy_the_token_before():
    """By kernels in both directions: the loss falls, and as it does by MLX's operators."""
    options = {"window": 3, "softcap": 20.0, "qk_norm": True, "num_kv_heads": 1}
    with use_backend("reference"):
        stock = trained(**options)
    with use_backend("host"), trace() as launches:
        found = trained(**options)
    assert stock[-1] < stock[0] / 2
    assert_same_losses(found, stock)
    kernels = {"attention_forward", "attention_backward_queries", "attention_backward_keys"}
    assert {launch.kernel for launch in launches} == kernels and len(launches) == 3 * 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": 0}, "dims must be an integer >= 1, not 0"),
        ({"dims": 64.0}, "dims must be an integer >= 1, not 64.0"),
        ({"dims": 63}, "dims must be a multiple of num_heads 4, not 63"),
        ({"num_heads": 0}, "num_heads must be an integer >= 1, not 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be an integer >= 1, not 0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4, not 3"),
        ({"head_dim": -8}, "head_dim must be an integer >= 1 or None, not -8"),
        ({"bias": "no"}, "bias must be True or False, not 'no'"),
        ({"rope": 10000.0}, r"rope must be called as rope\(x, offset=...\), which 10000.0 cannot"),
        ({"window": 0}, "window must be an integer >= 1 or None, not 0"),
        ({"window": True}, "window must be an integer >= 1 or None, not True"),
        ({"softcap": 0.0}, "softcap must be a finite number > 0 or None, not 0.0"),
        ({"softcap": "50"}, "softcap must be a finite number > 0 or None, not '50'"),
        ({"qk_norm": 1e-5}, "qk_norm must be True or False, not 1e-05"),
    ],
    ids=str,
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        FusedAttention(**{"dims": 64, "num_heads": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": mx.zeros((3, 64))}, r"x must be \(B, L, dims\), not \(3, 64\)"),
        ({"x": [[1.0]]}, r"x must be \(B, L, dims\), not \[\[1.0\]\]"),
        ({"mask": mx.zeros((5, 5))}, r"mask must broadcast to \(1, 4, 3, 3\).*\(5, 5\)"),
        ({"mask": "full"}, "mask must be None, 'causal' or an mx.array, not 'full'"),
        ({"cache": {}}, "cache must be a key-value cache of mlx-lm, not {}"),
    ],
    ids=str,
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        FusedAttention(64, 4)(**{"x": mx.zeros((1, 3, 64)), **arguments})
