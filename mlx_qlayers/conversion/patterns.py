"""The code of mlx-lm's modules that is recognised, spelled as mlx-lm spells it.

Only the code counts, see :mod:`.matcher`; nothing here is ever called. A function is the whole of a
method; the names of its attributes are those that :mod:`.fused_blocks` knows them by; a call of
``self.q_norm`` or ``self.k_norm`` may be absent.
"""

# mypy: disable-error-code="no-untyped-def"

import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention


def mlp_swiglu(self, x):
    return self.down(swiglu(self.gate(x), self.up(x)))


def mlp_silu(self, x):
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def mlp_gelu(self, x):
    return self.down(nn.gelu(self.gate(x)) * self.up(x))


def mlp_gelu_approx(self, x):
    return self.down(nn.gelu_approx(self.gate(x)) * self.up(x))


def attention(self, x, mask=None, cache=None):
    B, L, _ = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries.reshape(B, L, self.heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.kv_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.kv_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.rope(queries)
        keys = self.rope(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.o(output)


def block(self, x, mask=None, cache=None):
    h = x + self.attention(self.first_norm(x), mask, cache)
    return h + self.mlp(self.second_norm(h))


def block_by_keywords(self, x, mask=None, cache=None):
    h = x + self.attention(self.first_norm(x), mask=mask, cache=cache)
    return h + self.mlp(self.second_norm(h))
