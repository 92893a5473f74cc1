"""GPTQ of single matrices, with the time of each part.

    python benchmarks/bench_gptq.py           # the projections of a 7B model on a GPU
    python benchmarks/bench_gptq.py --model   # a 7B model, from one and two of its layers

The result is compared with rounding to the nearest. Stock mlx-lm factorises on the CPU, and its
loop launches operators for each column: one column is timed, and the loop extrapolated from it.

A model's time is that with one layer, embedding and head, and 27 times what a second layer adds:
the sequences are run through them, sums of x^T x taken and all matrices quantized. mlx-lm's own is
of one layer, times 28: a column of each matrix times its columns, and its three factorisations on
the CPU, timed at 1,024 and scaled by the cube of the width.
"""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
from common import Table, arguments, output
from decoding_model import QWEN2_7B, dense
from harness import GPU as ON_GPU
from harness import seconds

from mlx_qlayers import linalg
from mlx_qlayers.conversion.gptq import Calibration, quantize_model
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import gptq
from mlx_qlayers.ops.linalg import subtract_product

FMT = Format(64, 4)
# Rows and columns.
GPU = [(3584, 3584), (18944, 3584), (3584, 18944)]
CPU = [(384, 384), (1024, 384), (384, 1024)]
TOKENS = 4096

HIDDEN, WIDE, LAYERS = (
    QWEN2_7B[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
)
# The size at which mlx-lm's factorisations are timed.
SMALL = 1024


def inputs(n: int, k: int) -> tuple[mx.array, mx.array]:
    mx.random.seed(n)
    x = mx.random.normal((TOKENS, k)) * mx.exp(mx.random.normal((k,)))
    w = (mx.random.normal((n, k)) * k**-0.5).astype(mx.bfloat16)
    mx.eval(x, w)
    return w, x


def hessian(x: mx.array) -> mx.array:
    return subtract_product(mx.zeros((x.shape[1], x.shape[1])), -x.T, x)


def loss(w: mx.array, h: mx.array, packed: tuple[mx.array, mx.array, mx.array]) -> float:
    wrong = (mx.dequantize(*packed, *FMT) - w).astype(mx.float32)
    return ((wrong @ h) * wrong).sum().item()


def column(w: mx.array, h: mx.array) -> float:
    """Seconds of mlx-lm's operators for one column of a group."""
    group, factor = w[:, :64].astype(mx.float32), h[:64, :64]
    mx.eval(group, factor)

    def step() -> mx.array:
        error = (group[:, :1] - mx.round(group[:, :1])) / factor[0, 0]
        return group - error @ factor[:1]

    step()
    return min(seconds(step) for _ in range(5))


def model_seconds(layers: int, samples: int, length: int) -> float:
    """Seconds of quantizing such a model, on random tokens."""
    count = samples * length
    tokens = mx.random.randint(0, QWEN2_7B["vocab_size"], (count,)).tolist()
    tokenizer = SimpleNamespace(encode=lambda text: tokens)
    model = dense(QWEN2_7B | {"num_hidden_layers": layers})
    mx.eval(model.parameters())
    calibration = Calibration(samples=samples, length=length)

    def quantize() -> object:
        quantize_model(model, tokenizer, bits=4, text="", calibration=calibration)
        return model.parameters()

    return seconds(quantize)


def stock_layer_seconds() -> float:
    """Of mlx-lm's GPTQ of one layer, extrapolated, without its sums of x^T x."""
    with mx.stream(mx.cpu):  # an array of the GPU would be moved first
        a = mx.eye(SMALL) * 2
        mx.eval(a)

    def factorise() -> mx.array:
        with mx.stream(mx.cpu):
            inverse = mx.linalg.cholesky_inv(mx.linalg.cholesky(a))
            return mx.linalg.cholesky(inverse, upper=True)

    unit = seconds(factorise) / SMALL**3
    total = 0.0
    keys = HIDDEN // QWEN2_7B["num_attention_heads"] * QWEN2_7B["num_key_value_heads"]
    sizes = ((HIDDEN, HIDDEN), (keys, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
    for (n, k), count in zip(sizes, (2, 2, 2, 1), strict=True):
        w = mx.zeros((n, k), mx.bfloat16)
        total += count * (unit * k**3 + k * column(w, mx.eye(64)))
    return total


def whole_model(samples: int, length: int) -> None:
    """A row of a 7B model."""
    columns = ("1 layer s", "2 layers s", "28 layers s", "mlx-lm s")
    table = Table()
    model_seconds(1, 4, length)  # compiles
    one, two = (model_seconds(layers, samples, length) for layers in (1, 2))
    found = (one, two, one + (LAYERS - 1) * (two - one), LAYERS * stock_layer_seconds())
    table.add(sequences=f"{samples} x {length}", **dict(zip(columns, found, strict=True)))


def matrices() -> None:
    """A row of each matrix."""
    table = Table()
    for n, k in GPU if ON_GPU else CPU:
        w, x = inputs(n, k)
        gptq(w[:, :256], hessian(x[:, :256]), FMT)  # compiles
        h, found = hessian(x), list[tuple[mx.array, mx.array, mx.array]]()
        damped = h + 0.01 * mx.diagonal(h).mean() * mx.eye(k)
        row = {
            "hessian s": seconds(lambda x=x: hessian(x)),
            "inverse s": seconds(
                lambda a=damped, k=k: linalg.solve_triangular(linalg.cholesky(a), mx.eye(k))
            ),
            "gptq s": seconds(lambda w=w, h=h, out=found: out.append(gptq(w, h, FMT)) or out),
        }
        share = loss(w, h, found[0]) / loss(w, h, mx.quantize(w, *FMT))
        assert share < 0.9, f"GPTQ loses {share} of what rounding does"
        more = {"mlx-lm loop s": k * column(w, h), "of rounding": share}
        table.add(**{"N x K": f"{n} x {k}"}, **row, **more)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", action="store_true", help="a 7B model, extrapolated")
    args = parser.parse_args()
    with output(args, "gptq_model" if args.model else "gptq"):
        whole_model(128, 2048) if args.model else matrices()


if __name__ == "__main__":
    main()
