"""Each operation and each layer under mx.compile, mx.vmap, mx.vjp, mx.jvp and second derivatives.

What a transformation gives is what the operation gives without it, or a ValueError, as of stock
operators that do not have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import QLinear, attention, quantized_matmul, use_backend
from mlx_qlayers.layers.fused_attention import FusedAttention
from mlx_qlayers.layers.grid_sample import GridSample
from mlx_qlayers.layers.qlinear import QEmbedding
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.ops.attention_step import attention_step
from mlx_qlayers.ops.deform_conv2d import deform_conv2d
from mlx_qlayers.ops.deformable_attention import deformable_attention
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.ops.fused_products import fused_products
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.ops.rotary import rotary_embedding
from mlx_qlayers.options import PackedMatrix, Rotation
from mlx_qlayers.runtime import BackendError
from tests.fuzz.arrays import SEEDS, running
from tests.fuzz.packing import FORMAT, packed
from tests.fuzz.target import fuzz
from tests.numerics import assert_same_states, random

Arrays = Sequence[mx.array]
_LACKING = re.compile(r"jvp|vmap|vjp", re.IGNORECASE)
# Of a call: its function of arrays that may be differentiated, which gives some, and these.
Call = tuple[Callable[..., list[mx.array]], list[mx.array]]


def _exp(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    return lambda x: [exp(x)], [random(rng, (case.rows, 5))]


def _matrix(case: SimpleNamespace, rng: np.random.Generator, n: int, *lead: int) -> list[Any]:
    """w, scales and biases of matrices (*lead, n, 2 groups); scales of moderate size."""
    w, scales, biases = packed(rng, (*lead, n, 2 * case.fmt.group_size), case.fmt, mx.float32)
    if biases is None and case.fmt.mode != "nvfp4":
        scales = mx.clip(scales, 120, 126)
    return [w, scales, biases]


def _quantized_matmul(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    w, scales, biases = _matrix(case, rng, 9)
    factor = mx.array(1.5) if case.fmt.mode == "nvfp4" else None
    options: Any = {**case.fmt._asdict(), "global_scale": factor}

    def run(x: mx.array, s: mx.array = scales, b: Any = biases) -> list[mx.array]:
        return [quantized_matmul(x, w, s, b, **options)]

    floats = [] if biases is None else [scales, biases]
    return run, [random(rng, (case.rows, 2 * case.fmt.group_size)), *floats]


def _gather_qmm(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    w, scales, biases = _matrix(case, rng, 8, 3)
    right = mx.array(rng.integers(0, 3, (case.rows,)))
    factors = random(rng, (3,)) + 2 if case.fmt.mode == "nvfp4" else None
    options: Any = {**case.fmt._asdict(), "global_scale": factors}

    def run(x: mx.array, s: mx.array = scales, b: Any = biases) -> list[mx.array]:
        return [gather_qmm(x, w, s, b, None, right, **options)]

    floats = [] if biases is None else [scales, biases]
    return run, [random(rng, (case.rows, 1, 2 * case.fmt.group_size)), *floats]


def _fused_products(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    m = [PackedMatrix(*_matrix(case, rng, 8), None) for _ in range(2)]
    k, gate = 2 * case.fmt.group_size, "silu" if case.seed % 2 else None

    def run(x: mx.array, weight: mx.array) -> list[mx.array]:
        return fused_products(x, m, norm=(weight, 1e-5), gate=gate, **case.fmt._asdict())

    return run, [random(rng, (case.rows, k)), random(rng, (k,))]


def _attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    def run(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [attention(q, k, v, scale=0.2, mask="causal", softcap=30.0)]

    shapes = [(1, 2, case.rows, 32), *[(1, 1, case.rows + 3, 32)] * 2]
    return run, [random(rng, shape) for shape in shapes]


def _packed_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    k, v = (mx.quantize(random(rng, (1, 1, case.rows + 3, 64)), 32, 8) for _ in range(2))
    return (
        lambda q: [attention(q, k, v, scale=0.2, mask="causal")],
        [random(rng, (1, 2, case.rows, 64))],
    )


def _attention_step(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    positions = mx.array([case.rows, 2, case.rows + 2, *[-1] * 8], mx.int32)
    rotation = Rotation(32, case.seed % 2 == 1)

    def run(*arrays: mx.array) -> list[mx.array]:
        return attention_step(*arrays, positions, scale=0.2, rotation=rotation)

    buffers = [*[(1, 1, case.rows + 1, 32)] * 2, *[(1, 1, 4, 32)] * 2]
    shapes = [(1, 1, 64), *[(1, 1, 32)] * 2, *buffers]
    return run, [random(rng, shape) for shape in shapes]


def _rotary_embedding(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    return (
        lambda q, k: list(rotary_embedding(q, k, mx.array(7), dims=16)),
        [random(rng, (1, case.rows, n, 32)) for n in (2, 1)],
    )


def _grid_sample(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    layer = GridSample(padding_mode=("zeros", "border", "reflection")[case.seed % 3])
    # Between pixels: on one, a derivative is that of either side.
    grid = rng.integers(0, 4, (1, case.rows, 3, 2)) + rng.uniform(0.2, 0.8, (1, case.rows, 3, 2))
    return lambda x, g: [layer(x, g)], [
        random(rng, (1, 5, 5, 3)),
        mx.array((2 * grid + 1) / 5 - 1, mx.float32),
    ]


def _deformable_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    padding, samples = ("zeros", "border")[case.seed % 2], (1, case.rows, 2, 2, 2)
    shapes = [(5, 3), (2, 4)]
    sizes = np.array(shapes)[:, None, ::-1]
    inside = rng.integers(0, sizes, (*samples, 2)) + rng.uniform(0.2, 0.8, (*samples, 2))

    def run(values: mx.array, locations: mx.array, weights: mx.array) -> list[mx.array]:
        return [deformable_attention(values, shapes, locations, weights, padding_mode=padding)]

    locations = mx.array((inside + 0.5) / sizes, mx.float32)
    return run, [random(rng, (1, 23, 2, 8)), locations, random(rng, samples)]


def _deform_conv2d(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    moved = rng.integers(-1, 2, (1, 4, 3, 8)) + rng.uniform(0.2, 0.8, (1, 4, 3, 8))

    def run(x: mx.array, offset: mx.array, weight: mx.array, mask: mx.array) -> list[mx.array]:
        return [deform_conv2d(x, offset, weight, None, mask)]

    shapes = (1, 5, 4, 4), (3, 2, 2, 4), (1, 4, 3, 4)
    x, weight, mask = (random(rng, shape) for shape in shapes)
    return run, [x, mx.array(moved, mx.float32), weight, mask]


def _filled(case: SimpleNamespace, rng: np.random.Generator, layer: Any, *lead: int) -> Any:
    """A layer with the parameters of a random matrix."""
    n = layer.weight.shape[-2]
    layer.weight, layer.scales, biases = _matrix(case, rng, n, *lead)
    if biases is not None:
        layer.biases = biases
    return layer


def _qlinear(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    k = 2 * case.fmt.group_size
    layer = _filled(case, rng, QLinear(k, 8, True, *case.fmt))
    return lambda x: [layer(x)], [random(rng, (case.rows, k))]


def _qembedding(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    k = 2 * case.fmt.group_size
    layer = _filled(case, rng, QEmbedding(8, k, *case.fmt))
    return lambda x: [layer.as_linear(x)], [random(rng, (case.rows, k))]


def _qswitch_linear(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    k = 2 * case.fmt.group_size
    layer = _filled(case, rng, QSwitchLinear(k, 8, 3, True, *case.fmt), 3)
    right = mx.array(rng.integers(0, 3, (case.rows, 2)))
    return lambda x: [layer(x, right)], [random(rng, (case.rows, 1, 1, k))]


def _fused_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    mx.random.seed(case.seed)
    layer = FusedAttention(64, 2, 1)
    return lambda x: [layer(x, mask="causal")], [random(rng, (1, case.rows, 64))]


OPERATIONS: dict[str, Callable[[SimpleNamespace, np.random.Generator], Call]] = {
    make.__name__.removeprefix("_"): make
    for make in (
        _exp,
        _quantized_matmul,
        _gather_qmm,
        _fused_products,
        _attention,
        _packed_attention,
        _attention_step,
        _rotary_embedding,
        _grid_sample,
        _deformable_attention,
        _deform_conv2d,
        _qlinear,
        _qembedding,
        _qswitch_linear,
        _fused_attention,
    )
}


def _summed(run: Callable[..., list[mx.array]], rng: np.random.Generator, given: Arrays) -> Any:
    """The sum of what a call gives, times random weights."""
    with use_backend("reference"):
        weights = [random(rng, y.shape) for y in run(*given)]

    def loss(*arrays: mx.array) -> mx.array:
        pairs = zip(run(*arrays), weights, strict=True)
        return mx.add(*[sum((y * w).sum() for y, w in pairs), mx.array(0.0)])

    return loss


def _gradient(loss: Any) -> Any:
    """The function of its gradients of all arguments."""
    return lambda *a: mx.vjp(lambda *b: [loss(*b)], list(a), [mx.array(1.0)])[1]


def _compile(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    compiled = mx.compile(run)
    compiled(*given)
    return compiled(*given), run(*given)


def _vmap(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    others = [random(rng, a.shape) * 0.1 + a for a in given[:1]]
    both = mx.stack([given[0], others[0]])
    found = mx.vmap(lambda a: run(a, *given[1:]))(both)
    each = [run(a, *given[1:]) for a in both]
    return found, [mx.stack(ys) for ys in zip(*each, strict=True)]


def _vjp(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    gradient = _gradient(_summed(run, rng, given))
    found = gradient(*given)
    with use_backend("reference"):
        return found, gradient(*given)


def _compiled_vjp(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    gradient = _gradient(_summed(run, rng, given))
    return mx.compile(gradient)(*given), gradient(*given)


def _checkpointed(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    loss = _summed(run, rng, given)
    return _gradient(mx.checkpoint(loss))(*given), _gradient(loss)(*given)


def _jvp(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    """By the gradient: the derivative along a direction is their product."""
    loss, along = _summed(run, rng, given), [random(rng, a.shape) for a in given]
    _, (found,) = mx.jvp(lambda *a: [loss(*a)], list(given), along)
    parts = [g * d for g, d in zip(_gradient(loss)(*given), along, strict=True)]
    # Beside the size of what is added up, of which the sum has the roundings.
    size = sum(mx.abs(p).sum() for p in parts)
    return [mx.stack([found, size])], [mx.stack([sum(p.sum() for p in parts), size])]


def _second(run: Any, given: Arrays, rng: np.random.Generator) -> Any:
    """Of the first argument, by stock operators."""
    loss = _summed(run, rng, given)
    weight = random(rng, given[0].shape)
    second = mx.grad(lambda *a: (mx.grad(loss)(*a) * weight).sum())
    found = second(*given)
    with use_backend("reference"):
        return [found], [second(*given)]


TRANSFORMATIONS: dict[str, Callable[[Any, Arrays, np.random.Generator], Any]] = {
    "compile": _compile,
    "vmap": _vmap,
    "vjp": _vjp,
    "compile of vjp": _compiled_vjp,
    "checkpoint": _checkpointed,
    "jvp": _jvp,
    "vjp of vjp": _second,
}


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=SEEDS,
        operation=st.sampled_from(sorted(OPERATIONS)),
        transformation=st.sampled_from(sorted(TRANSFORMATIONS)),
        fmt=FORMAT,
        rows=st.sampled_from([1, 2, 5, 17]),
        backend=st.sampled_from(["host", "reference", "auto"]),
    ),
    examples=60,
    seconds=3.0,
)
def test_transformations(case: SimpleNamespace) -> None:
    rng = np.random.default_rng(case.seed)
    run, given = OPERATIONS[case.operation](case, rng)
    try:
        with running(case.backend):
            found, wanted = TRANSFORMATIONS[case.transformation](run, given, rng)
            mx.eval(found, wanted)
    except (BackendError, ValueError, RuntimeError) as error:
        # What stock operators lack is a RuntimeError.
        assert isinstance(error, BackendError | ValueError) or _LACKING.search(str(error)), case
        return
    with use_backend("reference"):
        size = mx.stack([mx.abs(y).max() for y in run(*given)]).max(keepdims=True)
    for y, exact in zip(found, wanted, strict=True):
        assert (y.dtype, y.shape) == (exact.dtype, exact.shape)
        # Gradients are differences of what has the size of the results.
        both = (mx.concatenate([a.flatten(), size]) for a in (y, exact))
        assert_same_states(*both, bits=None, what=f"{case}")
