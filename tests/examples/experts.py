"""Random mixtures of experts: how rows choose, what they are multiplied with, and the sums."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.experts import experts_chosen, experts_combined, experts_products
from mlx_qlayers.options import SCORES, Clipped, PackedMatrix, Router
from tests.examples import arrays
from tests.examples.arrays import DTYPES, dtype_of
from tests.examples.calls import BACKENDS, Call, Numbers, Random
from tests.examples.fused import gated64
from tests.examples.products import packed
from tests.numerics import EPSILON, IN_FLOAT32, ROUNDINGS, random, round_to, to64
from tests.oracles import product, summed, sums
from tests.packed import FORMATS, dequantize64, terms64

EXPERTS = 5
_FIELDS = {
    "fmt": FORMATS,
    "rows": [(7,), (), (1,), (2, 3), (8,), (40,)],
    "each": [2, 1, 3, 4],
    "n": [41, 1, 8, 64],
    "groups": [3, 1, 2],
    "dtype": ("float32", DTYPES),
    "index": ["int32", "uint32", "int64"],
    "bias": [False, True],
    "gradient": [False, True],
}
# Rows and choices of each: alone, and several of which some choose the same.
_CASES = [
    {"fmt": Format(64, 4), "dtype": "bfloat16", "rows": (1,), "each": 3},
    {"fmt": Format(32, 3), "groups": 6, "index": "uint32"},
    {"fmt": Format(32, 4, "mxfp4"), "dtype": "float16", "groups": 6, "rows": (1,), "each": 4},
]


class _Chosen:
    """Rows, what they chose, and the products of each row with its experts."""

    def __init__(self, case: SimpleNamespace, rng: np.random.Generator, count: int, own: bool):
        self.case, fmt, self.dtype = case, case.fmt, dtype_of(case.dtype)
        self.k, self.shape = case.groups * fmt.group_size, (*case.rows, case.each)
        x = random(rng, (*(self.shape if own else case.rows), self.k), self.dtype)
        self.x = arrays.laid_out(x, case.layouts[0])
        order = rng.random((*case.rows, EXPERTS)).argsort(-1)[..., : case.each]
        self.at, self.own = order, own
        self.experts = arrays.laid_out(mx.array(order, dtype_of(case.index)), case.layouts[1])
        self.at = np.array(self.experts).astype(int)
        self.matrices = []
        for _ in range(count):
            parts = packed(rng, (EXPERTS, case.n, self.k), fmt, self.dtype)
            bias = random(rng, (EXPERTS, case.n), self.dtype) if case.bias else None
            given = (arrays.laid_out(a, case.layouts[2]) for a in (*parts, bias))
            self.matrices.append(PackedMatrix(*given))
        # Rows that kernels take; stock operators have no gradient for rows that chose nothing.
        self.full = x.size > 0

    def rounded(self, y: np.ndarray) -> np.ndarray:
        """The results of single operations in the dtype."""
        return y if y.dtype == np.float64 else to64(round_to(y, self.dtype)).astype(y.dtype)

    def products(self, x: np.ndarray, loose: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Those of each matrix and their terms, (..., J, N)."""
        rows = x[..., None, :] if self.own else x[..., None, None, :]
        found, terms = [], []
        for *parts, bias in self.matrices:
            dense, large = (
                f(*parts, self.case.fmt)[self.at].swapaxes(-1, -2) for f in (dequantize64, terms64)
            )
            rows = np.broadcast_to(rows, (*self.shape, 1, self.k))
            added = 0 if bias is None else to64(bias)[self.at].astype(x.dtype)
            y = self.rounded(product(rows, dense.astype(x.dtype))[..., 0, :])
            found.append(self.rounded(y + added))
            terms.append(loose * (sums(rows, dense, large)[..., 0, :] + np.abs(added)))
        return found, terms

    def back(self, up: np.ndarray, of: int) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of each row and choice, and its terms."""
        parts = self.matrices[of][:3]
        dense, large = (f(*parts, self.case.fmt)[self.at] for f in (dequantize64, terms64))
        up, dense = up[..., None, :], dense.astype(up.dtype)
        return product(up, dense)[..., 0, :], sums(up, dense, large)[..., 0, :]


def _products(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    given = _Chosen(case, rng, 2 if case.gate else case.matrices, case.own)
    unit, k = IN_FLOAT32[given.dtype], given.k
    norm: Any = None
    if case.norm and not case.own:
        count = int(np.prod(case.rows))
        squares = mx.abs(random(rng, (count, -(-k // 16)), mx.float32))
        norm = squares, 0.5

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        x, loose = n["x"], 1.0
        if norm:
            total = to64(norm[0]).sum(-1).reshape(*case.rows, 1).astype(x.dtype)
            x = given.rounded(x / np.sqrt(total / x.dtype.type(k) + x.dtype.type(0.5)))
            loose += unit * ROUNDINGS[given.dtype]
        found, terms = given.products(x, loose)
        if case.gate:
            most = 0.99 * float(mx.finfo(given.dtype).max)  # of products, which MLX rounds
            held = np.logical_and(*(np.abs(y) < most for y in found))
            found, terms = gated64(case.gate, found, terms, given.rounded, unit)
            terms = [np.where(held, terms[0], np.inf)]
        named = [{str(i): a for i, a in enumerate(each)} for each in (found, terms)]
        if up:
            backs = [given.back(dy, i) for i, dy in enumerate(up)]
            for to, each in zip(named, zip(*backs, strict=True), strict=True):
                total = sum(each)
                to["x"] = total if case.own else total.sum(-2)
            # MLX adds up what it rounded to the dtype.
            named[1]["x"] = unit * named[1]["x"].max(initial=0)
        return named[0], named[1]

    return Call(
        experts_products,
        {"x": given.x, "experts": given.experts},
        {"matrices": given.matrices, "fmt": case.fmt, "gate": case.gate, "norm": norm},
        (*given.shape, case.n),
        expected,
        ["x"] if case.gradient and not (case.gate or norm) else (),
        given.full,
    )


_CLIPPED = [Clipped(0.7, 1.702, 1.0), Clipped(shift=0.5)]
EXPERTS_PRODUCTS = Random(
    _FIELDS
    | {
        "matrices": [2, 1],
        "gate": [None, None, "silu", "gelu", "gelu_approx", *_CLIPPED],
        "norm": [False, True],
        "own": [False, True],
    },
    _products,
    [
        *(
            case | change
            for case in _CASES
            for change in (
                {"gradient": True},
                {"gate": "silu"},
                {"matrices": 1, "bias": True, "own": True},
                {"gate": _CLIPPED[0], "bias": True},
                {"gate": _CLIPPED[1]},
                {"norm": True},
            )
        ),
        {"rows": (0,), "gradient": True},
    ],
)


def _combined(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    given = _Chosen(case, rng, 1, True)
    unit = IN_FLOAT32[given.dtype]
    scores = arrays.laid_out(random(rng, given.shape, dtype_of(case.scores)), case.layouts[3])
    residual = random(rng, (*case.rows, case.n), given.dtype) if case.residual else None

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        (y,), (large,) = given.products(n["x"], 1.0)
        scores, added = n["scores"][..., None], n.get("residual", np.zeros(1))
        total = given.rounded((y * scores).sum(-2).astype(y.dtype))
        # Products are rounded to the dtype, and so may be what the scores make of them.
        lost = (large * np.abs(scores)).sum(-2) + unit * (np.abs(y * scores)).sum(-2)
        most = 0.99 * float(mx.finfo(given.dtype).max)  # of what is rounded on the way
        lost = np.where((np.abs(y) < most).all(-2), lost + np.abs(added), np.inf)
        found, terms = {"0": total + added}, {"0": lost}
        if up:
            of, lost = given.back(up[0][..., None, :] * scores, 0)
            found |= {"x": of, "scores": summed(y * up[0][..., None, :]), "residual": up[0]}
            of_scores = ((large + unit * np.abs(y)) * np.abs(up[0][..., None, :])).sum(-1)
            # They are sums in their dtype of products in that of x: neither holds more than that.
            most_of_sums = 0.99 * float(mx.finfo(dtype_of(case.scores)).max)
            held = (np.abs(y) < most).all(-1) & (of_scores < most_of_sums)
            of_scores = np.where(held, 2 * of_scores.max(initial=0), np.inf)
            terms |= {"scores": of_scores, "residual": 0.0}
            terms["x"] = unit * lost.max(initial=0)
        return found, terms

    return Call(
        experts_combined,
        {"x": given.x, "experts": given.experts, "scores": scores, "residual": residual},
        {"matrix": given.matrices[0], "fmt": case.fmt},
        (*case.rows, case.n),
        expected,
        ["x", "scores", "residual"] if case.gradient else (),
        given.full,
    )


EXPERTS_COMBINED = Random(
    _FIELDS | {"residual": [False, True], "scores": ("float32", DTYPES)},
    _combined,
    [
        *({**case, "bias": True, "residual": i % 2 > 0} for i, case in enumerate(_CASES)),
        {"fmt": Format(64, 4), "residual": True, "gradient": True, "scores": "float16"},
        {"rows": (0,), "residual": True},
    ],
)


def _sparsemixer(logits: np.ndarray, chosen: np.ndarray, epsilon: float) -> np.ndarray:
    """Shares of a row's experts in turn: none where one that is left is no number."""
    left, shares = logits.copy(), []
    for at in chosen.T[..., None]:
        top = np.take_along_axis(left, at, -1)
        far = (top - logits) / np.maximum(np.abs(logits), top) > epsilon
        band = np.exp(np.where(far, -np.inf, left) - top)
        shares.append(1 / band.sum(-1, keepdims=True))
        np.put_along_axis(left, at, -np.inf, -1)
    return np.concatenate(shares, -1)


def _choice(
    logits: np.ndarray, router: Router, bias: np.ndarray, factors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The choices of a stable sort, the shares, and which rows float32 may sort otherwise."""
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    scores = {
        "softmax": exact / exact.sum(-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "sqrtsoftplus": np.sqrt(np.logaddexp(0, logits)),
    }.get(router.score, logits)
    numbers = (scores + bias).reshape(len(logits), router.groups, -1)
    largest = np.sort(numbers, -1)[..., -2 if router.pairs else -1 :].sum(-1)
    unsure = _is_near(largest, router.dropped)
    lowest = np.argsort(largest, -1, kind="stable")[:, : router.dropped]
    np.put_along_axis(numbers, lowest[..., None], router.fill, axis=1)
    numbers = numbers.reshape(logits.shape)
    unsure |= _is_near(numbers, numbers.shape[-1] - router.top_k)
    order = np.argsort(numbers if router.last else -numbers, -1, kind="stable")
    chosen = (order[:, ::-1] if router.last else order)[:, : router.top_k]
    shares = np.take_along_axis(numbers if router.masked else scores, chosen, -1)
    if router.score == "sparsemixer":
        shares = _sparsemixer(logits, chosen, router.epsilon)
    elif router.score == "logits":
        shares = np.exp(shares) / np.exp(shares).sum(-1, keepdims=True)
    elif router.normed:
        shares = shares / np.maximum(shares.sum(-1, keepdims=True) + router.epsilon, router.floor)
    return chosen, shares * router.scale * factors[chosen], unsure


def _is_near(numbers: np.ndarray, place: int) -> np.ndarray:
    """Rows in whose order float32's roundings may swap what is at a place and what is before."""
    ordered = np.sort(numbers, -1)
    large = np.abs(np.where(np.isfinite(ordered), ordered, 0)).max(-1)
    gap = ordered[..., place] - ordered[..., place - 1] if 0 < place < ordered.shape[-1] else 0.0
    near: np.ndarray = (gap > 0) & (gap < 8 * EPSILON[mx.float32] * large)
    return near


def _by_expert(numbers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.take_along_axis(numbers, np.argsort(chosen, -1), -1)


def _chosen(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    """Rows of different numbers, of many equal ones, and with some that are none."""
    router, count, extra = case.router, case.experts, case.extra
    rows = [rng.permutation(count) / count * 8 - 4, rng.integers(-2, 2, count)]
    rows += [rows[0].copy(), np.full(count, np.nan)]
    rows[2][rng.permutation(count)[:2]] = np.nan
    logits = np.stack(rows).astype(np.float32)
    bias = rng.integers(-2, 3, count) / 4 * (extra and router.score not in _LOGITS)
    factors = 1 + rng.integers(0, 3, count) / 4 * extra
    given = [None if (a == plain).all() else a for a, plain in ((bias, 0), (factors, 1))]
    more = [None if a is None else mx.array(a.astype(np.float32)) for a in given]
    names = "logits", "bias", "factors"
    placed = arrays.placed(names, (mx.array(logits), *more), case.layouts)
    placed["logits"] = placed["logits"][:, None]

    def holds(found: list[mx.array]) -> None:
        numbers = (placed["logits"][:, 0], *(placed[name] for name in names[1:]))
        exact, *others = (None if a is None else to64(a) for a in numbers)
        bias, factors = (
            np.full(count, plain) if a is None else a
            for a, plain in zip(others, (0.0, 1.0), strict=True)
        )
        # MLX on a CPU has its own choice of equal numbers, and of those that are none.
        by_kernel = case.backend in BACKENDS
        distinct = [len({*row[np.isfinite(row)]}) == count for row in exact]
        sure = np.array([by_kernel or each for each in distinct])
        *results, unsure = _choice(exact, router, bias, factors)
        sure &= ~unsure
        wanted, truth = (a[sure] for a in results)
        shares, chosen = to64(found[0])[sure, 0], np.array(found[1])[sure, 0]
        assert (np.sort(chosen, -1) == np.sort(wanted, -1)).all(), "error in the choice"
        shares, truth = _by_expert(shares, chosen), _by_expert(truth, wanted)
        large = np.nan_to_num(np.abs(truth)).max(-1, keepdims=True, initial=1e-30)
        close = np.abs(shares - truth) <= 8 * EPSILON[router.dtype] * large
        assert (close | np.isnan(shares) & np.isnan(truth)).all(), "error in the shares"

    return Call(
        lambda **given: experts_chosen(**given)[::-1],
        placed,
        {"router": router},
        (4, 1, router.top_k),
        lambda *_: ({}, {}),
        dtypes=[router.dtype, mx.uint32],
        holds=holds,
    )


_LOGITS = ("logits", "sparsemixer")
# Routers: the kind, how many experts, and whether there is a bias and a factor of each.
_ROUTERS = [
    (Router(3), 40, False),
    (Router(10, normed=False), 512, False),
    (Router(9, last=True, dtype=mx.bfloat16), 9, False),
    (Router(6, "sigmoid", 8, 4, scale=2.5, epsilon=1e-20), 256, True),
    (Router(4, "sigmoid", 4, 1, last=True, fill=-float("inf"), floor=1e-12), 40, True),
    (Router(3, "softmax", 4, 2, False, masked=True, normed=False, scale=16.0), 64, False),
    (Router(4, "logits", last=True), 32, False),
    (Router(4, "logits"), 32, False),
    (Router(2, "sqrtsoftplus", last=True, epsilon=1e-6), 33, True),
    (Router(3, "sparsemixer", normed=False, epsilon=0.25), 40, False),
]


def _router(score: str, groups: tuple[int, int], **options: Any) -> Router:
    count, dropped = groups
    alone = {"groups": 1, "dropped": 0, "normed": score == "logits"} if score in _LOGITS else {}
    return Router(score=score, **{"groups": count, "dropped": dropped} | options | alone)


_FLAGS = {name: st.booleans() for name in ("pairs", "last", "normed")}
EXPERTS_CHOSEN = Random(
    {
        "router": (
            Router(3),
            st.builds(
                _router,
                st.sampled_from(SCORES),
                top_k=st.integers(1, 9),
                groups=st.sampled_from([(1, 0), (2, 0), (2, 1), (4, 1), (4, 2)]),
                scale=st.sampled_from([1.0, 2.5]),
                epsilon=st.sampled_from([1e-20, 0.25]),
                dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
                **_FLAGS,
            ),
        ),
        "experts": [40, 24, 64, 256],
        "extra": [False, True],
    },
    _chosen,
    [dict(zip(("router", "experts", "extra"), each, strict=True)) for each in _ROUTERS],
)
