"""The module against Deformable DETR's in transformers, with its parameters."""

import mlx.core as mx
import pytest
from deformable import golden
from mlx.utils import tree_flatten
from numerics import assert_accurate

from mlx_qlayers import DeformableAttention


@pytest.mark.parametrize("group", ["layer", "layer_boxes"])
def test_golden(group):
    given = golden(group)
    layer = DeformableAttention(12, num_heads=2, num_levels=3, num_points=2)
    prefix = "parameters."
    layer.load_weights(
        [(k.removeprefix(prefix), mx.array(a)) for k, a in given.items() if prefix in k]
    )
    arrays = [mx.array(given[name]) for name in ("queries", "features", "points")]
    shapes = tuple(map(tuple, given["shapes"].tolist()))
    out = layer(*arrays, shapes, mx.array(given["mask"]))
    assert_accurate(out, given["out"], given["out32"])


def test_at_first_it_looks_around_the_reference_point():
    layer, seen = DeformableAttention(16, num_heads=4, num_levels=1, num_points=2), []
    layer.value_proj = layer.output_proj = lambda x: x
    # Each pixel's features are its own number: the mean of those looked at is the point itself.
    pixels = mx.broadcast_to(mx.arange(81.0)[:, None], (81, 16))[None]
    points = mx.full((1, 1, 1, 2), 0.5)
    seen = layer(mx.zeros((1, 1, 16)), pixels, points, [(9, 9)])
    heads = seen.reshape(4, 4)[:, 0].tolist()
    assert [round(n, 3) for n in heads] == [41.5, 53.5, 38.5, 26.5]
    assert len(tree_flatten(layer.parameters())) == 4


def test_bad_input():
    with pytest.raises(ValueError, match="num_heads 5 must divide dims 16"):
        DeformableAttention(16, num_heads=5)
    with pytest.raises(ValueError, match="padding_mode must be zeros or border"):
        DeformableAttention(16, padding_mode="reflection")
    layer = DeformableAttention(16, num_levels=1)
    with pytest.raises(ValueError, match=r"reference_points must be .*\(1, 1, 1, 3\)"):
        layer(mx.ones((1, 1, 16)), mx.ones((1, 4, 16)), mx.ones((1, 1, 1, 3)), [(2, 2)])
