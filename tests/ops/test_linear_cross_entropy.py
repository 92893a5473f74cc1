"""The cross entropy of a layer's outputs beside that of MLX, its memory and its transformations."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_qlayers import linear_cross_entropy, log_probabilities, use_backend
from mlx_qlayers.dispatch import dispatch
from mlx_qlayers.ops.linear_cross_entropy.blocks import COLUMNS, STEP
from mlx_qlayers.ops.linear_cross_entropy.logits import OF_LOGITS, Scoring
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.gpus import GPUS
from tests.numerics import assert_accurate, assert_same_sums, random, round_to, to64

NAMES = "x", "weight", "bias"


def of_logits(targets, mask, reduction, x, weight, bias):
    """The result of MLX's operators, all logits at once."""
    z = x @ weight.T + bias
    inside = (targets >= 0) & (targets < len(weight))
    weights = inside * (1 if mask is None else mask)
    safe = mx.where(inside, targets, 0)
    losses = nn.losses.cross_entropy(z, safe) * weights
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum()


@pytest.mark.parametrize("path", ["host", "checked", *GPUS])
@pytest.mark.parametrize(
    ("rows", "words", "dtype", "softcap", "smoothing", "biased"),
    [
        (1, 1, mx.float32, None, 0.0, False),
        (3, 257, mx.bfloat16, None, 0.0, True),
        (9, 700, mx.float16, 3.0, 0.0, False),
        (5, 1030, mx.bfloat16, 5.0, 0.2, True),
        (17, 33, mx.float32, None, 0.1, False),
    ],
)
def test_kernels_of_a_block_of_logits(path, rows, words, dtype, softcap, smoothing, biased):
    """Beside float64; also numbers so large that only their differences have exponentials."""
    rng = np.random.default_rng(words)
    y = random(rng, (rows, words), dtype, 4.0) + (0 if softcap else 200 * (rows > 3))
    targets = mx.array(rng.integers(-2, words + 2, rows).astype(np.int32))
    bias = random(rng, (words,), mx.float32) if biased else None
    scoring, backend = Scoring(softcap, smoothing, 3 * words), "host" if path == "checked" else path

    def oracle(kind):
        z = to64(y).astype(kind) + (0 if bias is None else to64(bias).astype(kind))
        z = z if softcap is None else softcap * np.tanh(z / kind(softcap))
        at = np.arange(words) == np.array(targets)[:, None]
        top = z.max(1, keepdims=True)
        lse = top + np.log(np.exp(z - top).sum(1, keepdims=True))
        aims = (1 - smoothing) * at + smoothing / (3 * words)
        g = np.exp(z - lse - kind(0.5)) - aims
        g = g if softcap is None else g * (1 - (z / kind(softcap)) ** 2)
        return lse[:, 0], (aims * z).sum(1), g, np.abs(z).max(), (aims * np.abs(z)).sum(1).max()

    *truth, large, terms = oracle(np.float64)
    *rounded, _, _ = oracle(np.float32)
    with use_backend(backend), checks() if path == "checked" else nullcontext():
        found = dispatch(OF_LOGITS, (y, targets, bias), (None, *scoring))
        lse = mx.array(truth[0].astype(np.float32)) + 0.5
        found += dispatch(OF_LOGITS, (y, targets, bias, lse), (dtype, *scoring))
        mx.eval(found)
    # An error of a logit is a relative one of its exponential.
    for one, exact, other, size in zip(
        found, truth, rounded, (large, terms, 1 + large), strict=True
    ):
        assert_accurate(one, exact, round_to(other, one.dtype), terms=size)


@pytest.mark.parametrize("path", ["reference", "host", *GPUS])
def test_logits_that_are_no_numbers(path):
    y = mx.array([[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [-float("inf")] * 3])
    with use_backend(path):
        lse, _ = dispatch(OF_LOGITS, (y, mx.array([0, 0, 0]), None), (None, None, 0.0, 3))
    assert np.array_equal(np.array(lse), [np.nan, np.inf, -np.inf], equal_nan=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_never_in_memory_as_a_whole(packed, compiled):
    rows, words, width = 512, 20 * COLUMNS + 3, 32
    x, targets = mx.random.normal((rows, width)), mx.random.randint(0, words, (rows,))
    weight = mx.random.normal((words, width))
    head = mx.quantize(weight, 32, 4) if packed else (weight,)

    def loss(x, *head):
        return linear_cross_entropy(x, targets, *head, group_size=32)

    # Of the matrix too, where it has gradients of its own.
    function = mx.grad(loss, argnums=(0, 2, 3) if packed else (0, 1))
    function = mx.compile(function) if compiled else function
    mx.eval(x, targets, head)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(x, *head))
    peak = mx.get_peak_memory() - before
    # Some arrays of the blocks that MLX's queue holds, and the gradient of the matrix.
    assert peak < 12 * rows * COLUMNS * 4 + 2 * weight.nbytes < rows * words * 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_words_below_rounding_and_rows_that_do_not_count_are_left_out(dtype):
    """The second block has no probability, the third one that of its targets."""
    rows, words = 3 * STEP, 3 * COLUMNS
    mx.random.seed(3)
    x, weight = mx.random.normal((rows, 32)).astype(dtype), mx.random.normal((words, 32))
    weight = (weight / 4).astype(dtype)
    bias = mx.repeat(mx.array([0.0, -60, -60]), COLUMNS)
    targets = mx.random.randint(0, COLUMNS, (rows,))
    targets[:9] += 2 * COLUMNS
    mask = mx.arange(rows) < STEP - 3
    of = partial(of_logits, targets, mask, "mean")

    def ours(x):
        return linear_cross_entropy(x, targets, weight, bias=bias, mask=mask)

    with use_backend("host"), trace() as launches:
        found = mx.grad(ours)(x)
    slopes = [launch for launch in launches if launch.kernel.startswith("logits_slopes")]
    assert len(slopes) == 2
    assert_gradient(found, of, x, weight, bias)


def assert_gradient(found, of, x, *others):
    """That of the first array is MLX's in float64, as far as MLX's in float32 is."""
    exact = [a.astype(mx.float64) for a in (x, *others)]
    with mx.stream(mx.cpu):
        truth = to64(mx.grad(of)(*exact))
    assert_accurate(found, truth, mx.grad(of)(x, *others), terms=np.abs(truth).max())


def test_blocks_of_a_gpu_are_no_more_than_two(monkeypatch):
    """As they are computed there, by MLX's operators here: the peak is that of fewer blocks."""
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    rows, width, found = 32, 32, []
    x = mx.random.normal((rows, width)) / width
    with use_backend("reference"):
        for count in (5, 9):
            words = 6 * COLUMNS * count
            weight, targets = mx.random.normal((words, width)), mx.random.randint(0, words, (rows,))
            gradient = mx.grad(partial(linear_cross_entropy, targets=targets, weight=weight))
            mx.eval(x, weight, targets)
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            dx = gradient(x)
            assert mx.get_active_memory() - before < x.nbytes  # else all activations would be there
            mx.eval(dx)
            found.append(mx.get_peak_memory() - before)
    assert found[1] < 1.1 * found[0]
    assert_gradient(dx, partial(of_logits, targets, None, "mean"), x, weight, mx.zeros(words))


def test_transformations():
    """Of one block, or several."""
    for words in (41, COLUMNS + 9):
        x, targets = mx.random.normal((3, 7, 64)), mx.random.randint(0, words, (3, 7))
        weight = mx.random.normal((words, 64))
        loss = partial(linear_cross_entropy, targets=targets, weight=weight)
        gradient = mx.grad(loss)
        assert_same_sums(mx.compile(loss)(x), loss(x))
        for changed in (mx.compile(gradient), mx.grad(mx.checkpoint(loss))):
            assert_same_sums(changed(x), gradient(x))
        with pytest.raises(ValueError, match="derivative"):
            mx.eval(mx.grad(lambda x, of=gradient: (of(x) ** 2).sum())(x))
        mapped = mx.vmap(lambda x, t, w=weight: linear_cross_entropy(x, t, w, reduction="none"))
        assert_same_sums(mapped(x, targets), loss(x, reduction="none"))
        for backend in ("host", "reference"):
            with use_backend(backend), pytest.raises(ValueError, match="jvp"):
                mx.jvp(loss, [x], [x])


def test_rows_that_do_not_count():
    """Not even where their losses are infinite."""
    weight, bias = mx.eye(4), mx.array([0.0, -mx.inf, 0, 0])
    x, targets = mx.ones((3, 4)), mx.array([0, 1, -100])
    loss = partial(linear_cross_entropy, x, targets, weight, bias=bias)
    assert loss(reduction="none")[1].item() == np.inf
    seen = loss(mask=mx.array([True, False, True]))
    assert_same_sums(seen, mx.log(mx.array(3.0)))
    assert np.isnan(loss(mask=mx.zeros(3)).item())
    assert loss(mask=mx.zeros(3), reduction="sum").item() == 0


def test_log_probabilities_are_of_a_distribution():
    weight = mx.random.normal((7, 32))
    x = mx.broadcast_to(mx.random.normal((1, 32)), (7, 32))
    found = mx.exp(log_probabilities(x, mx.arange(7), weight, softcap=5.0))
    assert_same_sums(found.sum(), mx.array(1.0))
