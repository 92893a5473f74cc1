"""The declaration of a kernel is compared with its file and with the limits of each backend."""

import dataclasses
import re

import mlx.core as mx
import pytest

from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.backend import BackendError, use_backend
from mlx_qlayers.runtime.kernel import KernelError, Multiple

from .kernels import AFFINE, GATHER, HISTOGRAM, ROW_SUMS
from .test_kernel import BIAS, SCALAR, X, row_sums


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({}, {"grid": (33, 1, 1)}, "grid (33, 1, 1) must be whole threadgroups (32, 1, 1)"),
        ({}, {"threadgroup": (64, 1, 1)}, "must be whole threadgroups"),
        ({"multiples": (Multiple("x", 2, 8),)}, {}, "input x (32,) has no axis 2"),
        ({}, {"x": X}, "axis -1 of input x must be a multiple of 32, not 40"),
        ({"max_threads": 2048}, {}, "max_threads is 2048, Metal has 1024"),
        ({"max_threads": 16}, {}, "has 32 threads, at most 16"),
        ({"threadgroup_memory": 32769}, {}, "needs 32769 bytes of threadgroup memory"),
        ({"inputs": ("y",)}, {}, "inputs declared as ('y',)"),
        ({"outputs": ("sums", "more")}, {}, "outputs declared as ('sums', 'more')"),
        ({"template": ("T",)}, {}, "template declared as ('T',)"),
        ({"atomic_outputs": True}, {}, "atomic_outputs declared as True"),
        ({"function": "no_such"}, {}, "has no kernel 'no_such'"),
        ({"file": "no_such.metal"}, {}, "No such file"),
    ],
)
def test_declarations_and_limits(metal, fields, call, message):
    kernel = dataclasses.replace(ROW_SUMS, **fields)
    with pytest.raises(KernelError, match=re.escape(message)) as caught:
        row_sums(kernel, **call)
    assert str(caught.value).startswith("kernel row_sums: ")
    assert not metal.called


@pytest.mark.parametrize(
    ("limit", "fits", "exceeds", "message"),
    [
        (
            {"threadgroup_memory": lambda T, N, NEGATE: N * T.size},
            *(8192, 8193, "needs 32772 bytes"),
        ),
        ({"multiples": (Multiple("x", 0, "N"),)}, 5, 7, "a multiple of N = 7, not 40"),
    ],
)
def test_limits_may_depend_on_the_template(metal, limit, fits, exceeds, message):
    kernel = dataclasses.replace(AFFINE, **limit)
    sizes = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(40,)]}
    template = {"T": mx.float32, "N": fits, "NEGATE": True}
    kernel([X, SCALAR, BIAS], template=template, **sizes)
    with pytest.raises(KernelError, match=message):
        kernel([X, SCALAR, BIAS], template=template | {"N": exceeds}, **sizes)


def test_arrays_of_2_to_the_31_elements_need_a_kernel_that_says_so(metal):
    # Broadcast, so that it takes no memory.
    big = mx.broadcast_to(mx.array(0, mx.uint8), (2**16, 2**15))
    call = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(16,)]}
    with pytest.raises(KernelError, match=r"input x .* needs 64-bit offsets"):
        HISTOGRAM([big], **call)
    dataclasses.replace(HISTOGRAM, large=True)([big], **call)
    assert metal.called[0]["inputs"][0].shape == big.shape


LARGE_MEMORY = dataclasses.replace(GATHER, threadgroup_memory=40_000)
BACKENDS = ("host", "metal", "cuda")


@pytest.fixture
def every_backend(monkeypatch, metal):
    """Stand-ins for MLX's functions, and the host backend as it is."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", type(metal)())


@pytest.mark.parametrize("order", [BACKENDS, BACKENDS[::-1]], ids="-".join)
def test_what_is_checked_for_one_backend_is_not_used_on_another(every_backend, order):
    """CUDA has 48 KiB of threadgroup memory for a kernel, the others have 32."""
    kernel, x = dataclasses.replace(LARGE_MEMORY), mx.zeros(8)
    call = {"grid": (8, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(8,)]}
    for name in (*order, *order):
        with use_backend(name):
            for run in (kernel, kernel.bind):
                if name == "cuda":
                    run([x], template={"T": mx.float32}, **call)
                    continue
                with pytest.raises(KernelError, match=r"needs 40000 bytes .* there are 32768"):
                    run([x], template={"T": mx.float32}, **call)


def test_more_threadgroups_than_the_host_can_number():
    """2^32 of them would be none in 32 bits: nothing would run, and the output hold anything."""
    sizes = {"grid": (2**31 - 1, 3, 1), "threadgroup": (1, 1, 1), "output_shapes": [(16,)]}
    x = mx.zeros(16, mx.uint8)
    with use_backend("host"):
        for checked in (True, False):
            with (
                host.checks(checked),
                pytest.raises(BackendError, match=r"6442450941 threadgroups .* fewer than 2\^32"),
            ):
                HISTOGRAM([x], init_value=0, **sizes)
        with pytest.raises(BackendError, match="4294967296 threadgroups"):
            HISTOGRAM.bind([x], init_value=0, **sizes | {"grid": (2**16, 2**16, 1)})
    source = "kernel void k(device int* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {}"
    kernel = host.compile_source(source, "k", checked=False)
    with pytest.raises(BackendError, match=r"kernel k: grid .* fewer than"):
        kernel.run({0: bytearray(4)}, (2**16, 2**16, 1), (1, 1, 1), writes=[0])
