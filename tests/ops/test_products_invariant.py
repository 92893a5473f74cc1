"""Fused products of batch-invariant models: the bits of operators that are launched one by one."""

import mlx.core as mx
import numpy as np
import pytest
from batches import rules_of

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul import qmm_skinny
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.backend import Context, current, within
from mlx_qlayers.runtime.host import checks
from tests.devices import has_device
from tests.numerics import random
from tests.packed import random_packed

FMT = Format(64, 4)


def results(x, sizes, biased=False, device="cuda", gate=None, residual=None, **other):
    """By a GPU's kernels, launched one by one and at once: what they give, and how many run."""
    rng, given = np.random.default_rng(x.size), {"gate": gate, "residual": residual}
    some = [PackedMatrix(*random_packed(rng, n, x.shape[-1], FMT, x.dtype), None) for n in sizes]
    some = [m._replace(bias=random(rng, m.w.shape[:1], x.dtype) if biased else None) for m in some]

    def one_by_one():
        found = [quantized_matmul(x, *m[:3], True, *FMT, bias=m.bias) for m in some]
        found = [swiglu(*found)] if gate else found
        return found if residual is None else [residual + found[0]]

    for call in (one_by_one, lambda: fused_products(x, some, group_size=64, bits=4, **given)):
        as_model = within(current, Context(invariant=True))
        with rules_of(device, **other), use_backend("host"), as_model, trace() as records, checks():
            mx.eval(found := call())
        yield found, len(records)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 130])
@pytest.mark.parametrize("kind", ["siblings", "gate", "residual"])
def test_one_launch_has_the_bits_of_several(dtype, rows, kind):
    """Each product is rounded before a gate or a residual. More than 128 rows go one by one."""
    rng = np.random.default_rng(rows)
    x, residual = (random(rng, (rows, 1, n), dtype) for n in (320, 57))
    sizes, gate = {"siblings": (41, 16, 23), "gate": (57, 57)}.get(kind, (57,)), kind == "gate"
    more = {"gate": "silu" if gate else None, "residual": residual if kind == "residual" else None}
    (wanted, several), (found, launches) = results(x, sizes, biased=rows % 2 == 1, **more)
    blocks = -(-rows // 128)
    assert several == len(sizes) * blocks + gate
    assert launches == (several if blocks > 1 else 1)
    assert all(map(mx.array_equal, found, wanted)) and found[0].shape == (rows, 1, sizes[0])


def test_the_parts_of_long_rows_are_added_up_first():
    """Rows are long for a GPU of one core that has memory for a third of them."""
    x, residual = (random(np.random.default_rng(3), (3, n), mx.bfloat16) for n in (1024, 128))
    options = {"biased": True, "residual": residual, "cores": 1, "dynamic_memory": 1 << 14}
    (wanted, several), (found, launches) = results(x, (128,), **options)
    assert several == launches == 2 and mx.array_equal(found[0], wanted[0])


@pytest.mark.parametrize(
    ("sizes", "dtype", "device"),
    [
        ((8208, 48, 32), mx.bfloat16, "cuda"),  # rows are divided in a small matrix alone
        ((24, 24), mx.float32, "cuda"),
        ((24, 24), mx.bfloat16, "metal"),
    ],
)
def test_other_orders_have_launches_of_their_own(sizes, dtype, device):
    x = random(np.random.default_rng(5), (3, 512), dtype)
    (wanted, several), (found, launches) = results(x, sizes, device=device)
    assert several == launches == len(sizes) and all(map(mx.array_equal, found, wanted))


@pytest.mark.parametrize("fmt", [FMT, Format(32, 8), Format(64, 3), Format(16, 4, "nvfp4")])
@pytest.mark.parametrize("memory", [0, 232448])
def test_the_order_is_that_of_each_matrix_for_all_rows(fmt, memory, monkeypatch):
    """Of a model's siblings, whatever a GPU has shared memory for."""
    has_device(monkeypatch, "cuda", dynamic_memory=memory)
    for k, sizes in ((3584, (3584, 512, 512)), (3584, (18944,) * 2), (4096, (4096, 1024))):
        found = {
            (tile.run, tile.simds_k, tile.block_tiles, tile.warpgroup, tile.parts(k))
            for rows in (1, 8, 9, 16, 17, 128)
            for some in (sizes, *((n,) for n in sizes))
            if (tile := qmm_skinny.fixed_order("cuda", rows, some, k, fmt)) is not None
        }
        assert len(found) == 1
