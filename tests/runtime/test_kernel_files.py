"""Kernels in files and in texts: where they are looked up, and what errors cite."""

import dataclasses
import importlib
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.kernel import Kernel, KernelError

from .test_kernel import X

COPY = """[[kernel]] void copy(
    const device float* x, device float* y, uint i [[thread_position_in_grid]]) {
  y[i] = x[i + OFFSET];
}
"""


def copy(kernel, x):
    sizes = {"grid": (x.size, 1, 1), "threadgroup": (x.size, 1, 1), "output_shapes": [x.shape]}
    with use_backend("host"), host.checks():
        return kernel([x], **sizes)[0]


def test_a_kernel_may_be_given_as_text():
    kernel = Kernel("copy", COPY.replace("OFFSET", "0"), ("x",), ("y",))
    assert mx.array_equal(copy(kernel, X), X)
    short = "kernel void one(device int* y, uint i [[thread_position_in_grid]]) { y[i] = 1; }"
    assert Kernel("one", short, (), ("y",)).program.source.endswith("\ny[i]=1;")
    with pytest.raises(KernelError, match=r"kernel other: other\.metal has no kernel 'other'"):
        Kernel("other", short, (), ("y",)).program  # noqa: B018


def test_a_file_is_beside_the_one_that_declares_the_kernel(tmp_path, monkeypatch):
    """Or in the working directory; a plain name is one of the package's own first."""
    folder, cwd = tmp_path / "module", tmp_path / "cwd"
    for each, text in ((folder, COPY.replace("OFFSET", "0")), (cwd, COPY)):
        each.mkdir()
        (each / "copy.metal").write_text(text)
        (each / "exp").mkdir()
        (each / "exp/exp.metal").write_text(COPY)
    (cwd / "there.metal").write_text(COPY)
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from mlx_qlayers.runtime import Kernel\n"
        "def declare(name, file):\n"
        "    return Kernel(name, file, ('x',), ('y',))\n"
    )
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(folder)
    declare = importlib.import_module("mine").declare
    for file in ("copy.metal", Path("copy.metal"), folder / "copy.metal"):
        assert declare("copy", file).program.source.endswith("y[i]=x[i+0];")
    replaced = dataclasses.replace(declare("copy", "copy.metal"), name="copy")
    assert replaced.program.source.endswith("[i+0];")
    for file in ("there.metal", Path("there.metal")):
        assert "OFFSET" in declare("copy", file).program.source
    assert declare("copy", Path("exp/exp.metal")).program
    with pytest.raises(KernelError, match=r"exp.metal has no kernel 'copy', only exp_forward"):
        declare("copy", "exp/exp.metal").program  # noqa: B018
    given = Kernel("copy", "copy.metal", ("x",), ("y",), folder=cwd)
    assert "OFFSET" in given.program.source
    with pytest.raises(KernelError, match=r"No such file: no.metal, looked up in .*module.*cwd"):
        declare("copy", Path("no.metal")).program  # noqa: B018


def test_faults_and_errors_of_the_compiler_cite_the_file(tmp_path):
    text = "// Its contract.\n\n#include <metal_stdlib>\n/* and\nmore */\n" + COPY
    (tmp_path / "copy.metal").write_text(text.replace("OFFSET", "1"))
    kernel = Kernel("copy", tmp_path / "copy.metal", ("x",), ("y",))
    with pytest.raises(host.OutOfBounds, match=r"\(kernel copy, .* at copy\.metal:8\)") as caught:
        copy(kernel, X)
    assert caught.value.place.line == "copy.metal:8"
    (tmp_path / "copy.metal").write_text(text.replace("OFFSET", "nowhere"))
    kernel = Kernel("copy", tmp_path / "copy.metal", ("x",), ("y",))
    with pytest.raises(host.CompileError, match=r"^kernel copy: copy\.metal:8: error: .*'nowhere'"):
        copy(kernel, X)
    kernel = Kernel("copy", text.replace("OFFSET", "double(1)"), ("x",), ("y",))
    with pytest.raises(host.CompileError, match=r"copy\.metal:8: double does not exist in Metal"):
        copy(kernel, X)
