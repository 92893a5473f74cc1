"""Attention of one token over a long cache, plain and quantized, beside stock MLX and mlx-lm.

    python benchmarks/bench_attention.py

Each measurement is a chain of 28 calls, one for each layer of a model and each fed by the one
before, over several key-value caches in rotation, so that none is still in the processor's cache.
Calls are compiled by ``mx.compile``, as a model's steps are; on a CPU they are made one by one.
``MB`` is the peak above the inputs, of a whole chain. Every result is first compared with
stock operators in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
from common import arguments, output
from harness import Run, case, held, on, peak
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_qlayers import attention, backend
from mlx_qlayers.commands.example import Example
from mlx_qlayers.runtime.backend import BackendError, Mode, mode

LAYERS = 28
GROUP_SIZE = 64
GPU = backend() in ("cuda", "metal")
# Batch, heads, key heads, width of a head: Qwen2-7B's, and on a CPU the shipped model's kind.
HEADS = (1, 28, 4, 128) if GPU else (1, 12, 2, 64)
KEYS = (1024, 8192, 32768, 131072) if GPU else (64, 512, 2048)
DTYPES = {"bfloat16": mx.bfloat16} if GPU else {"bfloat16": mx.bfloat16, "float16": mx.float16}
SCALE = HEADS[3] ** -0.5
# Bytes of caches that no processor's cache holds.
_BEYOND_CACHE = 256 << 20

Cache = tuple[Any, Any]
Attend = Callable[[mx.array, Any, Any], mx.array]


class Case(NamedTuple):
    """A kind of cache, and how many keys are in it; plain where it has 0 bits."""

    bits: int
    dtype: str
    keys: int

    def row(self) -> dict[str, Any]:
        """The columns that name it."""
        cache = f"{self.bits} bits" if self.bits else self.dtype
        calls = "compiled" if GPU else "plain"  # the host backend cannot be traced
        return {"cache": cache, "q": self.dtype, "keys": self.keys, "calls": calls}


@lru_cache(1)
def inputs(case: Case) -> tuple[mx.array, list[Cache]]:
    """Queries, and random keys and values, as many caches as no processor's cache holds."""
    (batch, heads, kv_heads, width), dtype = HEADS, DTYPES[case.dtype]
    each = 2 * batch * kv_heads * case.keys * width * dtype.size
    found: list[Cache] = []
    for _ in range(min(LAYERS, max(1, _BEYOND_CACHE // each))):
        shape = batch, kv_heads, case.keys, width
        cache = [mx.random.normal(shape).astype(dtype) for _ in range(2)]
        if case.bits:
            cache = [tuple(mx.quantize(a, GROUP_SIZE, case.bits)) for a in cache]
        mx.eval(cache)
        found.append((cache[0], cache[1]))
    return mx.random.normal((batch, heads, 1, width)).astype(dtype), found


def stock(case: Case) -> Attend:
    """The attention that mlx-lm's models call."""
    if not case.bits:
        return lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE)
    # It scales its queries in place.
    return lambda q, k, v: quantized_scaled_dot_product_attention(
        mx.array(q), k, v, SCALE, None, GROUP_SIZE, case.bits
    )


def ours(q: mx.array, k: Any, v: Any) -> mx.array:
    """This package's operation, on the path that it chooses."""
    return attention(q, k, v, scale=SCALE)


@lru_cache(3)
def layers(case: Case, attend: str) -> Run:
    """The layers of a model, as far as attention goes."""
    q, caches = inputs(case)
    functions = {"stock": stock(case), "auto": ours, "kernel": on(backend(), ours)}

    def run(x: mx.array, caches: list[Cache]) -> mx.array:
        for i in range(LAYERS):
            x = functions[attend](x, *caches[i % len(caches)])
        return x

    # Stock's several operators for packed caches take MLX seconds to trace.
    if not GPU or (attend == "stock" and case.bits):
        return lambda: run(q, caches)
    # As a converted model's graphs: for evaluation only.
    with mode(Mode.INFERENCE):
        compiled = mx.compile(run)
        mx.eval(compiled(q, caches))
    return lambda: compiled(q, caches)


def error(case: Case) -> float:
    """Of a call, by kernel."""
    q, ((k, v), *_) = inputs(case)
    given = {"q": q, "k": k, "v": v, "scale": SCALE}
    call = Example(str(case), attention, given, terms=case.keys, steps=1)
    return held(call, on(backend(), partial(ours, q, k, v)))


def main() -> None:
    args = arguments(__doc__, repeats=5).parse_args()
    if backend() == "reference":
        raise BackendError("no backend runs kernels on this machine")
    names = ("auto us",) if GPU else ("auto us", "kernel us")
    mx.random.seed(0)
    with output(args, "attention_decode"):
        print("heads", "/".join(map(str, HEADS[1:3])), "width", HEADS[3], backend())
        case(
            lambda shape: {"stock us": layers(shape, "stock")},
            lambda shape: {name: layers(shape, name.split()[0]) for name in names},
            [Case(bits, dtype, n) for bits in (0, 8, 4) for dtype in DTYPES for n in KEYS],
            repeats=args.repeats,
            check=error,
            row=Case.row,
            unit="us",
            calls=lambda shape: LAYERS,
            more=lambda shape, _: {f"{n} MB": peak(layers(shape, n)) for n in ("stock", "auto")},
        )


if __name__ == "__main__":
    main()
