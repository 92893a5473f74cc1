"""No configuration that a launcher chooses breaks a limit of the hardware.

Launches are bound, not run: that checks threads, threadgroup memory, and registers of M1 and M2.
"""

import itertools
import re
import sys
from importlib import import_module
from operator import attrgetter
from pkgutil import walk_packages

import mlx.core as mx
import pytest

from mlx_qlayers import metal, ops
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention import backward, decode, step
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.latent import latent_step
from mlx_qlayers.metal.attention.step import attention_step
from mlx_qlayers.metal.attention.tensor import (
    attention_tensor,
    tensor_gradients,
    tensor_mask_gradient,
)
from mlx_qlayers.metal.deformable import launch as deformable
from mlx_qlayers.metal.gated_delta import launch as gated_delta
from mlx_qlayers.metal.gather_qmm.experts import (
    experts_chosen,
    experts_combined,
    experts_products,
)
from mlx_qlayers.metal.gather_qmm.gather_qmm import gather_qmm_config, gather_qmm_sorted
from mlx_qlayers.metal.gather_qmm.gather_qmv import Pairs, configuration, gather_qmv
from mlx_qlayers.metal.gptq.launch import gptq_block, gptq_fixed_block
from mlx_qlayers.metal.grid_sample import launch as grid_sample
from mlx_qlayers.metal.int8.launch import int8_rows
from mlx_qlayers.metal.linalg import launch as linalg
from mlx_qlayers.metal.linalg.qr import q_of, qr
from mlx_qlayers.metal.quantized_matmul.dequantize import dequantize
from mlx_qlayers.metal.quantized_matmul.gradients import scales_and_biases_gradient
from mlx_qlayers.metal.quantized_matmul.qmm import qmm, qmm_config
from mlx_qlayers.metal.quantized_matmul.qmm_skinny import skinny_config
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import (
    codes_config,
    qmm_tensor,
    tensor_config,
    why_no_codes,
)
from mlx_qlayers.metal.quantized_matmul.qmv import QmvArrays, qmv
from mlx_qlayers.metal.quantized_matmul.qmv_config import qmv_config
from mlx_qlayers.metal.quantized_matmul.tile import Tile
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.metal.rotary.launch import rotary_embedding
from mlx_qlayers.ops import exp
from mlx_qlayers.ops.add_low_rank import add_low_rank
from mlx_qlayers.ops.linear_cross_entropy import linear_cross_entropy
from mlx_qlayers.ops.swiglu import swiglu
from mlx_qlayers.options import (
    AttentionCall,
    Clipped,
    Deformable,
    MatmulCall,
    PackedMatrix,
    Rotation,
    Router,
    Sampling,
    Scores,
)
from mlx_qlayers.runtime import Kernel, KernelError
from mlx_qlayers.runtime.backend import current, use_backend, within
from mlx_qlayers.runtime.devices import device_of
from mlx_qlayers.runtime.devices.record import most_threads
from mlx_qlayers.runtime.spec import Spec
from tests.machine import has_gpu
from tests.packed import FORMATS

DTYPES = (mx.float32, mx.bfloat16)
WIDTHS = (512, 4096, 18944, 152064)
DEPTHS = (512, 8960)
SIZES = range(8, 257, 8)
HEADS = [*((d, d) for d in SIZES), *((d, 128) for d in SIZES), *((192, dv) for dv in SIZES)]
MODES = ("nearest", "bilinear", "bicubic")


@pytest.fixture(params=["metal", "cuda"])
def device(request, machine, monkeypatch):
    """A GPU that is not here: launches are checked and bound, nothing runs."""
    machine(request.param)
    module = import_module(f"mlx_qlayers.runtime.{request.param}")
    outputs = attrgetter("output_shapes", "output_dtypes")
    made = lambda launch: [*map(mx.zeros, *outputs(launch))]  # noqa: E731
    monkeypatch.setattr(module, "bind", lambda launch: lambda arrays: made(launch))
    with use_backend(request.param):
        yield request.param


def packed(fmt, n, k, dtype):
    """The specs of a matrix of n rows."""
    scales = Spec((n, k // fmt.group_size), dtype if fmt.mode == "affine" else mx.uint8)
    biases = scales if fmt.mode == "affine" else None
    return PackedMatrix(Spec((n, k * fmt.bits // 32), mx.uint32), scales, biases, None)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_qmv(fmt, device):
    bound = set()
    for rows, n, k, dtype in itertools.product(range(1, 17), WIDTHS, DEPTHS, DTYPES):
        for norm, gate in itertools.product((False, True), (None, "silu")):
            kind = "-".join(["norm"] * norm + ["gate"] * bool(gate))
            config = qmv_config(device, rows, n, k, dtype, fmt, kind)
            if (config, dtype, norm, gate) in bound:
                continue
            bound.add((config, dtype, norm, gate))
            weight, matrix = Spec((k,), dtype) if norm else None, packed(fmt, n, k, dtype)
            matrices = [matrix] * (2 if gate else 1)
            specs = QmvArrays(Spec((rows, k), dtype), weight, matrices=matrices)
            qmv(specs, fmt, config, gate=gate, epsilon=1e-6 if norm else None)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_qmm_skinny(fmt, device):
    bound = set()
    for rows, n, k, dtype in itertools.product(range(9, 129), WIDTHS, DEPTHS, DTYPES[1:]):
        config = skinny_config(device, rows, n, k, fmt)
        for gate in () if config in bound else (None, "silu"):
            matrix = packed(fmt, n, k, dtype)
            matrices = [matrix] * (2 if gate else 1)
            specs = QmvArrays(Spec((rows, k), dtype), matrices=matrices)
            qmv(specs, fmt, config, gate=gate)
        bound.add(config)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_qmm(fmt, device):
    bound = set()
    rows = (17, 33, 65, 96, 128, 512)
    for m, n, k, dtype, transpose in itertools.product(rows, WIDTHS, DEPTHS, DTYPES, (True, False)):
        config = qmm_config(device, m, n, k, dtype, fmt, transpose)
        if (config, dtype, transpose) not in bound:
            bound.add((config, dtype, transpose))
            matrix = packed(fmt, *((n, k) if transpose else (k, n)), dtype)
            call = MatmulCall(Spec((m, k), dtype), matrix, transpose, fmt)
            qmm(call, config)
            qmm_tensor(call, tensor_config(m, k, dtype, fmt, transpose))
            if why_no_codes(call) is None:
                qmm_tensor(call, codes_config(m), None, matrix, "silu")


def cached(rows, width, dtype, bits):
    """Keys or values of a cache, packed if there are bits."""
    if bits == 0:
        return (Spec((*rows, width), dtype),)
    groups = Spec((*rows, width // 32), dtype)
    return Spec((*rows, width * bits // 32), mx.uint32), groups, groups


def test_attention_of_many_queries_to_packed_keys(device):
    for dtype, (d, dv), bits in itertools.product(DTYPES, HEADS, decode.BITS):
        if min(d, dv) >= 32 and d % 32 == dv % 32 == 0:
            k, v = (cached((1, 2, 70), width, dtype, bits) for width in (d, dv))
            q = Spec((1, 2, 40, d), dtype)
            attention_forward(Launcher(AttentionCall(q, k, v, Scores(0.1, True))))


def test_attention_of_many_queries_of_wide_heads(device):
    for d, dv in ((576, 512), (512, 512), (264, 576)):
        q, k, v = (Spec((1, 2, 40, width), mx.bfloat16) for width in (d, d, dv))
        attention_forward(Launcher(AttentionCall(q, (k,), (v,), Scores(0.1, True))))


def test_attention_of_many_queries(device, monkeypatch):
    """Forward and backward, which is bound where it is asked for."""
    mask = Spec((8, 1, 2, 40, 70), mx.bool_)
    for dtype, (d, dv) in itertools.product(DTYPES, HEADS):
        if min(d, dv) < 32:
            continue
        q, k, v = (Spec((1, 2, n, width), dtype) for n, width in ((40, d), (70, d), (70, dv)))
        at = Launcher(AttentionCall(q, (k,), (v,), Scores(0.1, True), mask))
        attention_forward(at)
        out, rows = Spec((1, 2, 40, dv), dtype), Spec((1, 2, 40, 2), mx.float32)
        delta, average = Spec((1, 2, 40), mx.float32), Spec((1, 2, dv), mx.float32)
        keys, queries = at.layout("keys"), at.layout("queries")
        values = keys.template() | {"AVERAGE": at.average, "ROLES": keys.roles}
        others = out, rows, delta, average
        at.bind(backward._KEYS, others, *keys.grid(70, 2, 1), [k.shape, v.shape], **values)
        per_query, values = ((out, out, rows), *queries.grid(40, 2, 1)), queries.template()
        at.bind(backward._QUERIES, *per_query, [q.shape, delta.shape], **values)
        at.bind(backward._MASK, *per_query, [(1, 2, 40, 70)], init_value=0, **values)
        with monkeypatch.context() as on:
            # No M1 or M2 runs them.
            has_gpu(on, "applegpu_g16s")
            attention_tensor(at)
            tensor_gradients(at, per_query[0], average)
            tensor_mask_gradient(at, per_query[0])


def test_attention_of_few_queries(device):
    for dtype, (d, dv), bits in itertools.product(DTYPES, HEADS, (0, *decode.BITS)):
        if bits and (d % 32 or dv % 32):
            continue
        cache = [cached((2, 2, 4096), width, dtype, bits) for width in (d, dv)]
        for rows, mask in itertools.product((1, 4, 7, 9, 17, 64), (None, mx.float32)):
            mask = mask and Spec((8, 2, 2 * rows, 1, 4096), mask)
            q = Spec((2, 2 * rows, 1, d), dtype)
            call = AttentionCall(q, *cache, Scores(0.1), mask)
            if device == "cuda" or decode.fits_few_registers(call):
                problem = RECORDS["attention_decode"](*decode.key_of(call))
                decode.attention_decode(call, problem.heuristic(device))
            else:
                assert max(d, dv) > (128 if dtype.size == 2 or bits else 64)


def test_attention_step(device):
    masks = None, Spec((1, 1, 1, 4352), mx.bool_)
    for dtype, (d, dv), size in itertools.product(DTYPES, HEADS, (256, 4096)):
        for (share, tokens), mask in zip(
            ((1, 1), (7, 1), (9, 1), (64, 1), (7, 5), (2, 16)), masks * 3, strict=True
        ):
            if not step.covers(share, step.Heads(dtype, d, dv, 0, tokens), device == "metal"):
                most = 128 if dtype.size == 2 else 64
                assert max(d, dv) > most and (device == "metal" or tokens > 1)
                continue
            rows = (Spec((1, tokens, n), dtype) for n in (2 * share * d, 2 * d, 2 * dv))
            buffers = (Spec((1, 2, n, width), dtype) for n in (size, 256) for width in (d, dv))
            arrays = *rows, *buffers, Spec((8,), mx.int32), None, mask, None, None, None
            key = dtype, 1, 2 * share, 2, size, d, dv, 0, 0, tokens
            problem = RECORDS["attention_step"](*key)
            attention_step(arrays, 0.1, Rotation(d), problem.heuristic(device))


def experts(fmt, dtype, transpose):
    """The specs of 8 matrices, and 512 columns of x."""
    return PackedMatrix(*(a and Spec((8, *a.shape), a.dtype) for a in packed(fmt, 512, 512, dtype)))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_gather_qmm(fmt, device):
    for dtype, transpose, rows, in_order in itertools.product(
        DTYPES, (True, False), (1, 4, 32), (True, False)
    ):
        matrix = experts(fmt, dtype, transpose)
        pairs = Pairs((64,), 1, in_order)
        call = MatmulCall(Spec((64, rows, 512), dtype), matrix, transpose, fmt)
        gather_qmv(call, pairs, configuration(device, rows, in_order, transpose, fmt))
        gather_qmm_sorted(call, pairs, gather_qmm_config(64 * rows, 8, dtype, fmt))
        gather_qmm_sorted(call, pairs, tensor_config(8 * rows, 512, dtype, fmt, transpose))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_experts(fmt, device):
    for dtype, rows, gate in itertools.product(DTYPES, (1, 8), (None, "silu", Clipped())):
        matrices = [experts(fmt, dtype, True)] * (2 if gate else 1)
        x, right = Spec((rows, 512), dtype), Spec((rows, 4), mx.uint32)
        experts_products(x, right, matrices, fmt, gate, 4)
        experts_combined(Spec((rows, 4, 512), dtype), right, right, matrices[0], None, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dequantize_and_gradients(fmt, device):
    for dtype, k in itertools.product(DTYPES, (512, 8960)):
        matrix = packed(fmt, 512, k, dtype)
        dequantize([matrix] * 3, fmt, dtype)
        if fmt.mode == "affine":
            call = MatmulCall(Spec((40, k), dtype), matrix, True, fmt)
            scales_and_biases_gradient(call, Spec((40, 512), dtype), device)


def test_grid_sample(device):
    for channels, dtype, dims in itertools.product((*range(1, 18), 64, 70), DTYPES, (2, 3)):
        x = Spec((2, *[9] * dims, channels), dtype)
        grid = Spec((2, *[5] * dims, dims), mx.float32)
        for mode, deterministic in itertools.product(MODES[: 5 - dims], (False, True)):
            options = Sampling(mode, deterministic=deterministic)
            config = grid_sample.heuristic(channels, dtype, device, deterministic)
            if device == "metal":
                config = grid_sample.within_registers(config, x, grid, options)
            for bind in (
                grid_sample.grid_sample,
                grid_sample.gradient_x,
                grid_sample.gradient_grid,
            ):
                bind(x, grid, options, config)


def test_rotary_and_elementwise(device):
    for dtype, dims in itertools.product(DTYPES, range(2, 257, 2)):
        q, k = Spec((2, 3, 8, 256), dtype), Spec((2, 3, 2, 256), dtype)
        for offset, base in itertools.product(
            (Spec((), mx.int32), Spec((2,), mx.int32)), (None, 1e4)
        ):
            rotary_embedding(q, k, offset, Rotation(dims, base=base), 4)
        x = Spec((41, dims), dtype)
        exp.bind(exp.FORWARD, x), exp.bind(exp.STRIDED, x), exp.bind(exp.GRADIENT, x, x)


def test_adapters_and_their_training(device):
    for dtype, rank, k in itertools.product(DTYPES, (1, 8, 32), (70, 512)):
        x, y, a, b = (mx.zeros(s, dtype) for s in ((9, k), (9, 96), (k, rank), (rank, 96)))
        add_low_rank(y, x, a, b)
        with within(current, current.get()._replace(sparing=True)):
            swiglu(x, x)
    for dtype, words in itertools.product(DTYPES, (64, 1001)):
        x, weight = mx.zeros((5, 32), dtype), mx.zeros((words, 32), dtype)
        mx.value_and_grad(linear_cross_entropy)(x, mx.zeros((5,), mx.int32), weight)


def test_deformable(device):
    options = Deformable(((8, 6), (4, 3)))
    for dtype, width, points in itertools.product(DTYPES, SIZES, range(1, 9)):
        values = Spec((1, 60, 2, width), dtype)
        given = Spec((1, 5, 2, 2, points, 2), dtype), Spec((1, 5, 2, 2, points), dtype)
        config = deformable.heuristic(width, points, dtype, device)
        deformable.forward((values, *given), options, config)
        deformable.gradient((values, *given), options, config)


def test_linalg(device):
    for n in (1, 31, 32, 33, 100, 128, 129, 300):
        a, b = Spec((2, n, n), mx.float32), Spec((2, n, 140), mx.float32)
        linalg.cholesky(a, 128), linalg.solve_lower(a, b, 128), qr(a), q_of(b)


def test_latent_rows(device):
    sizes = ((512, 64), (256, 32), (32, 32), (96, 64)), (8, 300, 1 << 20)
    for dtype, (width, rotated), rows in itertools.product(DTYPES, *sizes):
        q, r = (Spec((2, 16, 1, n), dtype) for n in (width, rotated))
        latent_step(q, r, Spec((2, 1, rows, width), dtype), None, 0.1)


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_no_m1_or_m2_runs(device):
    """mlx-lm has a kernel of the gated delta rule there; products of 8 bits need an M5."""
    for dtype, keys, values in itertools.product(DTYPES, (64, 128, 192, 256), (32, 128, 256)):
        q, v = Spec((1, 3, 2, keys), dtype), Spec((1, 3, 4, values), dtype)
        gates, state = Spec((1, 3, 4), dtype), Spec((1, 4, values, keys), mx.float32)
        if gated_delta.takes(keys):
            gated_delta.gated_delta((q, q, v, gates, gates, state, None))
    for k in (16, 512, 18944, 32768):
        int8_rows(Spec((40, k), mx.bfloat16), 16)


def test_gptq_and_routers(device):
    w = Spec((2, 41, 128), mx.float32)
    for bits, group in itertools.product(range(1, 9), (32, 64, 128)):
        gptq_block(w, group, bits, mx.float16), gptq_fixed_block(w, bits)
    for count, top_k, groups in itertools.product((8, 160, 1024), (1, 8), (1, 8)):
        router = Router(top_k, "sigmoid", groups, groups // 2)
        experts_chosen(Spec((4, count), mx.float32), None, None, router)


PACKAGES = tuple(f"{package.__name__}." for package in (metal, ops))
HOPPER = {"attention_forward_ahead"} | {
    f"attention_backward_{name}{groups}"
    for name in ("once", "rows")
    for groups in ("", "_of_groups")
}
ARRAY = re.compile(r"(?:^|[;{}])(?!threadgroup|constant|return)[\w:]+(?:<[^;{}]*>)? \w+\[", re.M)


def test_kernels_that_hold_arrays_say_how_many_words():
    for package, name in zip((metal, ops), PACKAGES, strict=True):
        for module in walk_packages(package.__path__, name):
            import_module(module.name)
    inside = (vars(module) for name, module in sys.modules.items() if name.startswith(PACKAGES))
    own = {k for values in inside for k in values.values() if isinstance(k, Kernel)}
    assert len(own) > 30
    silent = {k.name for k in own if not k.registers and ARRAY.search(k.program.source)}
    assert silent == HOPPER


def test_registers_of_every_launch_are_checked(machine, monkeypatch):
    """On M1 and M2, where MLX would raise when the launch is evaluated; others take it."""
    machine("metal")
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **made: lambda **launch: [])
    fmt, x = Format(64, 4), Spec((16, 512), mx.bfloat16)
    large = Tile("qmv_matrix", 16, fragments=2, tiles=4, simds_k=4, ahead=4)
    specs = QmvArrays(x, matrices=[packed(fmt, 512, 512, mx.bfloat16)])
    with use_backend("metal"):
        with pytest.raises(KernelError, match="128 threads with 188 words of arrays each"):
            qmv(specs, fmt, large)
        has_gpu(monkeypatch, "applegpu_g16s")
        qmv(specs, fmt, large)


@pytest.mark.parametrize(
    ("architecture", "few"),
    [("applegpu_g13g", True), ("applegpu_g14d", True), ("applegpu_g15s", False)],
)
def test_generations(architecture, few, monkeypatch):
    has_gpu(monkeypatch, architecture)
    assert device_of("metal").few_registers is few


def test_threads_by_registers():
    """Above 104 registers not more than 384 threads, above 128 none; 16 are not arrays."""
    assert [most_threads(held) for held in (0, 36, 88, 89, 112, 113)] == [
        *(1024, 1024, 512, 384, 384, 0)
    ]
