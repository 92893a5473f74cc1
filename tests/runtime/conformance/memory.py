"""Atomics, barriers, threadgroup memory and the ways in which MLX passes inputs."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from .case import ROUND, Case, case

_FILE = "memory.metal"
_ATTRIBUTES = (
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "simdgroup and lane",
    "quadgroup and lane",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "simdgroups and width",
)


def cases() -> Iterator[Case]:
    """Every atomic operation, barriers, memory and inputs."""
    yield from _atomics()
    yield _barriers()
    yield from _inputs()
    yield _attributes()
    yield from _surplus()


def _atomics() -> Iterator[Case]:
    n, fill = 256, 3
    rng = np.random.default_rng(3)
    for dtype in (mx.int32, mx.uint32):
        x = rng.integers(0 if dtype == mx.uint32 else -1000, 1000, n)
        bits = ROUND[dtype](np.concatenate([[fill], x]))
        cells = {
            "fetch_add": fill + x.sum(),
            "fetch_sub": fill - x.sum(),
            "fetch_min": min(fill, x.min()),
            "fetch_max": max(fill, x.max()),
            "fetch_and": np.bitwise_and.reduce(bits),
            "fetch_or": np.bitwise_or.reduce(bits),
            "fetch_xor": np.bitwise_xor.reduce(bits),
            "exchange": 9,
            "exchanged": fill + fill + 9 * (n - 1),
            "compare_exchange_weak": fill + x.sum(),
            "store": 2 * x,
        }
        rows = {name: ROUND[dtype](np.atleast_1d(value)) for name, value in cells.items()}
        counted = "atomic_integers", "x", [ROUND[dtype](x)], rows
        yield case(_FILE, *counted, n, 64, output="cells", atomic=True, init_value=fill, T=dtype)
    x = rng.integers(-500, 1000, n)
    cells = {
        "fetch_add": fill + x.sum(),
        "fetch_sub": fill - x.sum(),
        "exchange": 9,
        "exchanged": fill + fill + 9 * (n - 1),
        "compare_exchange_weak": x.max(),
        "store": 2 * x,
    }
    rows = {name: np.atleast_1d(value) for name, value in cells.items()}
    counted = "atomic_floats", "x", [x.astype(np.float32)], rows
    yield case(_FILE, *counted, n, 64, output="cells", atomic=True, init_value=fill)
    x = rng.integers(0, 5000, n).astype(np.int32)
    rows = {"histogram": np.bincount(x % 16, minlength=16), "fetch_max": x.max(keepdims=True)}
    counted = "atomic_threadgroup", "x", [x], rows
    yield case(_FILE, *counted, n, 64, output="counts", atomic=True, init_value=0)


def _barriers() -> Case:
    x = np.random.default_rng(4).integers(-50, 50, (2, 128)).astype(np.float32)
    scan = np.cumsum(x, axis=1)
    wide = (x[:, :32, None] * np.arange(1, 5)).reshape(2, 128)
    rows = {
        "threadgroup_barrier": x[:, ::-1],
        "scan": scan,
        "neighbour": np.roll(scan, -1, axis=1),
        "simdgroup_barrier": x[:, np.arange(128) ^ 1],
        "16-byte threadgroup memory": wide,
    }
    return case(_FILE, "barriers", "x", [x.ravel()], rows, 256, 128)


def _inputs() -> Iterator[Case]:
    rng = np.random.default_rng(5)
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.int64):
        x = mx.array(rng.integers(0, 100, 1024)).astype(dtype)
        rows = {"16 bytes": np.array(x.astype(mx.float32 if dtype == mx.bfloat16 else dtype))}
        yield case(_FILE, "wide_loads", "x", [x], rows, 1024 * dtype.size // 16, 16, T=dtype)
    for dtype, times, negate in (
        (mx.float16, 3, True),
        (mx.bfloat16, 0, False),
        (mx.int32, 7, True),
    ):
        v = rng.integers(-8, 8, 40).astype(np.float32)
        tenth, small = np.float32(0.1), np.float32(1e-3)
        rows = {
            "constant pointer": 1 + v * (0.5 + v * 0.25),
            "constant reference": v + 5,
            "constant table": v * np.tile([0.5, 0.25, 0.125, 2.0], 10),
            "template values": v * times * (-1 if negate else 1),
            "float literals": tenth * v + small,
        }
        given = [mx.array([1.0, 0.5, 0.25]), mx.array(5, mx.int32), mx.array(v).astype(dtype)]
        yield case(
            *(_FILE, "constant_inputs", "coefficients shift x", given, rows, 40, 8),
            # Contracted into a multiply-add or not.
            ulp={"float literals": 1},
            T=dtype,
            rows=times,
            negate=negate,
        )
    x = rng.standard_normal((3, 5, 4)).astype(np.float32)
    rows = {"elem_to_loc": x.transpose(2, 0, 1).ravel() + np.float32(3)}
    given = [mx.array(x).transpose(2, 0, 1)]
    yield case(_FILE, "strides", "x", given, rows, 60, 20, contiguous=False)


def _attributes() -> Case:
    size, group = (12, 4, 4), (6, 4, 2)
    z, y, x = np.meshgrid(*(np.arange(n) for n in size[::-1]), indexing="ij")
    at = [x.ravel(), y.ravel(), z.ravel()]
    inside = [a % g for a, g in zip(at, group, strict=True)]
    outside = [a // g for a, g in zip(at, group, strict=True)]
    groups = [n // g for n, g in zip(size, group, strict=True)]
    thread = inside[0] + 6 * (inside[1] + 4 * inside[2])

    def packed(parts: list[np.ndarray]) -> np.ndarray:
        return parts[0] + 100 * parts[1] + 10000 * parts[2]

    same = np.ones_like(thread)
    rows = [
        packed(at),
        packed(outside),
        packed(inside),
        thread,
        thread // 32 + 100 * (thread % 32),
        thread // 4 + 100 * (thread % 4),
        packed([same * n for n in group]),
        packed([same * n for n in groups]),
        packed([same * n for n in size]),
        same * (2 + 100 * 32 + 7),
    ]
    found = dict(zip(_ATTRIBUTES, rows, strict=True))
    return case(_FILE, "attributes", "x", [mx.full((8,), 7, mx.int32)], found, size, group)


def _surplus() -> Iterator[Case]:
    for size, group in (
        ((100, 1), (64, 1)),
        ((7, 9), (4, 4)),
        ((3, 5), (32, 32)),
        ((33, 2), (32, 1)),
    ):
        n = size[0] * size[1]
        x = np.random.default_rng(n).standard_normal(max(n, 8)).astype(np.float32)
        # A guard band behind the grid stays as it was filled.
        rows = {"grid": x[:n] + np.float32(1), "untouched": np.full(64, -5.0)}
        what = f"[{size[0]} x {size[1]} in {group[0]} x {group[1]}]"
        given = "surplus", "x", [x], rows, (*size, 1), (*group, 1)
        yield case(_FILE, *given, what=what, init_value=-5.0)
