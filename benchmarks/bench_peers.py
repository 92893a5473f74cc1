"""Attention, grid sampling and small 4-bit products beside stock MLX and PyTorch, in one process.

``python benchmarks/bench_peers.py [attention] [products] [sampling]`` needs an NVIDIA GPU and
PyTorch. Results of the same inputs are compared first; products with stock MLX in float32, as
PyTorch packs weights in another way. Microseconds a call, many in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

# Ahead of MLX: the cuDNN that is loaded first serves both, and PyTorch needs its own.
try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    raise SystemExit("bench_peers.py compares with PyTorch, which is not installed here") from None

import mlx.core as mx
import numpy as np
from common import Table, arguments, output
from harness import Run, Task, case, either, tasks, verified

from mlx_qlayers import attention, grid_sample, quantized_matmul
from mlx_qlayers.runtime.cuda_ahead import compiled_in_parallel

# Products in one of PyTorch's CUDA graphs and in one of ours.
CHAIN = 6


def as_torch(array: mx.array, dtype: Any) -> Any:
    """A copy on PyTorch's GPU."""
    return torch.from_numpy(np.array(array.astype(mx.float32))).to("cuda", dtype)


def as_mlx(tensors: Sequence[Any]) -> list[mx.array]:
    """Copies of PyTorch's results."""
    return [mx.array(t.detach().float().cpu().numpy()) for t in tensors]


def torch_run(task: Task, function: Callable[..., Any], inputs: Sequence[Any]) -> Run:
    """The results that a task asks of a function of PyTorch's."""
    *primals, cotangent = inputs

    def run() -> list[Any]:
        out = function(*primals)
        if not task.gradients:
            return [out]
        return [out, *torch.autograd.grad(out, primals, cotangent)]

    for each in primals:
        each.requires_grad_(task.gradients)
    return run


class Attention(NamedTuple):
    """Heads, key heads, width of a head, length; causal, bfloat16, batch 1."""

    heads: int
    kv_heads: int
    width: int
    length: int

    def __str__(self) -> str:
        return f"attention {self.heads}/{self.kv_heads} D{self.width} {self.length}"

    def runs(self, task: Task) -> tuple[dict[str, Run], dict[str, Run]]:
        """Theirs and ours."""
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, heads, self.length, self.width) for heads in counts]
        inputs = [mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes]
        mx.eval(inputs)
        options: dict[str, Any] = {"scale": self.width**-0.5, "mask": "causal"}
        given = {"scale": self.width**-0.5, "is_causal": True}
        theirs = partial(
            torch.nn.functional.scaled_dot_product_attention,
            enable_gqa=self.heads != self.kv_heads,
            **given,
        )
        run = torch_run(task, theirs, [as_torch(a, torch.bfloat16) for a in inputs])

        def by_cudnn() -> list[Any]:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return run()

        stock = partial(mx.fast.scaled_dot_product_attention, **options)
        ours = either(task, partial(attention, **options), inputs)
        return {"cuDNN": by_cudnn, "stock": either(task, stock, inputs)}, {"ours": ours}


class Sampling(NamedTuple):
    """Images, points along an axis, and whether in half precision; bilinear, random points."""

    shape: tuple[int, int, int, int]
    side: int
    half: bool

    def __str__(self) -> str:
        return f"points {'x'.join(map(str, self.shape))} {'float16' if self.half else 'float32'}"

    def inputs(self) -> list[mx.array]:
        """x, grid and cotangent."""
        dtype = mx.float16 if self.half else mx.float32
        mx.random.seed(0)
        x = mx.random.normal(self.shape).astype(dtype)
        grid = mx.random.uniform(-1, 1, (self.shape[0], self.side, self.side, 2))
        cotangent = mx.random.normal((*grid.shape[:3], self.shape[3])).astype(dtype)
        mx.eval(x, grid, cotangent)
        return [x, grid, cotangent]

    def theirs(self, task: Task, dtype: Any, last: bool) -> Run:
        """PyTorch's function, with channels last or first."""
        x, grid, cotangent = (as_torch(a, dtype) for a in self.inputs())
        image = x.permute(0, 3, 1, 2)
        image = image if last else image.contiguous()
        sample = partial(torch.nn.functional.grid_sample, align_corners=False)
        return torch_run(task, sample, [image.detach(), grid, cotangent.permute(0, 3, 1, 2)])

    def runs(self, task: Task) -> tuple[dict[str, Run], dict[str, Run]]:
        """Theirs and ours."""
        half = torch.float16 if self.half else torch.float32
        theirs = {name: self.theirs(task, half, name == "last") for name in ("torch", "last")}
        return theirs, {"ours": either(task, grid_sample, self.inputs())}


class Products(NamedTuple):
    """A chain of products with a weight of so many rows and columns, for so many rows of x."""

    n: int
    k: int
    rows: int

    def __str__(self) -> str:
        return f"4 bits {self.n}x{self.k} M={self.rows}"

    @lru_cache(1)  # noqa: B019
    def inputs(self) -> tuple[mx.array, list[Any]]:
        """The rows and the packed weights."""
        mx.random.seed(0)
        x = mx.random.normal((self.rows, self.k)).astype(mx.bfloat16)
        flat = []
        for _ in range(CHAIN):
            w = mx.random.normal((self.n, self.k)).astype(mx.bfloat16) * self.k**-0.5
            flat.append(mx.quantize(w, 64, 4))
            mx.eval(flat[-1])
        return x, flat

    def truth(self) -> list[mx.array]:
        """The results of stock MLX in float32."""
        x, flat = self.inputs()
        wide = [(w, *(a.astype(mx.float32) for a in rest)) for w, *rest in flat]
        return [mx.quantized_matmul(x.astype(mx.float32), *w, True, 64, 4) for w in wide]

    def runs(self, task: Task) -> tuple[dict[str, Run], dict[str, Run]]:
        """PyTorch's int4 kernel, eager and as CUDA graph, stock MLX, and ours, compiled."""
        (x, flat), weights = self.inputs(), []
        for _ in range(CHAIN):
            size = (self.n, self.k // 2)
            words = torch.randint(0, 255, size, device="cuda", dtype=torch.uint8)
            size = (self.k // 64, self.n, 2)
            scales = torch.rand(*size, device="cuda", dtype=torch.bfloat16) * 0.01
            weights.append((torch.ops.aten._convert_weight_to_int4pack(words, 8), scales))
        given = as_torch(x, torch.bfloat16)

        def eager() -> list[Any]:
            return [torch.ops.aten._weight_int4pack_mm(given, w, 64, s) for w, s in weights]

        def compiled(product: Callable[..., mx.array]) -> Run:
            run = mx.compile(lambda x: [product(x, *w, group_size=64, bits=4) for w in flat])
            return lambda: run(x)

        eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager()
        theirs = {"stock": compiled(partial(mx.quantized_matmul, transpose=True))}
        theirs |= {"eager": eager, "graph": lambda: graph.replay()}
        return theirs, {"ours": compiled(quantized_matmul)}


@lru_cache(1)
def runs(task: Task) -> tuple[dict[str, Run], dict[str, Run]]:
    """The contenders of a task, theirs and ours; our kernels are compiled side by side."""
    mx.random.seed(0)
    torch.cuda.empty_cache()
    theirs, ours = task.shape.runs(task)
    with compiled_in_parallel():
        ours["ours"]()
    return theirs, ours


def error(task: Task) -> float:
    """Of ours, against PyTorch or what is more exact."""
    theirs, ours = runs(task)
    if isinstance(task.shape, Products):
        truth, tolerance = task.shape.truth(), 0.02
    elif isinstance(task.shape, Sampling):  # in half precision PyTorch rounds the points
        truth = as_mlx(task.shape.theirs(task, torch.float32, last=True)())
        truth = [a.transpose(0, 2, 3, 1) if i < 2 else a for i, a in enumerate(truth)]
        tolerance = 0.02 if task.shape.half else 1e-3
    else:
        truth, tolerance = as_mlx(theirs["cuDNN"]()), 0.03
    return verified(str(task), ours, truth, tolerance)


HEADS = ((32, 32, 64), (28, 4, 128), (8, 8, 256))
IMAGES = ((16, 512, 512, 1), 512), ((16, 512, 512, 3), 512), ((8, 1024, 1024, 64), 256)
SHAPES = [Attention(*heads, 4096) for heads in HEADS]
SHAPES += [Attention(28, 4, 128, 16384), Attention(32, 32, 64, 1024), Attention(32, 8, 128, 2048)]
PRODUCTS = [Products(3584, k, m) for k in (3584, 18944) for m in (1, 2, 4, 8, 16)]
PARTS: dict[str, list[Task]] = {
    "attention": tasks(SHAPES),
    "products": [Task(shape, False) for shape in PRODUCTS],
    "sampling": tasks(Sampling(*image, half) for image in IMAGES for half in (False, True)),
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
            table=Table({"task": 48, "path": 8, "us": 14, "ratio": 8}),
            repeats=args.repeats,
            check=error,
            unit="us",
            calls=lambda task: CHAIN if isinstance(task.shape, Products) else 1,
        )


if __name__ == "__main__":
    main()
