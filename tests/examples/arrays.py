"""Arrays in every layout and with odd values, backends, and what calls may answer."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import use_backend
from mlx_qlayers.runtime.backend import BackendError, unavailable
from mlx_qlayers.runtime.host import checks
from tests.gpus import STAND_INS, standing_in
from tests.numerics import assert_accurate, behind_one, round_to, to64

# Half of what runs on the host backend is checked; that build is slower. Beside a GPU it may not be
# installed.
_HOST = [] if unavailable("host") else ["host", "host", "host", "checked", *STAND_INS]
BACKENDS = st.sampled_from([*_HOST, "reference", "reference", "auto"])
# The smallest numbers above zero.
_SUBNORMAL = {mx.float32: 2.0**-149, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}
# The smallest normal ones.
NORMAL = {mx.float32: 2.0**-126, mx.float16: 2.0**-14, mx.bfloat16: 2.0**-126}
# Heads of queries, and of keys.
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (7, 1), (8, 4)])
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])
SEEDS = st.integers(0, 2**32 - 1)
VALUES = st.sampled_from(["normal"] * 6 + ["zeros", "tiny", "huge", "special"])


def _spoilt(dtype: mx.Dtype) -> mx.array:
    return mx.array(mx.nan if mx.issubdtype(dtype, mx.floating) else 1, dtype)


LAID_OUT: dict[str, Callable[[mx.array], mx.array]] = {
    "dense": lambda a: a,
    "lazy": lambda a: a.reshape(-1).reshape(a.shape),
    "behind one": behind_one,
    "every second": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: mx.contiguous(a[..., ::-1])[..., ::-1],
    "rows backwards": lambda a: mx.contiguous(a[::-1])[::-1],
    # Whatever reads outside of it is spoilt.
    "part": lambda a: mx.pad(a, [(1, 2)] * a.ndim, constant_values=_spoilt(a.dtype))[
        (slice(1, -2),) * a.ndim
    ],
    "transposed": lambda a: mx.contiguous(a.T).T,
    "swapped": lambda a: mx.contiguous(a.swapaxes(0, -1)).swapaxes(0, -1),
    # These two change the values: what is expected is worked out from what they give.
    "broadcast": lambda a: mx.broadcast_to(a[:1], a.shape),
    "broadcast last": lambda a: mx.broadcast_to(a[..., :1], a.shape),
}
LAYOUTS = st.sampled_from(["dense"] * 4 + list(LAID_OUT))


def dtype_of(name: str | mx.Dtype) -> mx.Dtype:
    """The dtype of that name, or the dtype itself."""
    dtype = getattr(mx, name) if isinstance(name, str) else name
    assert isinstance(dtype, mx.Dtype)
    return dtype


def laid_out(array: mx.array | None, layout: str) -> mx.array:
    """An array in another layout; it is evaluated, unless that is what the layout says."""
    if array is None or array.size == 0 or array.ndim == 0:
        return array
    found = LAID_OUT[layout](array)
    if layout != "lazy":
        mx.eval(found)
    return found


def placed(
    names: Sequence[str], given: Sequence[mx.array | None], layouts: Sequence[str]
) -> dict[str, Any]:
    """Arrays by name, each in a layout."""
    return {n: laid_out(a, to) for n, a, to in zip(names, given, layouts, strict=False)}


def filled(
    rng: np.random.Generator, shape: Sequence[int], dtype: mx.Dtype, values: str
) -> mx.array:
    """Random numbers of a kind, which ``dtype`` holds exactly."""
    x = rng.normal(size=shape)
    most = float(mx.finfo(dtype).max)
    if values == "zeros":
        x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    elif values == "tiny":
        x = x * rng.choice([_SUBNORMAL[dtype], 1e-7], shape)
    elif values == "huge":
        x = np.where(rng.random(shape) < 0.05, np.sign(x) * most * rng.random(shape), x)
    elif values == "special":
        odd = rng.choice([np.nan, np.inf, -np.inf, most, -most, -0.0], shape)
        x = np.where(rng.random(shape) < min(0.5, 3 / max(1, x.size)), odd, x)
    with np.errstate(over="ignore"):
        return round_to(np.clip(x, -most, most) if values == "huge" else x, dtype)


@contextmanager
def running(name: str) -> Iterator[None]:
    """A backend, or the checked build of ``host``, as it is or standing in for a GPU."""
    if name in STAND_INS:
        with standing_in(name):
            yield
        return
    with use_backend("host" if name == "checked" else name), checks(name == "checked"):
        yield


def compare(
    actual: mx.array,
    truth: np.ndarray,
    rounded: np.ndarray,
    terms: float | np.ndarray,
    what: str,
    most: float = np.inf,
) -> None:
    """:func:`assert_accurate` where the result is defined, whatever stands beside it.

    Args:
        actual: the result.
        truth: the same in float64.
        rounded: the same in float32.
        terms: for each element the sum of the absolute terms that it is made of: where that is
            infinite, NaN or more than accumulators hold, any order of adding gives another result.
        what: a name for the message.
        most: more than this is not held on the way, as where a bias of more precision is added.
    """
    assert actual.shape == truth.shape, f"{what}: {actual.shape}, not {truth.shape}"
    terms = np.broadcast_to(terms, truth.shape)
    most = min(most, float(mx.finfo(actual.dtype).max))
    sure = np.isfinite(terms) & (terms < 1e37) & (np.abs(truth) < most * 0.99)
    found = to64(actual)
    odd = ~np.isfinite(truth)
    assert not np.isfinite(found[odd]).any(), f"{what}: a NaN or an infinity got lost"
    if sure.any():
        _accurate(actual, found, sure, truth, rounded, terms, what)


def _accurate(
    actual: mx.array,
    found: np.ndarray,
    sure: np.ndarray,
    truth: np.ndarray,
    rounded: np.ndarray,
    terms: np.ndarray,
    what: str,
) -> None:
    base = round_to(rounded[sure], actual.dtype)
    chosen = mx.array(found[sure].astype(np.float32)).astype(actual.dtype)
    # Numbers below the normal ones may be flushed to zero, as GPUs do.
    flushed = np.abs(found[sure] - truth[sure]) <= NORMAL[actual.dtype]
    if not flushed.all():
        assert_accurate(chosen, truth[sure], base, terms=terms[sure].max(), what=what)


Answer = tuple[str, Any]
_NOT_OURS = re.compile(r"^\[(?!convert)\w+|incompatible function arguments|has no attribute")


def answer(call: Callable[[], Any], backend: str, names: Sequence[str]) -> Answer:
    """The outcome of a call on a backend: shapes and dtypes of its results, or its error.

    Raises:
        AssertionError: it raises anything but a ValueError or a TypeError of this package's own,
            or a ValueError that names no argument.
    """
    try:
        with running(backend):
            found = call()
            found = list(found) if isinstance(found, (list, tuple)) else [found]
            mx.eval(found)
    except BackendError:
        assert backend in ("host", "checked"), f"BackendError on {backend}"
        return "no kernel", None
    except (ValueError, TypeError) as error:
        assert not _NOT_OURS.search(str(error)), f"an error that is not ours, on {backend}: {error}"
        named = {*names} & {*re.findall(r"\w+", str(error))}
        # Python or MLX refuses an argument that is no array, no pair, or an array for a flag.
        odd = isinstance(error, TypeError) or re.search(
            r"^\[convert\]|to unpack|truth value", str(error)
        )
        assert named or odd, f"an error that names no argument: {error}"
        return "refused", None
    return "accepted", [(a.shape, a.dtype) for a in found]


def same_answers(call: Callable[[], Any], names: Sequence[str]) -> str:
    """Assert that all backends take a call, with the same shapes, or refuse it by its arguments.

    Returns:
        "accepted" or "refused".
    """
    answers = {backend: answer(call, backend, names) for backend in ("reference", "auto", "host")}
    kinds = [a for a in answers.values() if a[0] != "no kernel"]
    assert all(a == kinds[0] for a in kinds), f"backends do not agree: {answers}"
    return kinds[0][0]


def _other_dtype(a: Any) -> mx.array:
    return mx.zeros(a.shape, mx.int32 if mx.issubdtype(a.dtype, mx.floating) else mx.float32)


# Arguments as they should not be, made of what they should be.
_JUNK: dict[str, Callable[[Any], Any]] = {
    "None": lambda a: None,
    "text": lambda a: "x",
    "bytes": lambda a: b"x",
    "minus one": lambda a: -1,
    "zero": lambda a: 0,
    "one and a half": lambda a: 1.5,
    "nan": lambda a: float("nan"),
    "inf": lambda a: float("inf"),
    "2**70": lambda a: 2**70,
    "true": lambda a: True,
    "list": lambda a: [],
    "tuple": lambda a: (),
    "dict": lambda a: {},
    "object": lambda a: object(),
    "numpy": lambda a: np.ones((2, 64), np.float32),
    "complex": lambda a: mx.zeros(getattr(a, "shape", (2,)), mx.complex64),
    "scalar array": lambda a: mx.array(1.0),
    "empty array": lambda a: mx.zeros((0,)),
    "of one": lambda a: mx.zeros((1,)),
    "integers": lambda a: mx.zeros(getattr(a, "shape", (3,)), mx.int32),
    "booleans": lambda a: mx.zeros(getattr(a, "shape", (3,)), mx.bool_),
    "other dtype": lambda a: _other_dtype(a) if isinstance(a, mx.array) else mx.zeros(3),
    "an axis more": lambda a: a[None] if isinstance(a, mx.array) else (a,),
    "an axis less": lambda a: a[0] if isinstance(a, mx.array) and a.ndim and len(a) else a,
    "one longer": lambda a: _longer(a, -1),
    "a row longer": lambda a: _longer(a, 0),
    "empty rows": lambda a: a[:0] if isinstance(a, mx.array) and a.ndim else a,
    "no columns": lambda a: a[..., :0] if isinstance(a, mx.array) and a.ndim else a,
}
JUNK = st.sampled_from(sorted(_JUNK))


def _longer(a: Any, axis: int) -> Any:
    if not isinstance(a, mx.array) or not a.ndim:
        return a
    return mx.concatenate(
        [a, mx.zeros_like(a)[:1] if axis == 0 else mx.zeros_like(a)[..., :1]], axis
    )


def spoilt(arguments: dict[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """Arguments of which some are what they should not be."""
    return arguments | {name: _JUNK[kind](arguments[name]) for name, kind in changes.items()}


def changes(names: Sequence[str]) -> st.SearchStrategy[dict[str, str]]:
    """Which arguments to spoil, and how."""
    return st.dictionaries(st.sampled_from(sorted(names)), JUNK, min_size=1, max_size=2)
