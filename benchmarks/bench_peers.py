"""Attention, grid sampling and small 4-bit products beside stock MLX and PyTorch, in one process.

``python benchmarks/bench_peers.py [attention] [products] [sampling]`` needs an NVIDIA GPU and
PyTorch. Results of the same inputs are compared first; products by doctor's reference, as PyTorch
packs weights in another way. Microseconds a call, many in flight.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

# Ahead of MLX: the cuDNN that is loaded first serves both, and PyTorch needs its own.
try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    raise SystemExit("bench_peers.py compares with PyTorch, which is not installed here") from None

import mlx.core as mx
import quantized_products
from bench_attention_tiles import Case as Attention
from bench_grid_sample import Case as Sampling
from bench_quantized_matmul import ours as our_product
from bench_quantized_matmul import stock as stock_product
from common import arguments, output
from harness import Run, Task, as_torch, case, chain, either, tasks, torch_run, verified

from mlx_qlayers import grid_sample
from mlx_qlayers.runtime.cuda_ahead import compiled_in_parallel

Runs = tuple[dict[str, Run], dict[str, Run]]


def attention(task: Task) -> Runs:
    """cuDNN by PyTorch, and by MLX."""
    shape = task.shape
    theirs = partial(
        torch.nn.functional.scaled_dot_product_attention,
        enable_gqa=shape.heads != shape.kv_heads,
        scale=shape.width**-0.5,
        is_causal=True,
    )
    run = torch_run(task, theirs, [as_torch(a) for a in shape.inputs()])

    def by_cudnn() -> list[Any]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return run()

    ways = {name: either(task, way) for name, way in shape.paths().items()}
    return {"cuDNN": by_cudnn, "stock": ways["stock"]}, {"ours": ways["auto"]}


def sampled(task: Task, dtype: mx.Dtype, last: bool) -> Run:
    """PyTorch's function, with channels last or first."""
    x, grid, cotangent = (as_torch(a.astype(dtype)) for a in task.shape.inputs())
    image = x.permute(0, 3, 1, 2)
    image = image if last else image.contiguous()
    sample = partial(torch.nn.functional.grid_sample, align_corners=False)
    return torch_run(task, sample, [image.detach(), grid, cotangent.permute(0, 3, 1, 2)])


def sampling(task: Task) -> Runs:
    """PyTorch's function in both layouts."""
    dtype = task.shape.dtype
    theirs = {name: sampled(task, dtype, name == "last") for name in ("torch", "last")}
    return theirs, {"ours": either(task, grid_sample)}


def products(task: Task) -> Runs:
    """PyTorch's int4 kernel, eager and as CUDA graph, and stock MLX, compiled."""
    shape, x, weights = task.shape, task.shape.x(), []
    n, k = shape.shape
    for _ in shape.copies():
        words = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
        scales = torch.rand(k // 64, n, 2, device="cuda", dtype=torch.bfloat16) * 0.01
        weights.append((torch.ops.aten._convert_weight_to_int4pack(words, 8), scales))
    given = as_torch(x)

    def eager() -> list[Any]:
        return [torch.ops.aten._weight_int4pack_mm(given, w, 64, s) for w, s in weights]

    eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()
    theirs = {"stock": chain(stock_product(shape), x, shape.copies())}
    theirs |= {"eager": eager, "graph": lambda: graph.replay()}
    return theirs, {"ours": chain(our_product(shape), x, shape.copies())}


@lru_cache(1)
def runs(task: Task) -> Runs:
    """The contenders of a task, theirs and ours; our kernels are compiled side by side."""
    torch.cuda.empty_cache()
    kinds = {Attention: attention, Sampling: sampling, quantized_products.Case: products}
    theirs, ours = kinds[type(task.shape)](task)
    with compiled_in_parallel():
        ours["ours"]()
    return theirs, ours


def error(task: Task) -> float:
    """Of ours, against PyTorch or what is more exact."""
    theirs, ours = runs(task)
    if isinstance(task.shape, quantized_products.Case):
        return quantized_products.error(task.shape, [our_product(task.shape)])
    if isinstance(task.shape, Sampling):  # in half precision PyTorch rounds the points
        found = sampled(task, mx.float32, last=True)()
        tolerance = 1e-3 if task.shape.dtype == mx.float32 else 0.02
    else:
        found, tolerance = theirs["cuDNN"](), 0.03
    truth = [mx.array(t.detach().float().cpu().numpy()) for t in found]
    if isinstance(task.shape, Sampling):
        truth = [a.transpose(0, 2, 3, 1) if i < 2 else a for i, a in enumerate(truth)]
    return verified(str(task), ours, truth, tolerance)


SHAPES = ((32, 32, 64, 4096), (28, 4, 128, 4096), (8, 8, 256, 4096))
SHAPES += ((28, 4, 128, 16384), (32, 32, 64, 1024), (32, 8, 128, 2048))
IMAGES = ((16, 512, 512, 1), 512), ((16, 512, 512, 3), 512), ((8, 1024, 1024, 64), 256)
PARTS: dict[str, list[Task]] = {
    "attention": tasks(Attention(*shape, unfused=False) for shape in SHAPES),
    "products": [
        Task(quantized_products.Case((3584, k), m), False)
        for k in (3584, 18944)
        for m in (1, 2, 4, 8, 16)
    ],
    "sampling": tasks(
        Sampling(shape, (side, side), dtype)
        for shape, side in IMAGES
        for dtype in (mx.float32, mx.float16)
    ),
}


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("parts", nargs="*", help="of attention, products and sampling; all else")
    args = parser.parse_args()
    if not (mx.cuda.is_available() and torch.cuda.is_available()):
        raise SystemExit("bench_peers.py needs an NVIDIA GPU that both MLX and PyTorch can use")
    with output(args, "peers"):
        print(f"PyTorch {torch.__version__}, microseconds\n", flush=True)
        case(
            lambda task: runs(task)[0],
            lambda task: runs(task)[1],
            [task for part in args.parts or PARTS for task in PARTS[part]],
            repeats=args.repeats,
            check=error,
            unit="us",
            calls=lambda task: len(task.shape.copies()) if hasattr(task.shape, "copies") else 1,
        )


if __name__ == "__main__":
    main()
