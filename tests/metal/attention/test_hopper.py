"""The attention kernels of Hopper GPUs against float64, with small tiles that fit on the host."""

from unittest import mock

import mlx.core as mx
import pytest
from attention_cases import check, make

from mlx_qlayers.metal.attention import backward, hopper
from mlx_qlayers.metal.attention.forward import Launcher
from mlx_qlayers.metal.attention.hopper import Cut
from mlx_qlayers.ops import attention as ops
from mlx_qlayers.ops.attention import attention
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from tests.gpus import on_gpus
from tests.machine import has_gpu, measured_from_one

# The most that a threadgroup of a Hopper GPU may ask for.
MOST_MEMORY = 227 * 1024
ALL = {"window": 9, "softcap": 30.0, "sinks": True}
KERNELS = {
    "attention_forward_ahead",
    "attention_backward_statistics",
    "attention_backward_once",
    "attention_backward_rows",
}


@pytest.fixture
def taken():
    """Make operations take the kernels, as this cuts the work."""

    def by(chosen):
        patches = [mock.patch.object(at, "cut", lambda *_: chosen) for at in (ops, backward)]
        for patch in patches:
            patch.start()
        advance_epoch()

    yield by
    mock.patch.stopall()
    advance_epoch()


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "extra", "chosen"),
    [
        # Queries that see no key, heads that share keys, and all that an operation takes.
        ((1, 4, 2, 70, 40, 32, 32), mx.float16, "causal", {}, Cut(simds=2, tile=32)),
        ((2, 2, 2, 33, 65, 40, 40), mx.bfloat16, "biased", ALL, Cut(simds=2, tile=16)),
        ((1, 3, 3, 33, 70, 32, 32), mx.float16, "boolean", {}, Cut(2, 32, kept=True)),
        ((1, 2, 1, 40, 33, 32, 32), mx.bfloat16, "none", {}, Cut(2, 32, slices=2)),
    ],
    ids=str,
)
def test_all_gradients(taken, shape, dtype, kind, extra, chosen):
    taken(chosen)
    with use_backend("host"), checks(), trace() as launches:
        check(attention, shape, dtype, kind, extra)
    # Query heads that share keys have kernels of their own.
    assert {launch.kernel.removesuffix("_of_groups") for launch in launches} >= KERNELS


@on_gpus
@pytest.mark.parametrize(
    ("width", "dtype", "kind", "extra"),
    [
        (64, mx.float16, "none", {}),
        (64, mx.bfloat16, "padded", ALL),
        (128, mx.bfloat16, "causal", {}),
        (128, mx.float16, "additive", ALL),
        (256, mx.bfloat16, "causal", {}),
    ],
    ids=str,
)
def test_on_a_gpu(gpu, width, dtype, kind, extra, monkeypatch):
    monkeypatch.setattr(hopper, "tabled", measured_from_one)
    for shape in ((1, 4, 2, 150, 520), (2, 1, 1, 300, 515)):
        with use_backend(gpu):
            check(attention, (*shape, width, width), dtype, kind, extra)


def test_views(taken):
    """Rows that cannot be read in packs of 16 bytes."""
    taken(Cut(simds=2, tile=16))
    _, arrays, options = make(3, (1, 4, 2, 40, 40, 40, 40), mx.bfloat16, "causal")
    views = [mx.contiguous(mx.pad(a, [(0, 0)] * 3 + [(3, 2)]))[..., 3:43] for a in arrays]
    with use_backend("host"):
        one, two = (
            mx.grad(lambda *a: attention(*a, **options).square().sum(), (0, 1, 2))(*given)
            for given in (arrays, views)
        )
    for x, y in zip(one, two, strict=True):
        assert mx.allclose(x, y, rtol=2e-2, atol=2e-2)


def launcher(width, queries=4096, **scores):
    q, k = (Spec((1, 8, n, width), mx.float16) for n in (queries, 4096))
    at = Launcher(AttentionCall(q, (k,), (k,), Scores(0.1, **scores)))
    at.device = "cuda"
    return at


def test_who_is_taken(monkeypatch):
    has_gpu(monkeypatch, "sm_90")
    for kernel in ("forward", "backward"):
        for width in (64, 128, 256) if kernel == "backward" else (64, 128):
            chosen = hopper.cut(kernel, launcher(width))
            shared = chosen.template(kernel, launcher(width))["SHARED"]
            assert 0 < shared <= MOST_MEMORY
        assert hopper.cut(kernel, launcher(264)) is None
    # By atomics sums are added in any order.
    assert hopper.cut("backward", launcher(128, deterministic=True)) is None
    assert hopper.cut("forward", launcher(64, deterministic=True)) is not None
    # Of few queries a threadgroup has no more rows than it needs.
    assert hopper.cut("forward", launcher(128, queries=64)).simds == 4
    assert hopper.cut("forward", launcher(136, queries=64)) is None
    has_gpu(monkeypatch, "sm_80")
    assert hopper.cut("forward", launcher(64)) is None
