"""SIMD-group and quad-group functions."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from .case import ROUND, Case, case

THREADS = 64
_case = partial(case, "simd.metal", size=THREADS, group=THREADS)
_NUMBERS = (mx.float32, mx.float16, mx.int32, mx.uint32, mx.int16)


def cases() -> Iterator[Case]:
    """Every SIMD and quad function over the dtypes that have it."""
    for group, width in (("simd", 32), ("quad", 4)):
        for dtype in (*_NUMBERS, *((mx.bfloat16,) if width == 32 else ())):
            yield _arithmetic(group, width, dtype)
            yield _moves(group, width, dtype)
        for dtype in (mx.int32, mx.uint32, mx.uint8):
            yield _bits(group, width, dtype)
    yield from _others()


def _groups(x: np.ndarray, width: int, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply f to each group's lanes, which it gets as rows."""
    return np.broadcast_to(f(x.reshape(-1, width)), (x.size // width, width)).ravel()


def _arithmetic(group: str, width: int, dtype: mx.Dtype) -> Case:
    # Small integers with few factors: every order of summation gives the same result.
    unsigned = dtype == mx.uint32
    rng = np.random.default_rng(1)
    x = rng.choice([1, 1, 1, 1, 2] if unsigned else [1, -1, 1, -1, 1, 1, 2], THREADS).astype(
        np.int64
    )
    x[1::9] = 3 if not unsigned else 1

    def fold(f: np.ufunc) -> np.ndarray:
        return _groups(x, width, lambda g: f.reduce(g, axis=1, keepdims=True))

    def scan(f: np.ufunc, exclusive: bool) -> np.ndarray:
        def one(g: np.ndarray) -> np.ndarray:
            inclusive = f.accumulate(g, axis=1)
            first = np.full((len(g), 1), f.identity)
            return np.concatenate([first, inclusive[:, :-1]], 1) if exclusive else inclusive

        return _groups(x, width, one)

    rows = {
        "sum": fold(np.add),
        "product": fold(np.multiply),
        "min": fold(np.minimum),
        "max": fold(np.maximum),
        "prefix_inclusive_sum": scan(np.add, False),
        "prefix_exclusive_sum": scan(np.add, True),
        "prefix_inclusive_product": scan(np.multiply, False),
        "prefix_exclusive_product": scan(np.multiply, True),
    }
    rows = {name: ROUND[dtype](row) for name, row in rows.items()}
    return _case(f"{group}_arithmetic", "x", [mx.array(x).astype(dtype)], rows, T=dtype)


def _bits(group: str, width: int, dtype: mx.Dtype) -> Case:
    rng = np.random.default_rng(2)
    bits = 8 * dtype.size
    x = rng.integers(0, 2**bits, THREADS, dtype=np.uint64)
    x[::3] |= np.uint64(2**bits - 1 - 8)
    fold = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    rows = {
        name: ROUND[dtype](_groups(x, width, lambda g, f=f: f.reduce(g, axis=1, keepdims=True)))
        for name, f in fold.items()
    }
    array = mx.array(ROUND[dtype](x))
    return _case(f"{group}_bits", "x", [array], rows, T=dtype)


def _moves(group: str, width: int, dtype: mx.Dtype) -> Case:
    x, filling = np.arange(1, THREADS + 1), np.arange(1, THREADS + 1) % 50 + 70

    def take(lane: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        at = np.broadcast_to(lane(np.arange(width)), width)
        return _groups(x, width, lambda g: g[:, at])

    def fill(delta: int, modulo: int) -> np.ndarray:
        """delta > 0 moves up, < 0 down; what comes from outside is the filling's, wrapped."""
        at, lane = np.arange(width) % modulo, np.arange(width)
        source = at - delta
        inside = (source >= 0) & (source < modulo)
        source = lane - at + source % modulo
        return np.where(
            np.tile(inside, THREADS // width),
            _groups(x, width, lambda g: g[:, source]),
            _groups(filling, width, lambda g: g[:, source]),
        )

    wide = width == 32
    from_lane, by, mask, turn, filled = (5, 3, 21, 5, 6) if wide else (2, 1, 3, 1, 1)
    rows = {"broadcast": take(lambda i: i * 0 + from_lane)}
    if not wide:
        rows["broadcast_first"] = take(lambda i: i * 0)
    rows |= {
        "shuffle": take(lambda i: (i * 7 + 3) % width),
        "shuffle_up": take(lambda i: np.where(i < by, i, i - by)),
        "shuffle_down": take(lambda i: np.where(i >= width - by, i, i + by)),
        "shuffle_xor": take(lambda i: i ^ mask),
        "shuffle_rotate_up": take(lambda i: (i - turn) % width),
        "shuffle_rotate_down": take(lambda i: (i + turn) % width),
        "shuffle_and_fill_up": fill(filled, width),
        "shuffle_and_fill_down": fill(-filled, width),
    }
    if wide:
        rows["shuffle_and_fill_up by 8"] = fill(3, 8)
        rows["shuffle_and_fill_down by 8"] = fill(-3, 8)
    rows = {name: ROUND[dtype](row) for name, row in rows.items()}
    arrays = [mx.array(x).astype(dtype), mx.array(filling).astype(dtype)]
    return _case(f"{group}_moves", "x filling", arrays, rows, T=dtype)


def _others() -> Iterator[Case]:
    x = np.arange(THREADS)
    ones = np.ones(THREADS, np.uint32)
    yield _case(
        "simd_votes",
        "x",
        [mx.array(x.astype(np.int32))],
        {
            "ballot": ones * np.uint32(0xAAAAAAAA),
            "all true": ones,
            "all false": ones * 0,
            "any true": (x < 32).astype(np.uint32),
            "any false": ones * 0,
            "active_threads_mask": ones * np.uint32(0xFFFFFFFF),
            "is_first": (x % 32 == 0).astype(np.uint32),
            "vote any": ones,
            "vote all": ones * 0,
            "broadcast_first": (x // 32 * 32).astype(np.uint32),
        },
    )
    yield _case(
        "quad_votes",
        "x",
        [mx.array(x.astype(np.int32))],
        {
            "all": (x // 4 < 5).astype(np.uint32),
            "any": (x < 4).astype(np.uint32),
            "is_first": (x % 4 == 0).astype(np.uint32),
        },
    )
    v = np.arange(THREADS, dtype=np.float32) - 20
    sums = _groups(v, 32, lambda g: g.sum(1, keepdims=True))
    yield _case(
        "simd_vectors",
        "x",
        [mx.array(v)],
        {
            "shuffle_xor x": v[x ^ 9],
            "shuffle_xor w": v[x ^ 9] + 3,
            "sum y": sums + 32,
            "sum z": sums + 64,
        },
    )
    yield _short()


def _short() -> Case:
    """Twelve threads: one SIMD group that is not full, in each of two threadgroups."""
    x = np.arange(24, dtype=np.float32)
    first = x < 12
    rows = {
        "sum": np.where(first, x[:12].sum(), x[12:].sum()),
        "max": np.where(first, 11, 23),
        "broadcast_first": np.where(first, 0, 12),
        "any": np.where(first, 1, 0),
    }
    return _case("short_simdgroup", "x", [mx.array(x)], rows, size=24, group=12)
