"""Calls of the cross entropy of a layer's outputs, and its results in float64."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.linear_cross_entropy import (
    _TAKES,
    linear_cross_entropy,
    log_probabilities,
)
from mlx_qlayers.ops.linear_cross_entropy.blocks import ROWS
from tests.examples import arrays
from tests.examples.arrays import DTYPES, dtype_of
from tests.examples.calls import Call, Calls, Numbers, Random, declared
from tests.numerics import IN_FLOAT32, random, round_to, to64
from tests.oracles import product, summed, sums
from tests.packed import FORMATS, codes, dequantize64, terms64

_NAMES = "x", "targets", "weight", "scales", "biases", "bias", "mask"


def _head(case: SimpleNamespace, rng: np.random.Generator, width: int) -> Any:
    """A matrix whose products are a few units large, scales and biases."""
    dense = random(rng, (case.words, width), dtype_of(case.dtype), width**-0.5)
    return (*((dense,) if case.fmt is None else case.fmt.quantize(dense)), None, None)[:3]


def _softmax(
    z: np.ndarray, targets: np.ndarray, smoothing: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The losses, what the targets are, smoothed, and the probabilities."""
    aims = np.zeros_like(z)
    at = (targets >= 0) & (targets < z.shape[1])
    aims[np.flatnonzero(at), targets[at]] = 1
    aims = (aims * (1 - smoothing) + smoothing / z.shape[1]).astype(z.dtype)
    most = z.max(-1, keepdims=True)
    lse = most + np.log(summed(np.exp(z - most)))[:, None]
    return (lse - (aims * z).sum(-1, keepdims=True))[:, 0], aims, np.exp(z - lse)


def _linear_cross_entropy(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, fmt, count = dtype_of(case.dtype), case.fmt, int(np.prod(case.rows))
    width = 128 if fmt else case.width
    head = _head(case, rng, width)
    picks = rng.integers(-1, case.words + 1, case.rows)
    weights = random(rng, case.rows) if case.mask == "float" else mx.array(picks % 3 != 1)
    if case.reduction == "mean" and case.mask == "float":  # of weights that do not cancel
        weights = mx.abs(weights)
    given = arrays.placed(
        _NAMES,
        (
            random(rng, (*case.rows, width), dtype),
            mx.array(picks).astype(dtype_of(case.index)),
            *head,
            random(rng, (case.words,), dtype) if case.bias else None,
            weights if case.mask else None,
        ),
        case.layouts,
    )
    packed = [given[name] for name in _NAMES[2:5]]
    dense = dequantize64(*packed, fmt) if fmt else to64(packed[0])
    large = terms64(*packed, fmt) if fmt else np.abs(dense)
    options: dict[str, Any] = (fmt or Format(64, 4))._asdict()
    options |= {n: getattr(case, n) for n in ("label_smoothing", "softcap", "reduction")}
    # On a GPU logits, and their slopes, are rounded to the dtype.
    rounds = mx.default_device().type == mx.gpu
    unit = IN_FLOAT32[dtype] if rounds else 1.0

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        x = n["x"].reshape(count, width)
        kind, matrix, bias = x.dtype, dense.astype(x.dtype), n.get("bias", np.zeros(1))
        z = product(x, matrix.T)
        if rounds and kind == np.float32:
            z = to64(round_to(z, dtype)).astype(kind)
        z = z + bias.astype(kind)
        z = z if case.softcap is None else case.softcap * np.tanh(z / case.softcap)
        targets = n["targets"].reshape(-1).astype(int)
        losses, aims, shares = _softmax(z, targets, case.label_smoothing)
        inside = (targets >= 0) & (targets < case.words)
        weights = (inside * n.get("mask", np.ones(case.rows)).reshape(-1)).astype(kind)
        total = weights.sum() if case.reduction == "mean" else kind.type(1)
        y = np.where(inside, losses, 0) * weights / total
        found = {"0": y.reshape(case.rows) if case.reduction == "none" else y.sum()}
        # An error of a logit, or of a logarithm of a sum, is a relative one of a share.
        lse = losses + (aims * z).sum(-1)
        logits = np.abs(x) @ large.T + np.abs(bias) + np.abs(lse)[:, None]
        off = unit * (1 + logits.max(initial=0))
        sizes = np.abs(weights / total) * (off + np.abs(losses))
        # Of many losses each sum up to one is rounded.
        whole = max(sizes.sum(), np.sqrt((np.cumsum(y) ** 2).sum()))
        terms = {"0": whole if case.reduction != "none" else sizes.max(initial=0)}
        if not up:
            return found, terms
        dy = (up[0].reshape(-1) * weights / total)[:, None]
        g, size = shares - aims, off * shares + aims
        if case.softcap is not None:
            slope = 1 - (z / case.softcap) ** 2
            g, size = g * slope, size + off * (shares + aims)
        found |= _gradients(case, g * dy, x, matrix, packed[0])
        of = _gradients(case, size * np.abs(dy), np.abs(x), large, packed[0])
        # A target's term is much larger than those that are added behind it.
        of["x"] = np.maximum(of["x"], sums(g * dy, matrix, large))
        # Slope, x times cotangent, their product, sum: four roundings, which may all be one way.
        of |= {name: 2 * of[name] for name in ("weight", "scales", "biases") if name in of}
        terms |= {name: unit * a.max(initial=0) for name, a in of.items()}
        for name in ("x", "bias"):  # those of other shapes than the matrix's
            if (array := given[name]) is not None:
                found[name] = found[name].reshape(array.shape)
        return found, terms

    names = ["x"] if fmt else ["x", "weight"]
    names += ["scales", "biases"] if fmt and fmt.mode == "affine" else []
    shape = case.rows if case.reduction == "none" else ()
    return Call(
        linear_cross_entropy,
        given,
        options,
        shape,
        expected,
        [*names, *["bias"] * case.bias] if count else [],
        False,
        [mx.float32],
    )


def _gradients(
    case: SimpleNamespace, g: np.ndarray, x: np.ndarray, dense: np.ndarray, weight: mx.array
) -> Numbers:
    found, of_weight = {"x": product(g, dense), "bias": g.sum(0)}, product(g.T, x)
    if case.fmt is None:
        return found | {"weight": of_weight}
    groups = (len(of_weight), -1, case.fmt.group_size)
    if case.fmt.mode != "affine":
        return found
    q = codes(weight, case.fmt.bits).astype(x.dtype)
    both = (summed(a.reshape(groups)) for a in (of_weight * q, of_weight))
    return found | dict(zip(("scales", "biases"), both, strict=True))


# Of each number of bits one in turn, all modes, and no quantization.
_ALL = {"reduction": "sum", "label_smoothing": 0.1, "softcap": 3.0, "bias": True, "mask": "float"}
LINEAR_CROSS_ENTROPY = Random(
    {
        "fmt": [None, *FORMATS],
        "rows": [(7,), (), (1,), (2, 5), (3, 1, 2)],
        "words": [41, 1, 2, 2048, 2049, 4097],
        "width": [33, 1, 64],
        "dtype": ("float32", DTYPES),
        "index": ["int32", "int64", "int16"],
        "bias": [False, True],
        "mask": [None, "bool", "float"],
        "label_smoothing": [0.0, 0.1],
        "softcap": [None, 3.0],
    }
    | declared(_TAKES),
    _linear_cross_entropy,
    [
        {"reduction": "sum"},
        {"words": 1, "reduction": "mean"},
        {"rows": (2, 5), "words": 4100, "dtype": "bfloat16"} | _ALL,
        {"rows": (), "words": 2049, "dtype": "float16", "index": "int64"} | _ALL,
        {"rows": (1,), "words": 2, "index": "int16"},
        {"rows": (0, 3), "reduction": "sum"},
        *(
            {"rows": (ROWS + 3,), "reduction": r, "bias": True, "mask": "float"}
            for r in ("none", "mean")
        ),
        *(
            {"fmt": fmt, "dtype": ("float32", "float16", "bfloat16")[i % 3]}
            | {"words": 2100 if i % 5 == 0 else 41}
            | (_ALL if i % 2 else {})
            for i, fmt in enumerate(FORMATS)
        ),
    ],
)

_T = mx.array([[0, 5, 7], [6, -100, 1]])
_W = dict(zip(("weight", "scales", "biases"), mx.quantize(mx.ones((8, 64))), strict=True))
_DENSE = {"weight": mx.ones((41, 64)), "scales": None, "biases": None}
LOSSES = [
    Calls(
        linear_cross_entropy,
        [
            ({"scales": None}, "biases must be None where scales is None"),
            ({"scales": None, "biases": None}, "weight must be float32, float16 or bfloat16, not"),
            ({"weight": mx.ones((41, 64))}, "weight must be uint32"),
            ({"biases": None}, "biases is missing"),
            ({"bits": 8}, "weight of shape"),
            ({"group_size": 48}, "group_size must be 32, 64, 128"),
            ({"mode": "int4"}, "mode must be one of"),
            ({"mode": "mxfp4", "group_size": None}, "scales of shape|biases must be None|mxfp4"),
            (_DENSE | {"weight": mx.ones((0, 64))}, r"weight must be \(V, K\) with V > 0"),
            ({"label_smoothing": 1.0}, "label_smoothing must be below 1, not 1.0"),
        ],
        [{"bias": mx.ones(41), "label_smoothing": 0.1}],
    ),
    Calls(log_probabilities, [], [{"x": mx.ones((2, 3, 64)), "targets": _T} | _W]),
]
