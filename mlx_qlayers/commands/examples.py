"""Examples of calls of every operation: doctor's checks, the sanitizer's inputs, and tests'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import mlx.core as mx

from .. import ops
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
from ..ops.deform_conv2d import deform_conv2d
from ..ops.deformable_attention import deformable_attention
from ..ops.embedding import quantized_rows
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
from .example import Example

_FORMAT = Format(64, 4)
Shape = tuple[int, ...]


def families() -> list[str]:
    """The names of the families that there are examples of, those of the smallest kernels first."""
    return [*_FAMILIES]


def examples(family: str) -> Iterator[Example]:
    """One example of a family after the other, with the same arrays each time."""
    mx.random.seed(0)
    for example in _FAMILIES[family]():
        yield example._replace(name=f"{family}, {example.name}")


def _of_folder(name: str) -> Iterator[Example]:
    """Those of an operation that has a folder of its own."""
    module = import_module(f"{ops.__name__}.{name}")
    for what, arguments, gradients in module.examples():
        yield Example(what, getattr(module, name), arguments, gradients)


def _rotary() -> Iterator[Example]:
    rows = {"q": _normal((2, 3, 4, 64)), "k": _normal((2, 3, 2, 64)), "dims": 64}
    for what, offset in (("one offset", mx.array(5)), ("offset for each", mx.array([5, 900]))):
        yield Example(what, rotary_embedding, rows | {"offset": offset}, terms=2)


def _gated_delta() -> Iterator[Example]:
    for dtype, of, columns in ((mx.bfloat16, "heads", ()), (mx.float32, "columns", (64,))):
        given = {name: _normal((2, 5, 2, 64), dtype) / 8 for name in ("q", "k")}
        given |= {"v": _normal((2, 5, 4, 32), dtype)}
        given |= {"g": mx.random.uniform(0.5, 1, (2, 5, 4, *columns))}
        given |= {"beta": mx.full((2, 5, 4), 0.5, dtype)}
        given |= {"state": _normal((2, 4, 32, 64), mx.float32)}
        name = f"{_of(dtype)}, gates of {of}"
        yield Example(name, gated_delta, given, terms=64, steps=5)


def _latent_attention() -> Iterator[Example]:
    for rows in (40, 200):
        heads = {"q": (6, 1, 128), "r": (6, 1, 64), "c": (1, rows, 128), "p": (1, rows, 64)}
        given: dict[str, Any] = {n: _normal((2, *s), mx.bfloat16) for n, s in heads.items()}
        given |= {"last": mx.array(rows - 3), "scale": 0.07}
        yield Example(f"{rows} rows", latent_attention, given, terms=192, steps=4)


def _quantized_matmul() -> Iterator[Example]:
    for rows, n, fmt, dtype in (
        (1, 72, _FORMAT, mx.bfloat16),
        (2, 1 << 14, _FORMAT, mx.bfloat16),
        (7, 72, _FORMAT, mx.float16),
        (2, 72, Format(32, 3), mx.float32),
        (1, 72, Format(32, 4, "mxfp4"), mx.bfloat16),
        (40, 72, _FORMAT, mx.bfloat16),
    ):
        given = {"x": _normal((rows, 512), dtype)} | matrix((n, 512), dtype, fmt)
        what = f"{rows} rows, {n} columns, {fmt.bits} bits, {fmt.mode}, {_of(dtype)}"
        yield Example(what, quantized_matmul, given, terms=512)
    if device_of().dynamic_memory:
        given = {"x": _normal((32, 4096), mx.bfloat16)} | matrix((2048, 4096), mx.bfloat16)
        yield Example("rows in shared memory", quantized_matmul, given, terms=4096)
        given = {"numbers": mx.array([[2, 70]])} | matrix((72, 512), mx.bfloat16)
        yield Example("some rows unpacked", quantized_rows, given)  # MLX's operators elsewhere
    for transpose in (True, False):
        # So deep that on an NVIDIA GPU two parts are added up.
        shape = (128, 1024) if transpose else (1024, 128)
        given = {"x": _normal((24, 1024)), "transpose": transpose} | matrix(shape)
        what = "gradients" if transpose else "gradients, not transposed"
        yield Example(what, quantized_matmul, given, ("x", "scales", "biases"), 1024)


def _fused_products() -> Iterator[Example]:
    pair = [PackedMatrix(*packed((72, 512), mx.bfloat16)) for _ in range(2)]
    given: dict[str, Any] = {"matrices": pair, "group_size": 64, "bits": 4, "gate": "silu"}
    given["norm"] = _normal((512,), mx.bfloat16), 1e-5
    for rows in (1, 8, 40, 200):
        x = _normal((rows, 512), mx.bfloat16)
        name = f"norm and gate, {rows} rows"
        yield Example(name, fused_products, {"x": x} | given, terms=512)


def _gather_qmm() -> Iterator[Example]:
    for what, rows, transpose, in_order in (
        ("a token", 1, True, False),
        ("a token, not transposed", 1, False, False),
        ("many tokens", 200, True, True),
    ):
        chosen = (mx.arange(rows * 2) * 4 // (rows * 2)).astype(mx.uint32)
        given = {"x": _normal((rows * 2, 1, 512)), "rhs_indices": chosen, "transpose": transpose}
        given |= matrix((4, 72, 512) if transpose else (4, 512, 128))
        yield Example(what, gather_qmm, given | {"sorted_indices": in_order}, terms=512)


def _experts() -> Iterator[Example]:
    pair = [PackedMatrix(*packed((4, 72, 512))) for _ in range(2)]
    for rows in (1, 8):
        chosen = mx.arange(rows * 2, dtype=mx.uint32).reshape(rows, 2) % 4
        x, name = _normal((rows, 512)), f"{rows} rows"
        given: dict[str, Any] = {"x": x, "experts": chosen, "matrices": pair, "gate": "silu"}
        yield Example(f"products of {name}", experts_products, given, terms=512)
        router = Router(2, groups=4, dropped=2)
        given = {"logits": x[:, :40], "router": router, "bias": x[0, :40]}
        yield Example(f"choices of {name}", _shares, given, terms=40)
        given = {"x": mx.broadcast_to(x[:, None], (rows, 2, 512)), "experts": chosen}
        given |= {"scores": mx.ones((rows, 2)), "matrix": pair[0]}
        yield Example(f"sums of {name}", experts_combined, given, terms=512)


def _shares(**arguments: Any) -> mx.array:
    """Of the chosen; which of two that differ by a rounding is chosen first, that decides."""
    return experts_chosen(**arguments)[1]


def _int8_matmul() -> Iterator[Example]:
    w = mx.random.randint(-127, 128, (150, 272)).astype(mx.int8)
    given = {"x": _normal((70, 272), mx.bfloat16), "w": w}
    given["scales"] = mx.random.uniform(0.01, 0.02, (150,))
    yield Example("70 rows", int8_matmul, given, terms=272)


def _tensor_ops() -> Iterator[Example]:
    """The kernels that only a measurement chooses, where they run at all."""
    chosen = mx.arange(100, dtype=mx.uint32) * 4 // 100
    for transpose in () if tensor_ops.missing() else (True, False):
        x, how = _normal((100, 128)), "" if transpose else ", not transposed"
        given: dict[str, Any] = {"x": x, "packed": packed((128, 128))}
        run = partial(_by_tensors, transpose)
        yield Example(f"product{how}", run, given, terms=128)
        many = {"x": x[:, None], "packed": packed((4, 128, 128)), "chosen": chosen}
        yield Example(f"experts{how}", run, many, terms=128)
        if transpose and not tensor_ops.missing_codes():
            yield Example("product of packed codes", run, given | {"codes": True}, terms=128)
    if not tensor_ops.missing():
        given = {name: _normal((1, n, 70, 64)) for name, n in (("q", 4), ("k", 2), ("v", 2))}
        by_tensors = partial(_attention_by, True)
        yield Example("attention", by_tensors, given, terms=70, steps=16)
        given |= {"handed": False}
        name = "attention, through threadgroup memory"
        yield Example(name, by_tensors, given, terms=70, steps=16)


def _attention_by(
    tensors: bool, q: mx.array, k: mx.array, v: mx.array, handed: bool = True
) -> list[mx.array]:
    """Causal attention with the gradients of half the sum of its squares, by tensor operations or
    the kernels of Hopper GPUs.
    """
    arrays = q, k, v
    if requested() == "reference":
        run = partial(attention, scale=0.125, mask="causal")
        y, gradients = mx.vjp(lambda *given: [run(*given)], [*arrays], [run(*arrays)])
        return [*y, *gradients]
    specs = [Spec.of(a) for a in arrays]
    call = AttentionCall(specs[0], (specs[1],), (specs[2],), Scores(0.125, True))
    at = Launcher(call, handed)
    if not tensors:
        out, norms = forward_ahead(at, Cut(4))(*arrays, None, None)
        given = [*arrays, absent()]
        *sums, _ = backward_once(at, Cut())(given, out, out, norms, absent())
        return [out, *(a.swapaxes(1, 2) for a in sums)]
    outputs = attention_tensor(at)(*arrays, None, None)
    of_all, _ = attention_backward(at, tensors=True)
    return [outputs[0], *of_all([*arrays, None, None], outputs[:1], outputs)]


def _by_tensors(
    transpose: bool,
    x: mx.array,
    packed: list[mx.array],
    chosen: mx.array | None = None,
    codes: bool = False,
) -> mx.array:
    """A product of rows, or of rows that chose experts, or the same by stock operators."""
    rows, *specs = (Spec.of(a) for a in (x, *packed))
    w, scales, biases = packed
    call = MatmulCall(rows, PackedMatrix(*specs), transpose, _FORMAT)
    config = tensor_config(rows.shape[0], rows.shape[-1], x.dtype, _FORMAT, transpose)
    if chosen is None:
        if requested() == "reference":
            return quantized_matmul(x, w, scales, biases, transpose)
        return tensor_product(codes, call)(x, *packed, None)
    if requested() == "reference":
        stock = partial(gather_qmm, transpose=transpose, sorted_indices=True)
        return stock(x, w, scales, biases, rhs_indices=chosen)
    launch = gather_qmm_sorted(call, Pairs(chosen.shape, 1, True), config)
    return launch(x, *packed, None, chosen, None)


def _heads(queries: int, keys: int, width: int, dtype: mx.Dtype = mx.float16) -> dict[str, Any]:
    """q of four heads, and k and v of two; the scale."""
    shapes = {"q": (1, 4, queries, width), "k": (1, 2, keys, width), "v": (1, 2, keys, width)}
    arrays: dict[str, Any] = {name: _normal(shape, dtype) for name, shape in shapes.items()}
    return arrays | {"scale": width**-0.5}


def _attention() -> Iterator[Example]:
    for dtype, width in ((mx.float16, 64), (mx.float32, 64), (mx.bfloat16, 128)):
        given = _heads(70, 70, width, dtype) | {"mask": "causal"}
        what = f"{_of(dtype)}, heads of {width}"
        yield Example(what, attention, given, ("q", "k", "v"), 70, 16)
    if device_of("cuda").warpgroup_products:
        given = {name: a for name, a in _heads(70, 70, 64, mx.bfloat16).items() if name != "scale"}
        yield Example("Hopper GPUs", partial(_attention_by, False), given, terms=70, steps=16)
    given = _heads(40, 40, 64) | {"mask": _normal((4, 40, 40))}
    yield Example("additive mask", attention, given, ("q", "mask"), 40)
    given = _heads(1, 700, 64) | {"q": _normal((1, 8, 1, 64))}
    yield Example("one query", attention, given, terms=700)
    packed = {name: mx.quantize(given[name], 64, 4) for name in ("k", "v")}
    yield Example("one query, 4 bits", attention, given | packed, terms=700)


def _attention_step() -> Iterator[Example]:
    for size, tokens in ((256, 1), (1100, 1), (256, 5)):
        rows = {name: _normal((1, tokens, n * 64)) for name, n in (("q", 8), ("k", 2), ("v", 2))}
        sizes = {"k_cache": size, "v_cache": size, "k_append": 16, "v_append": 16}
        given: dict[str, Any] = {name: _normal((1, 2, n, 64)) for name, n in sizes.items()}
        given |= rows | {"positions": mx.array([200, 7, *[207] * 6], mx.int32)}
        given |= {"scale": 0.125, "rotation": Rotation(64)}
        of = f", {tokens} tokens" if tokens > 1 else ""
        yield Example(f"{size} keys{of}", attention_step, given, terms=208)


def _grid_sample() -> Iterator[Example]:
    given: dict[str, Any] = {"x": _normal((2, 9, 13, 8)), "grid": _between((9, 13), (2, 5, 6))}
    for deterministic in (False, True):
        what = "deterministic" if deterministic else "bilinear"
        options = given | {"deterministic": deterministic}
        yield Example(what, grid_sample, options, ("x", "grid"), 64)
    few = {"x": _normal((2, 20, 20, 8)), "grid": _between((20, 20), (2, 3, 6))}
    yield Example("few points", grid_sample, few, ("x", "grid"), 64)
    given |= {"mode": "bicubic", "padding_mode": "reflection"}
    yield Example("bicubic", grid_sample, given, terms=16)


def _deformable_attention() -> Iterator[Example]:
    shapes = [(8, 6), (4, 3)]
    levels = [(_between(size, (1, 5, 2, 4)) + 1) / 2 for size in shapes]
    given: dict[str, Any] = {"values": _normal((1, 60, 2, 32)), "shapes": shapes}
    given["locations"] = mx.stack(levels, axis=3)
    given["weights"] = mx.softmax(mx.random.normal((1, 5, 2, 2, 4)), axis=-1)
    of = "values", "locations", "weights"
    yield Example("two levels", deformable_attention, given, of, 64)


def _deform_conv2d() -> Iterator[Example]:
    # In float32 its product is a kernel of linalg's.
    shapes = {"x": (1, 6, 5, 8), "weight": (3, 3, 3, 8), "bias": (3,), "mask": (1, 6, 5, 9)}
    given: dict[str, Any] = {name: _normal(shape) for name, shape in shapes.items()}
    moves = mx.random.randint(-2, 3, (1, 6, 5, 18)) + mx.random.uniform(0.2, 0.8, (1, 6, 5, 18))
    given |= {"offset": moves.astype(mx.float16), "padding": 1}
    yield Example("3 by 3", deform_conv2d, given, ("x", "offset", "weight", "mask"), 72, 4)


def _linalg() -> Iterator[Example]:
    n = 160  # more than a block
    a = mx.random.normal((n, n)) / n**0.5
    a = a @ a.T + 4 * mx.eye(n)
    yield Example("cholesky", cholesky, {"a": a, "check": False}, terms=n, steps=8)
    given = {"a": mx.tril(a), "b": mx.random.normal((n, 40))}
    yield Example("solve_triangular", solve_triangular, given, terms=n, steps=8)
    yield Example("qr", qr, {"a": a[:, :100]}, terms=n, steps=8)


def _gptq() -> Iterator[Example]:
    # Weights that the format holds, with both ends of the range in each group, from which it is
    # found again: of others, one code rounded otherwise changes all that follow.
    codes = mx.random.randint(0, 16, (24, 3, _FORMAT.group_size))
    codes[..., 5], codes[..., 40] = 0, 15
    w = ((codes - 7) * mx.random.uniform(0.1, 0.2, (24, 3, 1))).reshape(24, -1)
    x = mx.random.normal((512, 192))
    for act_order in (False, True):
        given = {"w": w, "hessian": x.T @ x, "fmt": _FORMAT, "act_order": act_order}
        name = "largest first" if act_order else "in order"
        yield Example(name, _unpacked, given, terms=192, steps=8)


def _unpacked(**arguments: Any) -> mx.array:
    return mx.dequantize(*gptq(**arguments), *_FORMAT[:2])


_FAMILIES: dict[str, Callable[[], Iterator[Example]]] = {
    **{name: partial(_of_folder, name) for _, name, folder in iter_modules(ops.__path__) if folder},
    "rotary_embedding": _rotary,
    "gated_delta": _gated_delta,
    "grid_sample": _grid_sample,
    "deformable_attention": _deformable_attention,
    "deform_conv2d": _deform_conv2d,
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


def _between(size: tuple[int, int], shape: Shape) -> mx.array:
    """Points (*shape, 2) of an image, some outside, none near where a derivative jumps."""
    extent = mx.array(size[::-1])
    pixel = mx.random.randint(-1, extent, (*shape, 2))
    return (2 * (pixel + mx.random.uniform(0.2, 0.8, (*shape, 2))) + 1) / extent - 1


def matrix(shape: Shape, dtype: mx.Dtype = mx.float16, fmt: Format = _FORMAT) -> dict[str, Any]:
    """A matrix in a format, and what else a call says of it."""
    w, scales, *biases = packed(shape, dtype, fmt)
    return {"w": w, "scales": scales, "biases": biases[0] if biases else None} | fmt._asdict()


def packed(shape: Shape, dtype: mx.Dtype = mx.float16, fmt: Format = _FORMAT) -> list[mx.array]:
    return list(fmt.quantize(_normal(shape, dtype)))


def _normal(shape: Shape, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
