"""Where kernels of tensor operations run, and what is said where they do not."""

import os
import re
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_qlayers.runtime import tensor_ops
from mlx_qlayers.runtime.macos import macos_version

TENSOR, CODES = "__HAVE_TENSOR__", "__HAVE_INT4B_FORMAT_TYPE__"


def compiling(macros):
    """In the place of MLX's function, a compiler that defines these."""

    def metal_kernel(*, header, **_):
        defined = any(f"defined({macro})" in header for macro in macros)
        return lambda **_: [mx.array([defined])]

    return metal_kernel


@pytest.mark.parametrize(
    ("gpu", "system", "macros", "why", "no_codes"),
    [
        ("applegpu_g17s", "25.2.0", [TENSOR], None, "macOS is 26.2, not 26.4"),
        ("applegpu_g17s", "25.4.0", [TENSOR], None, "no uint4b_format"),
        ("applegpu_g18p", "26.0.0", [TENSOR, CODES], None, None),
        ("applegpu_g17p", "25.2.0", [TENSOR], "applegpu_g17p.*M5", "M5"),
        ("applegpu_g16s", "25.4.0", [TENSOR, CODES], "applegpu_g16s.*M5", "M5"),
        ("AMD", "25.4.0", [TENSOR], "the device is AMD", "the device is AMD"),
        ("applegpu_g17g", "25.1.0", [TENSOR], "macOS is 26.1", "macOS is 26.1, not 26.2"),
        ("applegpu_g17g", "25.4.0", [], "has no <MetalPerformancePrimitives", "has no <Metal"),
    ],
)
def test_gates(gpu, system, macros, why, no_codes, machine, monkeypatch):
    machine.apple(gpu, system)
    monkeypatch.setattr(mx.fast, "metal_kernel", compiling(macros))
    for expected, found in ((why, tensor_ops.missing()), (no_codes, tensor_ops.missing_codes())):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert re.search(expected, str(found))


@pytest.mark.parametrize(
    ("darwin", "macos"),
    [("22.6.0", (13, 6)), ("24.6.0", (15, 6)), ("25.0.0", (26, 0)), ("26.1.0", (27, 1))],
)
def test_the_kernel_says_which_macos_this_is(darwin, macos, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=darwin))
    assert macos_version() == macos


def test_no_apple_gpu(machine):
    machine.gpu(None, {})
    assert tensor_ops.missing() == "the device is cpu, and matrix units come with the M5"
