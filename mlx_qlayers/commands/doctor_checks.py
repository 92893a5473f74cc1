"""The smallest call of each kernel family that runs its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..formats import Format
from ..metal.attention.backward import attention_backward
from ..metal.attention.forward import Launcher, absent
from ..metal.attention.hopper import Cut, backward_once, forward_ahead
from ..metal.attention.tensor import attention_tensor
from ..metal.gather_qmm.gather_qmm import gather_qmm_sorted
from ..metal.gather_qmm.gather_qmv import Pairs
from ..metal.quantized_matmul.qmm_tensor import tensor_config, tensor_product
from ..ops.attention import attention
from ..ops.attention_step import attention_step
from ..ops.deformable_attention import deformable_attention
from ..ops.embedding import quantized_rows
from ..ops.exp import exp
from ..ops.experts import experts_chosen, experts_combined, experts_products
from ..ops.fused_products import fused_products
from ..ops.gated_delta import gated_delta
from ..ops.gather_qmm import gather_qmm
from ..ops.gptq import gptq
from ..ops.grid_sample import grid_sample
from ..ops.int8_matmul import int8_matmul
from ..ops.latent_attention import latent_attention
from ..ops.linalg import cholesky, qr, solve_triangular
from ..ops.quantized_matmul import quantized_matmul
from ..ops.rotary import rotary_embedding
from ..options import AttentionCall, MatmulCall, PackedMatrix, Rotation, Router, Scores
from ..runtime import tensor_ops
from ..runtime.backend import requested
from ..runtime.devices import device_of
from ..runtime.spec import Spec

Run = Callable[..., list[mx.array]]


class Check(NamedTuple):
    """A call that kernels compute and stock operators as well.

    Attributes:
        name: which of the operation's kernels; for the page, behind that operation's.
        run: takes the arrays and gives a list of arrays, by the current backend.
        arrays: what it takes.
        terms: how many a sum in it has.
        steps: how many roundings follow each other.
    """

    name: str
    run: Run
    arrays: list[Any]
    terms: int = 1
    steps: int = 2


def families() -> list[str]:
    """The names of the families that there are checks of, those of the smallest kernels first."""
    return [*_FAMILIES]


def checks(family: str) -> Iterator[Check]:
    """One check of a family after the other, with the same arrays each time."""
    mx.random.seed(0)
    for check in _FAMILIES[family]():
        yield check._replace(name=f"{family}, {check.name}")


def _exp() -> Iterator[Check]:
    for dtype in (mx.float16, mx.bfloat16):
        yield Check(_of(dtype), _with_gradients(exp, 0), [_normal((7, 41), dtype)])
    strided = partial(exp, strided=True)
    yield Check("strided", lambda x: [strided(x.T)], [_normal((7, 41))])


def _rotary() -> Iterator[Check]:
    q, k = _normal((2, 3, 4, 64)), _normal((2, 3, 2, 64))
    for what, offset in (("one offset", mx.array(5)), ("offset for each", mx.array([5, 900]))):
        yield Check(what, partial(rotary_embedding, dims=64), [q, k, offset], 2)


def _gated_delta() -> Iterator[Check]:
    for dtype, of, columns in ((mx.bfloat16, "heads", ()), (mx.float32, "columns", (64,))):
        q, k = (_normal((2, 5, 2, 64), dtype) / 8 for _ in range(2))
        gates = mx.random.uniform(0.5, 1, (2, 5, 4, *columns)), mx.full((2, 5, 4), 0.5, dtype)
        state = _normal((2, 4, 32, 64), mx.float32)
        given = [q, k, _normal((2, 5, 4, 32), dtype), *gates, state]
        yield Check(f"{_of(dtype)}, gates of {of}", gated_delta, given, 64, 5)


def _latent_attention() -> Iterator[Check]:
    q, r = (_normal((2, 6, 1, width), mx.bfloat16) for width in (128, 64))
    for rows in (40, 200):
        beside = [_normal((2, 1, rows, width), mx.bfloat16) for width in (128, 64)]
        given = [q, r, *beside, mx.array(rows - 3)]
        attend = partial(latent_attention, scale=0.07)
        yield Check(f"{rows} rows", lambda *a, run=attend: [run(*a)], given, 192, 4)


def _quantized_matmul() -> Iterator[Check]:
    for rows, n, fmt, dtype in (
        (1, 72, (64, 4, "affine"), mx.bfloat16),
        (2, 1 << 14, (64, 4, "affine"), mx.bfloat16),
        (7, 72, (64, 4, "affine"), mx.float16),
        (2, 72, (32, 3, "affine"), mx.float32),
        (1, 72, (32, 4, "mxfp4"), mx.bfloat16),
        (40, 72, (64, 4, "affine"), mx.bfloat16),
    ):
        x, matrix = _normal((rows, 512), dtype), _packed((n, 512), dtype, *fmt)
        run = _quantized(quantized_matmul, fmt)
        what = f"{rows} rows, {n} columns, {fmt[1]} bits, {fmt[2]}, {_of(dtype)}"
        yield Check(what, lambda *a, run=run: [run(*a)], [x, *matrix], 512)
    fmt = 64, 4, "affine"
    rows, matrix = _quantized(quantized_rows, fmt), _packed((72, 512), mx.bfloat16, *fmt)
    if device_of().dynamic_memory:
        deep = [_normal((32, 4096), mx.bfloat16), *_packed((2048, 4096), mx.bfloat16, *fmt)]
        yield Check("rows in shared memory", lambda *a, run=run: [run(*a)], deep, 4096)
        given = [mx.array([[2, 70]]), *matrix]  # elsewhere MLX's operators take rows
        yield Check("some rows unpacked", lambda *a: [rows(*a)], given)
    for transpose in (True, False):
        # So deep that on an NVIDIA GPU two parts are added up.
        shape = (128, 1024) if transpose else (1024, 128)
        run = _quantized(quantized_matmul, fmt, transpose=transpose)
        given = [_normal((24, 1024)), *_packed(shape, mx.float16, *fmt)]
        what = "gradients" if transpose else "gradients, not transposed"
        yield Check(what, _with_gradients(run, 0, 2, 3), given, 1024)


def _fused_products() -> Iterator[Check]:
    fmt = 64, 4, "affine"
    matrices = [_packed((72, 512), mx.bfloat16, *fmt) for _ in range(2)]
    weight = _normal((512,), mx.bfloat16)

    def gated(x: mx.array, weight: mx.array, *arrays: mx.array) -> list[mx.array]:
        both = [PackedMatrix(*arrays[:3]), PackedMatrix(*arrays[3:])]
        given = {"group_size": 64, "bits": 4, "norm": (weight, 1e-5), "gate": "silu"}
        return fused_products(x, both, **given)  # type: ignore[arg-type]

    for rows in (1, 8, 40, 200):
        given = [_normal((rows, 512), mx.bfloat16), weight, *matrices[0], *matrices[1]]
        yield Check(f"norm and gate, {rows} rows", gated, given, 512)


def _gather_qmm() -> Iterator[Check]:
    fmt = 64, 4, "affine"
    for what, rows, transpose, in_order in (
        ("a token", 1, True, False),
        ("a token, not transposed", 1, False, False),
        ("many tokens", 200, True, True),
    ):
        shape = (4, 72, 512) if transpose else (4, 512, 128)
        chosen = mx.arange(rows * 2) * 4 // (rows * 2)
        x, matrix = _normal((rows * 2, 1, 512)), _packed(shape, mx.float16, *fmt)
        run = _quantized(gather_qmm, fmt, transpose=transpose, sorted_indices=in_order)

        def products(x: Any, *arrays: Any, run: Any = run) -> list[mx.array]:
            return [run(x, *arrays[:3], None, arrays[3])]

        yield Check(what, products, [x, *matrix, chosen.astype(mx.uint32)], 512)


def _experts() -> Iterator[Check]:
    packed = [_packed((4, 72, 512), mx.float16, 64, 4, "affine") for _ in range(2)]

    def mixed(x: mx.array, chosen: mx.array, scores: mx.array, *arrays: mx.array) -> list[mx.array]:
        both = [PackedMatrix(*arrays[:3]), PackedMatrix(*arrays[3:])]
        rows = mx.broadcast_to(x[:, None], (*chosen.shape, 512))
        products = experts_products(x, chosen, both, gate="silu")
        _, shares = experts_chosen(x[:, :40], Router(2, groups=4, dropped=2), x[0, :40])
        return [*products, shares, experts_combined(rows, chosen, scores, both[0])]

    for rows in (1, 8):
        chosen = mx.arange(rows * 2, dtype=mx.uint32).reshape(rows, 2) % 4
        given = [_normal((rows, 512)), chosen, mx.ones((rows, 2)), *packed[0], *packed[1]]
        yield Check(f"{rows} rows", mixed, given, 512)


def _int8_matmul() -> Iterator[Check]:
    x, w = _normal((70, 272), mx.bfloat16), mx.random.randint(-127, 128, (150, 272))
    given = [x, w.astype(mx.int8), mx.random.uniform(0.01, 0.02, (150,))]
    yield Check("70 rows", lambda *given: [int8_matmul(*given)], given, 272)


def _tensor_ops() -> Iterator[Check]:
    """The kernels that only a measurement chooses, where they run at all."""
    fmt, chosen = Format(64, 4), mx.arange(100, dtype=mx.uint32) * 4 // 100
    for transpose in () if tensor_ops.missing() else (True, False):
        x, packed = _normal((100, 128)), _packed((128, 128), mx.float16, *fmt)
        experts = _packed((4, 128, 128), mx.float16, *fmt)
        run = partial(_by_tensors, transpose, fmt)
        how = "" if transpose else ", not transposed"
        yield Check(f"product{how}", run, [x, *packed], 128)
        yield Check(f"experts{how}", run, [x[:, None], *experts, chosen], 128)
        if transpose and not tensor_ops.missing_codes():
            run = partial(_by_tensors, transpose, fmt, codes=True)
            yield Check("product of packed codes", run, [x, *packed], 128)
    if not tensor_ops.missing():
        given = [_normal((1, n, 70, 64)) for n in (4, 2, 2)]
        yield Check("attention", partial(_attention_by, True), given, 70, 16)
        run = partial(_attention_by, True, handed=False)
        yield Check("attention, through threadgroup memory", run, given, 70, 16)


def _attention_by(tensors: bool, *arrays: mx.array, handed: bool = True) -> list[mx.array]:
    """Causal attention with the gradients of half the sum of its squares, by tensor operations or
    the kernels of Hopper GPUs.
    """
    q, k, v = map(Spec.of, arrays)
    if requested() == "reference":
        run = partial(attention, scale=0.125, mask="causal")
        y, gradients = mx.vjp(lambda *given: [run(*given)], [*arrays], [run(*arrays)])
        return [*y, *gradients]
    at = Launcher(AttentionCall(q, (k,), (v,), Scores(0.125, True)), handed)
    if not tensors:
        out, norms = forward_ahead(at, Cut(4))(*arrays, None, None)
        given = [*arrays, absent()]
        *sums, _ = backward_once(at, Cut())(given, out, out, norms, absent())
        return [out, *(a.swapaxes(1, 2) for a in sums)]
    outputs = attention_tensor(at)(*arrays, None, None)
    of_all, _ = attention_backward(at, tensors=True)
    return [outputs[0], *of_all([*arrays, None, None], outputs[:1], outputs)]


def _by_tensors(transpose: bool, fmt: Format, *arrays: Any, codes: bool = False) -> list[mx.array]:
    """A product of rows, or of rows that chose experts, or the same by stock operators."""
    x, *packed = map(Spec.of, arrays[:4])
    chosen = arrays[4] if len(arrays) > 4 else None
    call = MatmulCall(x, PackedMatrix(*packed), transpose, fmt)
    config = tensor_config(x.shape[0], x.shape[-1], x.dtype, fmt, transpose)
    if chosen is None:
        if requested() == "reference":
            return [_quantized(quantized_matmul, fmt, transpose=transpose)(*arrays)]
        return [tensor_product(codes, call)(*arrays, None)]
    if requested() == "reference":
        run = _quantized(gather_qmm, fmt, transpose=transpose, sorted_indices=True)
        return [run(*arrays[:4], None, chosen)]
    launch = gather_qmm_sorted(call, Pairs(chosen.shape, 1, True), config)
    return [launch(*arrays[:4], None, chosen, None)]


def _attention() -> Iterator[Check]:
    for dtype, width in ((mx.float16, 64), (mx.float32, 64), (mx.bfloat16, 128)):
        run = partial(attention, scale=width**-0.5, mask="causal")
        given = [_normal((1, n, 70, width), dtype) for n in (4, 2, 2)]
        yield Check(f"{_of(dtype)}, heads of {width}", _with_gradients(run, 0, 1, 2), given, 70, 16)
    if device_of("cuda").warpgroup_products:
        given = [_normal((1, n, 70, 64), mx.bfloat16) for n in (4, 2, 2)]
        yield Check("Hopper GPUs", partial(_attention_by, False), given, 70, 16)
    added = [*(_normal((1, n, 40, 64)) for n in (4, 2, 2)), _normal((4, 40, 40))]

    def masked(q: Any, k: Any, v: Any, mask: Any) -> mx.array:
        return attention(q, k, v, scale=0.125, mask=mask)

    yield Check("additive mask", _with_gradients(masked, 0, 3), added, 40)
    for bits in (0, 4):
        q, k, v = _normal((1, 8, 1, 64)), _normal((1, 2, 700, 64)), _normal((1, 2, 700, 64))
        caches = [[k], [v]] if not bits else [mx.quantize(a, 64, bits) for a in (k, v)]

        def few(q: Any, *caches: Any) -> list[mx.array]:
            half = len(caches) // 2
            parts = caches[:half], caches[half:]
            k, v = (each[0] if half == 1 else each for each in parts)
            return [attention(q, k, v, scale=0.125)]

        what = "one query" + (f", {bits} bits" if bits else "")
        yield Check(what, few, [q, *caches[0], *caches[1]], 700)


def _attention_step() -> Iterator[Check]:
    for size in (256, 1100):
        rows = [_normal((1, 1, n * 64)) for n in (8, 2, 2)]
        buffers = [_normal((1, 2, n, 64)) for n in (size, size, 16, 16)]
        positions = mx.array([200, 7, *[207] * 6], mx.int32)
        run = partial(attention_step, scale=0.125, rotation=Rotation(64))
        yield Check(f"{size} keys", run, [*rows, *buffers, positions], 208)


def _grid_sample() -> Iterator[Check]:
    x, grid = _normal((2, 9, 13, 8)), mx.random.uniform(-1.1, 1.1, (2, 5, 6, 2))
    for deterministic in (False, True):
        run = _with_gradients(partial(grid_sample, deterministic=deterministic), 0, 1)
        yield Check("deterministic" if deterministic else "bilinear", run, [x, grid], 64)
    large, few = _normal((2, 20, 20, 8)), mx.random.uniform(-1, 1, (2, 3, 6, 2))
    yield Check("few points", _with_gradients(grid_sample, 0, 1), [large, few], 64)
    bicubic = partial(grid_sample, mode="bicubic", padding_mode="reflection")
    yield Check("bicubic", lambda *a: [bicubic(*a)], [x, grid], 16)


def _deformable_attention() -> Iterator[Check]:
    shapes = [(8, 6), (4, 3)]
    locations = mx.random.uniform(0, 1, (1, 5, 2, 2, 4, 2))
    weights = mx.softmax(mx.random.normal((1, 5, 2, 2, 4)), axis=-1)

    def run(values: mx.array, locations: mx.array, weights: mx.array) -> mx.array:
        return deformable_attention(values, shapes, locations, weights)

    given = [_normal((1, 60, 2, 32)), locations, weights]
    yield Check("two levels", _with_gradients(run, 0, 1, 2), given, 64)


def _linalg() -> Iterator[Check]:
    n = 160  # more than a block
    a = mx.random.normal((n, n)) / n**0.5
    a = a @ a.T + mx.eye(n)
    yield Check("cholesky", lambda a: [cholesky(a, check=False)], [a], n, 8)
    b = mx.random.normal((n, 40))
    yield Check("solve_triangular", lambda *ab: [solve_triangular(*ab)], [mx.tril(a), b], n, 8)
    yield Check("qr", lambda a: [*qr(a)], [a[:, :100]], n, 8)


def _gptq() -> Iterator[Check]:
    fmt = Format(64, 4)
    # Weights that the format holds, with both ends of the range in each group, from which it is
    # found again: of others, one code rounded otherwise changes all that follow.
    codes = mx.random.randint(0, 16, (24, 3, fmt.group_size))
    codes[..., 5], codes[..., 40] = 0, 15
    w = ((codes - 7) * mx.random.uniform(0.1, 0.2, (24, 3, 1))).reshape(24, -1)
    x = mx.random.normal((512, 192))
    for act_order in (False, True):

        def run(w: mx.array, h: mx.array, act_order: bool = act_order) -> list[mx.array]:
            return [mx.dequantize(*gptq(w, h, fmt, act_order=act_order), *fmt[:2])]

        yield Check("largest first" if act_order else "in order", run, [w, x.T @ x], 192, 8)


_FAMILIES: dict[str, Callable[[], Iterator[Check]]] = {
    "exp": _exp,
    "rotary_embedding": _rotary,
    "gated_delta": _gated_delta,
    "grid_sample": _grid_sample,
    "deformable_attention": _deformable_attention,
    "linalg": _linalg,
    "gptq": _gptq,
    "quantized_matmul": _quantized_matmul,
    "fused_products": _fused_products,
    "gather_qmm": _gather_qmm,
    "experts": _experts,
    "int8_matmul": _int8_matmul,
    "tensor_ops": _tensor_ops,
    "attention_step": _attention_step,
    "latent_attention": _latent_attention,
    "attention": _attention,
}


def _with_gradients(function: Callable[..., mx.array], *of: int) -> Run:
    """The result, and gradients for a cotangent that every dtype holds exactly.

    It adds up to zero over no group: of a gradient that cancels only its rounding is left.
    """

    def loss(*arrays: mx.array) -> mx.array:
        y = function(*arrays).astype(mx.float32)
        return (y * (mx.arange(y.size).reshape(y.shape) % 5 - 1.75)).sum()

    def run(*arrays: mx.array) -> list[mx.array]:
        return [function(*arrays), *mx.grad(loss, argnums=list(of))(*arrays)]

    return run


def _quantized(function: Any, fmt: tuple[int, int, str], **options: Any) -> Any:
    group_size, bits, mode = fmt
    return partial(function, group_size=group_size, bits=bits, mode=mode, **options)


def _packed(shape: tuple[int, ...], dtype: mx.Dtype, *fmt: Any) -> list[mx.array]:
    return list(mx.quantize(_normal(shape, dtype), *fmt))


def _normal(shape: tuple[int, ...], dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
