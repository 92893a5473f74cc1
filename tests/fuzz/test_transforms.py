"""Each operation and each layer under mx.compile, mx.vmap, mx.vjp, mx.jvp and second derivatives.

A transformation gives the operation's results without it, or a ValueError, as of stock
operators that do not have it.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import QLinear, use_backend
from mlx_qlayers.commands.example import Example
from mlx_qlayers.layers.fused_attention import FusedAttention
from mlx_qlayers.layers.grid_sample import GridSample
from mlx_qlayers.layers.qlinear import QEmbedding
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.runtime import BackendError
from tests.examples import CALLS, in_float32, is_float
from tests.examples.arrays import SEEDS, running
from tests.fuzz.target import fuzz
from tests.numerics import assert_same_states, random

Arrays = Sequence[mx.array]
_LACKING = re.compile(r"jvp|vmap|vjp", re.IGNORECASE)
# Codes are steps; of a symmetric matrix the reference differentiates one of two equal halves.
WITHOUT = ("int8_matmul", "subtract_product")
LAYERS = ("QLinear", "QEmbedding", "QSwitchLinear", "FusedAttention", "GridSample")


@cache
def _calls() -> dict[str, Example]:
    """Calls of all operations, and of layers."""
    mx.random.seed(0)
    x, right = mx.zeros((5, 128)), mx.array([2, 0, 0, 1, 2])[:, None]
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "QLinear": (QLinear(128, 8, True, 64, 4), {"x": x}),
        "QEmbedding": (QEmbedding(8, 128, 64, 4).as_linear, {"x": x}),
        "QSwitchLinear": (
            QSwitchLinear(128, 8, 3, True, 64, 4),
            {"x": x[:, None, None], "indices": right},
        ),
        "FusedAttention": (FusedAttention(64, 2, 1), {"x": mx.zeros((1, 5, 64)), "mask": "causal"}),
        "GridSample": (GridSample(), {"x": mx.zeros((1, 5, 4, 3)), "grid": mx.zeros((1, 2, 3, 2))}),
    }
    return CALLS | {name: Example(name, *call) for name, call in calls.items()}


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
        name=st.sampled_from([n for n in (*CALLS, *LAYERS) if not n.startswith(WITHOUT)]),
        transformation=st.sampled_from(sorted(TRANSFORMATIONS)),
        backend=st.sampled_from(["host", "reference", "auto"]),
    ),
    examples=60,
    seconds=3.0,
)
def test_transformations(case: SimpleNamespace) -> None:
    works(case)


def works(case: SimpleNamespace) -> bool:
    """Whether a call has a transformation, which then gives the right numbers."""
    rng, example = np.random.default_rng(case.seed), _calls()[case.name]
    arrays = in_float32(example.arrays)
    places = [i for i, array in enumerate(arrays) if is_float(array)]
    # A part of what they were: positions, scales and states stay where they mean something.
    given = [arrays[i] + 0.1 * random(rng, arrays[i].shape) for i in places]

    def run(*floats: mx.array) -> list[mx.array]:
        changed = dict(zip(places, floats, strict=True))
        return example.results(*(changed.get(i, array) for i, array in enumerate(arrays)))

    try:
        with running(case.backend):
            found, wanted = TRANSFORMATIONS[case.transformation](run, given, rng)
            mx.eval(found, wanted)
    except (BackendError, ValueError, RuntimeError) as error:
        # Transformations that stock operators lack raise a RuntimeError.
        assert isinstance(error, BackendError | ValueError) or _LACKING.search(str(error)), case
        return False
    with use_backend("reference"):
        size = mx.stack([mx.abs(y).max() for y in run(*given)]).max(keepdims=True)
    for y, exact in zip(found, wanted, strict=True):
        assert (y.dtype, y.shape) == (exact.dtype, exact.shape)
        # Gradients are differences of what has the size of the results.
        both = (mx.concatenate([a.flatten(), size]) for a in (y, exact))
        assert_same_states(*both, bits=None, what=f"{case}")
    return True
