"""A kernel is checked before it is launched, and what MLX generates is what the file declares."""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.backend import advance_epoch, use_backend
from mlx_qlayers.runtime.kernel import Kernel, KernelError
from mlx_qlayers.runtime.launch_checks import checked_launch
from mlx_qlayers.runtime.tracing import Record, trace

from .kernels import AFFINE, GATHER, ROW_SUMS
from .mlx_text import record

X = mx.arange(40, dtype=mx.float32)
SCALAR, BIAS = mx.array(2.0), mx.array([1.0, 2.0, 3.0])


CALL = {
    "inputs": [X, SCALAR, BIAS],
    "template": {"T": mx.float32, "N": 3, "NEGATE": False},
    "grid": (40, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [X.shape],
}


def affine(**changes):
    return AFFINE(**CALL | changes)


def row_sums(kernel=ROW_SUMS, x=X[:32], **changes):
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(1,)]}
    return kernel([x], **call | changes)


def gather(x):
    sizes = {"grid": (max(x.size, 1), 1, 1), "threadgroup": (8, 1, 1)}
    return GATHER([x], template={"T": x.dtype}, output_shapes=[(x.size,)], **sizes)


def test_a_launch_reaches_the_backend_as_it_was_called(metal):
    (y,) = affine(init_value=1.5)
    assert (y.shape, y.dtype) == ((40,), mx.float32)
    (call,) = metal.called
    assert call["template"] == [("T", mx.float32), ("N", 3), ("NEGATE", False)]
    assert (call["grid"], call["threadgroup"]) == ((40, 1, 1), (32, 1, 1))
    assert (call["output_shapes"], call["output_dtypes"]) == ([(40,)], [mx.float32])
    assert call["init_value"] == 1.5
    assert call["inputs"][0] is X


def test_launches_are_traced_and_those_that_fail_are_not(metal):
    with trace() as launches:
        gather(mx.zeros((2, 8)))
        gather(X)
        with pytest.raises(KernelError):
            affine(grid=(0, 1, 1))
    gather(X)
    assert launches[0] == Record(
        kernel="gather",
        backend="metal",
        grid=(16, 1, 1),
        threadgroup=(8, 1, 1),
        template={"T": mx.float32},
        input_shapes=((2, 8),),
        output_shapes=((16,),),
    )
    assert [record.grid for record in launches] == [(16, 1, 1), (40, 1, 1)]


def test_the_kernel_is_made_once(metal):
    for n in (1, 2, 2):
        affine(template={"T": mx.float32, "N": n, "NEGATE": False})
    assert (len(metal.made), len(metal.called)) == (1, 3)


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_a_device_input_of_any_size_arrives_in_device_memory(metal, n):
    x = X[:n]
    affine(inputs=[x, SCALAR, BIAS], grid=(1, 1, 1))
    passed = metal.called[0]["inputs"][0]
    assert passed.size >= 8
    assert passed[:n].tolist() == x.tolist()


def test_on_the_host_a_small_device_input_ends_where_it_ends():
    call = {"inputs": [X[:3], SCALAR, BIAS], "threadgroup": (4, 1, 1), "output_shapes": [(4,)]}
    with use_backend("host"), host.checks():
        (y,) = affine(**call, grid=(3, 1, 1), init_value=0)
        assert y.tolist() == [1, 4, 7, 0]
        with pytest.raises(host.OutOfBounds, match="kernel affine"):
            affine(**call, grid=(4, 1, 1))


def test_an_input_whose_shape_is_read_keeps_it(metal):
    gather(mx.zeros((2, 3)))
    assert metal.called[0]["inputs"][0].shape == (2, 3)
    assert metal.made[0]["ensure_row_contiguous"] is False


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("n", [3, 40])
def test_the_text_is_what_mlx_generates_for_the_call(monkeypatch, dtype, n):
    """Through the metal backend and MLX's own ``metal_kernel``, which can record it anywhere."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    changes = {"template": {"T": dtype, "N": 3, "NEGATE": True}}
    advance_epoch()
    with use_backend("metal"):
        given = [mx.zeros(n, dtype)]
        recorded = record(lambda x: affine(inputs=[x, SCALAR, BIAS], **changes), given)
        changes["inputs"] = [*given, SCALAR, BIAS]
        launch = checked_launch(AFFINE, "metal", **CALL | changes)
    advance_epoch()
    assert (launch.function, launch.text) == (recorded.function, recorded.text)
    assert f"const device {dtype_name(dtype)}* x [[buffer(0)]]" in recorded.text
    assert "const constant float& a [[buffer(1)]]" in recorded.text
    assert "const constant float* b [[buffer(2)]]" in recorded.text


def dtype_name(dtype):
    return {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}[dtype]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": [X, SCALAR]}, "takes 3 inputs ('x', 'a', 'b'), not 2"),
        ({"inputs": [X.astype(mx.float16), SCALAR, BIAS]}, "input x is mlx.core.float16"),
        ({"inputs": [X, mx.array(2), BIAS]}, "input a is mlx.core.int32, declared as mlx.core.flo"),
        ({"inputs": [X, mx.array([2.0]), BIAS]}, "input a is a reference, its shape must be ()"),
        ({"inputs": [X, SCALAR, X]}, "input b is declared constant: it must have an axis and less"),
        ({"inputs": [X, SCALAR, SCALAR]}, "input b is declared constant"),
        ({"template": {"T": mx.float32, "N": 3}}, "has template parameters"),
        ({"template": None}, "has template parameters"),
        ({"template": {"T": mx.float32, "N": -1, "NEGATE": False}}, "N must be an int from 0"),
        ({"template": {"T": mx.float32, "N": 2**31, "NEGATE": False}}, "N must be an int from 0"),
        ({"template": {"T": mx.float32, "N": 3, "NEGATE": 2}}, "NEGATE must be a bool, not 2"),
        ({"template": {"T": mx.float64, "N": 3, "NEGATE": True}}, "T must be a Metal dtype"),
        ({"template": {"T": 4, "N": 3, "NEGATE": True}}, "T must be a Metal dtype, not 4"),
        ({"grid": (0, 1, 1)}, "must be positive"),
        ({"grid": (2**31, 1, 1)}, "more than 2^31 - 1 threads"),
        ({"threadgroup": (1024, 2, 1)}, "has 2048 threads, at most 1024"),
        ({"output_shapes": []}, "has 1 outputs ('y',), not 0"),
        ({"output_shapes": [(2**16, 2**15)]}, "need 64-bit offsets"),
        ({"output_dtypes": [mx.float16]}, "its outputs are [mlx.core.float32]"),
        # Of another type than is declared.
        ({"inputs": X}, "inputs must be a list of arrays, not array"),
        ({"inputs": None}, "inputs must be a list of arrays, not NoneType"),
        ({"inputs": [X.tolist(), SCALAR, BIAS]}, "input x must be an mx.array, not list"),
        ({"inputs": [np.array(X), SCALAR, BIAS]}, "input x must be an mx.array, not ndarray"),
        ({"inputs": [X, 2.0, BIAS]}, "input a must be an mx.array, not float"),
        ({"template": [("T", mx.float32)]}, "template must be a dict of values by name, not list"),
        ({"template": {"T": [mx.float32], "N": 3, "NEGATE": True}}, "T must be a Metal dtype, not"),
        ({"template": {"T": mx.float32, "N": [3], "NEGATE": True}}, "N must be an int from 0, not"),
        ({"template": {"T": mx.float32, "N": 3.0, "NEGATE": False}}, "N must be an int from 0, no"),
        ({"template": {"T": mx.float32, "N": 3, "NEGATE": None}}, "NEGATE must be a bool, not Non"),
        ({"grid": 40}, "grid must be three integers (x, y, z), not 40"),
        ({"grid": (40, 1)}, "grid must be three integers (x, y, z), not (40, 1)"),
        ({"grid": (40.0, 1, 1)}, "grid must be three integers (x, y, z), not (40.0, 1, 1)"),
        ({"threadgroup": "abc"}, "threadgroup must be three integers (x, y, z), not 'abc'"),
        ({"threadgroup": [32, 1]}, "threadgroup must be three integers (x, y, z), not [32, 1]"),
        ({"threadgroup": 32.0}, "threadgroup must be three integers (x, y, z), not 32.0"),
        ({"output_shapes": 40}, "output_shapes must be a list of shapes, not int"),
        ({"output_shapes": (40,)}, "the shape of output y must be integers from 0, not 40"),
        ({"output_shapes": [(40.0,)]}, "the shape of output y must be integers from 0, not (40.0"),
        ({"output_shapes": [(-1,)]}, "the shape of output y must be integers from 0, not (-1,)"),
        ({"output_dtypes": mx.float32}, "output_dtypes must not be mlx.core.float32"),
        ({"output_dtypes": [None]}, "output_dtypes must not be [None]"),
        ({"init_value": "0"}, "init_value must be a number or None, not '0'"),
        ({"init_value": 2**70}, "init_value must be a number of 64 bits, not 11805916207"),
        ({"init_value": [0]}, "init_value must be a number or None, not [0]"),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_calls_that_do_not_fit(metal, changes, message, again):
    if again:
        # A call that was checked is not checked again; these must not pass for it.
        affine()
        metal.called.clear()
    with pytest.raises(KernelError, match=re.escape(message)) as caught:
        affine(**changes)
    assert str(caught.value).startswith("kernel affine: ")
    assert not metal.called


def test_bools_and_ints_are_told_apart_by_the_declaration(metal):
    # They are equal as dictionary keys.
    for n, negate in ((1, True), (True, 1)):
        affine(template={"T": mx.float32, "N": n, "NEGATE": negate})
        assert repr(metal.called[-1]["template"][1:]) == "[('N', 1), ('NEGATE', True)]"


def test_sizes_and_shapes_may_be_any_sequence_of_integers(metal):
    affine(grid=[40, 1, 1], threadgroup=np.array([32, 1, 1]), output_shapes=([np.int64(40)],))
    (call,) = metal.called
    assert repr((call["grid"], call["threadgroup"])) == "((40, 1, 1), (32, 1, 1))"
    assert repr(call["output_shapes"]) == "[(40,)]"


def test_a_0d_input_has_no_shape_to_read(metal):
    with pytest.raises(KernelError, match="reads the shape of input x, which has no axis"):
        gather(mx.array(1.0))


def test_atomic_outputs_have_32_bits(metal, tmp_path):
    path = tmp_path / "half.metal"
    path.write_text(
        "template <typename T> [[kernel]] void k(device atomic<T>* y, "
        "uint i [[thread_position_in_grid]]) { y[i] = 0; }"
    )
    kernel = Kernel("k", path, (), ("y",), template=("T",), atomic_outputs=True)
    call = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)]}
    kernel([], template={"T": mx.int32}, **call)
    assert metal.made[0]["atomic_outputs"] is True
    with pytest.raises(KernelError, match="atomic outputs have 32 bits"):
        kernel([], template={"T": mx.float16}, **call)


def test_a_type_that_mlx_does_not_pass(metal, tmp_path):
    path = tmp_path / "vector.metal"
    path.write_text(
        "[[kernel]] void k(device float4* y, uint i [[thread_position_in_grid]]) { y[i] = 0; }"
    )
    with pytest.raises(KernelError, match="MLX cannot pass y as float4"):
        Kernel("k", path, (), ("y",))(
            [], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)]
        )


def test_only_what_the_kernel_uses_is_sent(metal):
    row_sums()
    assert metal.made[0]["header"] == "constant constexpr uint SIMD=32;\n"
    assert "//" not in metal.made[0]["source"]
