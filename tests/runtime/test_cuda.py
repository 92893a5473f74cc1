"""The CUDA backend: how sources are rewritten and launched, and on a GPU that they run."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.layout import Layout
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime import BackendError, Kernel, use_backend
from mlx_qlayers.runtime.cuda import translate
from tests.machine import zeros
from tests.numerics import assert_function, assert_same_sums
from tests.packed import dequantize64

from .nvrtc import kernel_that, text_of

Launches = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def launches(machine, monkeypatch):
    """The cuda backend, forced, with a stand-in for MLX's function that notes its calls."""
    seen: Launches = []

    def run(declaration: dict[str, Any], launch: dict[str, Any]) -> list[mx.array]:
        seen.append((declaration, launch))
        return zeros(**launch)

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel_that(run))
    machine("cuda")
    with use_backend("cuda"):
        yield seen


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("x = 0.5;", "x = 0.5f;"),
        ("x = .5e-3 + 1e4 + 2.f;", "x = .5e-3f + 1e4f + 2.f;"),
        ("x = 1.5h * 3 + 0x1e4 + 7u;", "x = half(1.5f) * 3 + 0x1e4 + 7u;"),
        ("a = v.xyz;", "a = v.template get<0,1,2>();"),
        ("a = v.x + p->zw;", "a = v.x + p->template get<2,3>();"),
        ("v.yx = w.xy;", "v.template set<1,0>() = w.template get<0,1>();"),
        ("v.zw += a;", "v.template set<2,3>() += a;"),
        ("if (v.xy == w.xy) f(v.xy <= w.zw);", None),
        ("float xy = s.xy(1);", "float xy = s.xy(1);"),
        ("#define HALF_OF(x) (0.5 * x.xy)", "#define HALF_OF(x) (0.5f * x.template get<0,1>())"),
        ("#pragma clang loop unroll(full)", "#pragma unroll"),
        ("#pragma clang loop unroll(disable)", "#pragma unroll 1"),
        ("#pragma clang loop unroll_count(4)", "#pragma unroll 4"),
        ("threadgroup float* p = t;", "threadgroup float* p = t;"),
        ("long a = 3l + 0xful;", "int64_t a = 3ll + 0xfull;"),
        ("size_t n = max(u[i], size_t(1));", "uint64_t n = max(u[i], uint64_t(1));"),
        ("unsigned long n = 1.5;", "unsigned long n = 1.5f;"),
    ],
)
def test_translation(metal, cuda):
    if cuda is None:
        assert "set<" not in translate(metal)
    else:
        assert _squeezed(translate(metal, kernel=True)) == _squeezed(cuda)


@pytest.mark.parametrize(
    ("statement", "declares"),
    [
        ("threadgroup float tile[4 * 8][M + 1];", True),
        ("threadgroup float a[4], b[8];", True),
        ("threadgroup vec<T, 4> wide[8];", True),
        ("threadgroup atomic<int> count;", True),
        ("threadgroup atomic_uint seen;", True),
        ("threadgroup float* row = tile + 4;", False),
        ("threadgroup const float4& v = wide[0];", False),
        ("x = *(threadgroup float4*)(tile + 4);", False),
        ("x = *reinterpret_cast<const threadgroup float4*>(tile);", False),
        ("load<threadgroup float>(tile);", False),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", False),
    ],
)
def test_threadgroup_variables_become_shared(statement, declares):
    assert ("__shared__" in translate(statement, kernel=True)) == declares
    assert "__shared__" not in translate(statement)


EXP = Kernel("exp_forward", "exp/exp.metal", ("x",), ("y",), template=("T",))


def _exp(x: mx.array) -> None:
    threads = {"grid": (x.size, 1, 1), "threadgroup": (32, 1, 1)}
    EXP([x], template={"T": x.dtype}, output_shapes=[x.shape], **threads)


def test_a_grid_of_whole_threadgroups_needs_no_guard(launches):
    _exp(mx.zeros(64))
    ((declaration, launch),) = launches
    assert launch["grid"] == (64, 1, 1) and len(launch["inputs"]) == 1
    assert "return;" not in declaration["source"]
    assert "#define MSL_GROUP_SIZE 32\n" in declaration["header"]


def test_a_template_can_ask_for_threadgroups_that_fit_at_once(launches):
    q = mx.zeros((1, 1, 64, 128), mx.float16)
    at = Launcher(AttentionCall(q, (q,), (q,), Scores(1.0)))
    attention_forward(at, Layout(resident=3))(q, q, q, None, None)
    # So long a text is in a file of its own.
    _, included, _ = launches[0][0]["header"].split('"')
    assert "#define MSL_RESIDENT 3\n" in Path(included).read_text()
    _exp(mx.zeros(64))
    assert "#define MSL_RESIDENT 1\n" in launches[1][0]["header"]


def test_surplus_threads_are_told_the_grid(launches):
    for size in (65, 70):
        _exp(mx.zeros(size))
        declaration, launch = launches[-1]
        assert launch["grid"] == (96, 1, 1)
        assert launch["inputs"][-1].tolist() == [size, 1, 1]
        assert declaration["input_names"][-1] == "msl_grid_limit"
        assert ">=msl_grid_limit[0]" in declaration["source"]
    # One text serves every size.
    assert text_of(*launches[0])[1] == text_of(*launches[1])[1]


def test_texts_that_differ_have_names_that_differ(launches):
    """MLX keeps compiled kernels by name; what a template is given stands in the text."""
    for dtype, threads in ((mx.float32, 32), (mx.float32, 64), (mx.float16, 64), (mx.float16, 64)):
        EXP(
            [mx.zeros(64, dtype)],
            template={"T": dtype},
            grid=(64, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(64,)],
        )
    names = [declaration["name"] for declaration, _ in launches]
    assert len(set(names)) == 3 and names[2] == names[3]
    assert all(name.startswith("exp_forward_") for name in names)
    assert "using T=__half;" in launches[2][0]["source"] and launches[2][1]["template"] == []


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [((1, 2**16, 1), (1, 1, 1)), ((1, 1, 128), (1, 1, 128))]
)
def test_grids_that_cuda_cannot_start(launches, grid, threadgroup):
    call = {"grid": grid, "threadgroup": threadgroup, "output_shapes": [(1,)]}
    with pytest.raises(BackendError, match="kernel exp_forward: CUDA takes 65535 threadgroups"):
        EXP([mx.zeros(1)], template={"T": mx.float32}, **call)
    assert not launches


@pytest.mark.cuda
def test_the_text_compiled_off_the_gpu_is_mlx_own(capfd):
    x = mx.zeros((3, 4), mx.bfloat16)
    declaration: dict[str, Any] = {
        "name": "mirror",
        "input_names": ["x", "s"],
        "output_names": ["a", "b"],
        "header": "struct pair { int a; };\n",
        "source": "a[0] = x_shape[0] + x_strides[0] + x_ndim + s[0]; b[0] = 5;",
    }
    launch: dict[str, Any] = {
        "inputs": [x, mx.array(2, mx.int32)],
        "output_dtypes": [mx.float32, mx.int64],
    }
    name, text = text_of(declaration, launch)
    mx.fast.cuda_kernel(**declaration)(
        **launch, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,), (1,)], verbose=True
    )
    printed = capfd.readouterr().out
    assert f"`{name.split('::')[-1]}`" in printed
    assert printed.split("```\n", 1)[1].rsplit("\n```", 1)[0] == text


@pytest.mark.cuda
def test_launches_work_in_transformations():
    x = mx.random.normal((7, 41), key=mx.random.key(3))

    def loss(x: mx.array) -> mx.array:
        return exp(x).sum()

    with use_backend("cuda"):
        plain = mx.value_and_grad(loss)(x)
        compiled = mx.compile(mx.value_and_grad(loss))(x)
        strided = exp(x.T, strided=True)
        mx.eval(plain, compiled, strided)
    for value, gradient in (plain, compiled):
        assert_same_sums(value, mx.exp(x).sum())
        assert_function(gradient, np.exp, x)
    assert_function(strided, np.exp, x.T)


@pytest.mark.cuda
def test_one_bit_is_packed_and_unpacked_where_mlx_has_no_kernel():
    """Memory that nothing writes holds what was there before: other numbers."""
    fmt, x = Format(32, 1), mx.random.normal((64, 128), key=mx.random.key(1))
    mx.eval([mx.full((64, 128), 7.0) + n for n in range(8)])
    packed = fmt.quantize(x)
    found = fmt.dequantize(*packed)
    np.testing.assert_allclose(np.array(found), dequantize64(*packed, fmt), atol=1e-6)
    assert np.corrcoef(np.array(found).ravel(), np.array(x).ravel())[0, 1] > 0.5


def _squeezed(text: str) -> str:
    return text.replace(" ", "")
