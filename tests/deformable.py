"""The golden values of deformable attention, made by ``golden/make_deformable_attention.py``."""

from functools import partial

import mlx.core as mx
import numpy as np
import sampling
from numerics import random, round_to

NAMES = ("values", "locations", "weights")


golden = partial(sampling.golden, of="deformable_attention")


def inputs(seed, shapes=((5, 7), (3, 2)), rows=(2, 6, 3), width=8, points=2, dtypes=None):
    """Values, locations, weights and a cotangent for (batch, queries, heads)."""
    rng, (batch, queries, heads) = np.random.default_rng(seed), rows
    dtype, of_locations, of_weights = dtypes or [mx.float32] * 3
    pixels, samples = sum(h * w for h, w in shapes), (*rows, len(shapes), points)
    return [
        random(rng, (batch, pixels, heads, width), dtype),
        round_to(rng.uniform(-0.3, 1.3, (*samples, 2)), of_locations),
        round_to(rng.uniform(0, 1, samples), of_weights),
        random(rng, (batch, queries, heads * width), dtype),
    ]
