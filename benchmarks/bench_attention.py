"""Attention of one token over a long cache, plain and quantized, beside stock MLX and mlx-lm.

    python benchmarks/bench_attention.py

Each measurement is a chain of 28 calls, one for each layer of a model and each fed by the one
before, over several key-value caches in rotation, so that none is still in the processor's cache.
Calls are compiled by ``mx.compile``, as a model's steps are; over plain caches they are made one by
one from Python as well, and the kernels timed beside the path that ``auto`` takes there. ``MB`` is
the peak above the inputs, of a whole chain. Every result is first compared with float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from common import Table, add_output, measure, output, peak, print_facts
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_qlayers import attention, backend, use_backend
from mlx_qlayers.runtime.backend import BackendError, Mode, mode

LAYERS = 28
GROUP_SIZE = 64
GPU = backend() in ("cuda", "metal")
# The host backend runs at once, and cannot be traced.
CALLS = ("compiled", "plain") if GPU else ("plain",)
# Batch, heads, key heads, width of a head: Qwen2-7B's, and on a CPU the shipped model's kind.
HEADS = (1, 28, 4, 128) if GPU else (1, 12, 2, 64)
KEYS = (1024, 8192, 32768, 131072) if GPU else (64, 512, 2048)
DTYPES = {"bfloat16": mx.bfloat16} if GPU else {"bfloat16": mx.bfloat16, "float16": mx.float16}
# Bytes of caches that no processor's cache holds.
_BEYOND_CACHE = 256 << 20
# Seconds that MLX has for compiling its own products of packed caches.
_PATIENCE = 60

Cache = tuple[Any, Any]
Attend = Callable[[mx.array, Any, Any], mx.array]


def make_caches(keys: int, dtype: mx.Dtype, bits: int) -> list[Cache]:
    """Random keys and values, as many of them as no processor's cache holds."""
    batch, _, kv_heads, width = HEADS
    each = 2 * batch * kv_heads * keys * width * dtype.size
    found: list[Cache] = []
    for _ in range(min(LAYERS, max(1, _BEYOND_CACHE // each))):
        cache = [mx.random.normal((batch, kv_heads, keys, width)).astype(dtype) for _ in range(2)]
        if bits:
            cache = [tuple(mx.quantize(a, GROUP_SIZE, bits)) for a in cache]
        mx.eval(cache)
        found.append((cache[0], cache[1]))
    return found


def stock(bits: int) -> Attend:
    """The attention that mlx-lm's models call."""
    scale = HEADS[3] ** -0.5
    if not bits:
        return lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
    # It scales its queries in place.
    return lambda q, k, v: quantized_scaled_dot_product_attention(
        mx.array(q), k, v, scale, None, GROUP_SIZE, bits
    )


def ours(q: mx.array, k: Any, v: Any) -> mx.array:
    """This package's operation, on the path that it chooses."""
    return attention(q, k, v, scale=HEADS[3] ** -0.5)


def by_kernel(q: mx.array, k: Any, v: Any) -> mx.array:
    """This package's operation by kernel."""
    with use_backend(backend()):
        return ours(q, k, v)


def chain(
    attend: Attend, q: mx.array, layers: Sequence[Cache], kind: str
) -> Callable[[], mx.array]:
    """The layers of a model, as far as attention goes; compiled or not."""

    def run(x: mx.array, layers: Sequence[Cache]) -> mx.array:
        for i in range(LAYERS):
            x = attend(x, *layers[i % len(layers)])
        return x

    if kind == "plain":
        return lambda: run(q, layers)
    # As a converted model's graphs: for evaluation only.
    with mode(Mode.INFERENCE):
        compiled = mx.compile(run)
        mx.eval(compiled(q, layers))
    return lambda: compiled(q, layers)


def products_are_compiled() -> bool:
    """Have MLX compile the products of mlx-lm's path over packed caches, if it has to.

    On CUDA it does so at first use, half a minute each on a slow host, and keeps them on disk: here
    all at once, in processes of their own, while nothing is measured.

    Returns:
        Whether they were compiled in time.
    """
    if backend() != "cuda":
        return True
    kinds = [(bits, half) for bits in (8, 4) for half in ("keys", "values")]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--product", str(bits), half])
        for bits, half in kinds
    ]
    until = time.perf_counter() + _PATIENCE
    try:
        return not any(p.wait(max(0, until - time.perf_counter())) for p in processes)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            process.kill()


def product(bits: int, half: str) -> None:
    """The product of a query with packed keys, or of its scores with packed values."""
    _, heads, kv_heads, width = HEADS
    x = mx.zeros((1, kv_heads, heads // kv_heads, 1, width), mx.bfloat16)
    packed = mx.quantize(mx.zeros((1, kv_heads, 1, width, width), mx.bfloat16), GROUP_SIZE, bits)
    numbers = {"group_size": GROUP_SIZE, "bits": bits}
    mx.eval(mx.quantized_matmul(x, *packed, transpose=half == "keys", **numbers))


def verify(q: mx.array, cache: Cache) -> None:
    """Compare our result with a float32 computation.

    Raises:
        SystemExit: it is off by more than the dtype's rounding.
    """
    k, v = cache
    if isinstance(k, tuple):
        bits = 32 * k[0].shape[-1] // HEADS[3]
        parts = [[w, *(a.astype(mx.float32) for a in rest)] for w, *rest in cache]
        k, v = (mx.dequantize(*a, group_size=GROUP_SIZE, bits=bits) for a in parts)
    wide = [a.astype(mx.float32) for a in (q, k, v)]
    truth = mx.fast.scaled_dot_product_attention(*wide, scale=HEADS[3] ** -0.5)
    error = mx.abs(by_kernel(q, *cache).astype(mx.float32) - truth).max() / mx.abs(truth).max()
    if error.item() > 0.02:
        raise SystemExit(f"attention is off by {error.item():.2g}")


def read_bytes(cache: Cache) -> int:
    """The bytes that have to be read once."""
    return sum(part.nbytes for a in cache for part in (a if isinstance(a, tuple) else (a,)))


def contenders(bits: int, kind: str, has_stock: bool) -> dict[str, tuple[Attend, str]]:
    """The functions that are timed, and how each is called."""
    # Stock's several operators for packed caches take MLX seconds to trace.
    found = {"stock": (stock(bits), "plain" if bits else kind)} if has_stock else {}
    found["auto"] = ours, kind
    # Compiled, it is what `auto` takes.
    return found if kind == "compiled" else found | {"kernel": (by_kernel, kind)}


def rows(name: str, bits: int, repeats: int, has_stock: bool = True) -> Iterator[dict[str, Any]]:
    """Verify and measure one kind of cache in every length."""
    batch, heads, _, width = HEADS
    for keys in KEYS:
        q = mx.random.normal((batch, heads, 1, width)).astype(DTYPES[name])
        layers = make_caches(keys, DTYPES[name], bits)
        verify(q, layers[0])
        for kind in CALLS[:1] if bits else CALLS:
            runs = {
                n: chain(a, q, layers, w) for n, (a, w) in contenders(bits, kind, has_stock).items()
            }
            times = measure(runs, repeats=repeats)
            each = {f"{n} us": t.scaled(1e6 / LAYERS) for n, t in times.items()}
            best = min(t.median for n, t in each.items() if n != "stock us")
            row = {
                "cache": f"{bits} bits" if bits else name,
                "q": name,
                "keys": keys,
                "calls": kind,
            }
            row |= each | {"GB/s": read_bytes(layers[0]) / best / 1e3}
            row |= {f"{n} MB": peak(runs[n]) for n in ("stock", "auto") if n in runs}
            if has_stock:
                row["times"] = each["stock us"].median / each["auto us"].median
            yield row


def decoding_table(repeats: int) -> Iterator[Table]:
    """Print the table of all caches; it is yielded with the rows of each kind."""
    table = Table(
        {"cache": 9, "q": 9, "keys": 7, "calls": 8}
        | dict.fromkeys(("stock us", "auto us", "kernel us"), 13)
        | {"times": 6, "GB/s": 6, "stock MB": 8, "auto MB": 7}
    )
    mx.random.seed(0)
    print("heads", "/".join(map(str, HEADS[1:3])), "width", HEADS[3], "batch", HEADS[0], backend())
    table.print_header()
    has_stock = True
    for bits in (0, 8, 4):
        if bits == 8:
            has_stock = products_are_compiled()
        for name in DTYPES:
            for row in rows(name, bits, repeats, has_stock):
                table.add(**row)
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decode", action="store_true", help="this, which is all that it does")
    parser.add_argument("--product", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    args = parser.parse_args()
    if args.product:
        bits, half = args.product
        return product(int(bits), half)
    if backend() == "reference":
        raise BackendError("no backend runs kernels on this machine")
    print_facts()
    with output(args, "attention_decode"):
        for _ in decoding_table(args.repeats):
            pass


if __name__ == "__main__":
    main()
