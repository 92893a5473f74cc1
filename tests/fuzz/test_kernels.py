"""Texts of kernels that were damaged, and launches as they should not be."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from mlx_qlayers.ops import exp
from mlx_qlayers.runtime.host import CompileError
from mlx_qlayers.runtime.kernel import Kernel, KernelError
from tests.examples.arrays import JUNK, changes, running, spoilt
from tests.fuzz.target import fuzz

_FILES = [
    Path(exp.__file__).with_name("exp.metal"),
    Path(__file__).parents[1] / "runtime" / "kernels.metal",
]
_EXP = _FILES[0].read_text()
_NAMES = {"exp_forward": _FILES[0], "exp_gradient": _FILES[0], "affine": _FILES[1]}
_WORDS = [
    *["template", "<", ">", "(", ")", "{", "}", "[", "]", "[[", "]]", ";", ",", '"', "'", "/*"],
    *["//", "#define A", "#include <metal_stdlib>", '#include "exp.metal"', "\n", "\\", "kernel"],
    *["namespace", "using", "constant", "threadgroup", "device", "operator", "enum", "struct"],
    *["typename T", "int N", "0", "1e9", "0x", "x", "y", "T", "uint", "buffer(0)", "\u00e9"],
    *["thread_position_in_grid", "metal::", "static_assert(false)", "T T", "asm", "#pragma once"],
]


_KINDS = st.sampled_from(["insert", "delete", "replace", "cut"])
_EDIT = st.tuples(st.floats(0, 1), _KINDS, st.sampled_from(_WORDS))


def _edited(text: str, edits: tuple[tuple[float, str, str], ...]) -> str:
    words = re.findall(r"\w+|\s+|.", text)
    for share, kind, word in edits:
        at = int(share * len(words))
        if kind == "cut":
            words = words[:at]
        else:
            words[at : at + (kind != "insert")] = [word] * (kind != "delete")
    return "".join(words)


@fuzz(
    st.builds(
        SimpleNamespace,
        name=st.sampled_from(sorted(_NAMES)),
        edits=st.lists(_EDIT, max_size=4).map(tuple),
        compiled=st.sampled_from([True] + [False] * 19),
    ),
    examples=30,
    seconds=3,
)
def test_kernel_texts(case: SimpleNamespace) -> None:
    text = _edited(_NAMES[case.name].read_text(), case.edits) + "\n{}"[: 1 if case.edits else 0]
    options: dict[str, Any] = {"inputs": ("x",), "outputs": ("y",), "template": ("T",)}
    if case.name == "exp_gradient":
        options |= {"inputs": ("dy", "y"), "outputs": ("dx",)}
    if case.name == "affine":
        options |= {"inputs": ("x", "a", "b"), "template": ("T", "N", "NEGATE")}
    folder = _NAMES[case.name].parent
    kernel = Kernel(case.name, text, **options, folder=folder)
    try:
        assert kernel.program and kernel.program_with_health
        if case.compiled and case.name != "affine":
            _compile(kernel)
    except KernelError as error:
        assert case.name in str(error)
    except CompileError as error:
        assert case.name in str(error)


def _compile(kernel: Kernel) -> None:
    """Bind a launch, which compiles, and do not run it: what it would do is anybody's guess."""
    with running("host"):
        kernel.bind(
            [mx.ones(64)] * len(kernel.inputs),
            template={"T": mx.float32},
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)],
        )


ARGUMENTS = ["grid", "threadgroup", "output_shapes", "template", "output_dtypes", "init_value"]
_PARTS = ["x", "T", "grid", "threadgroup", "shape"]
_KERNEL = Kernel("exp_forward", _EXP, ("x",), ("y",), template=("T",))


@fuzz(
    st.builds(
        SimpleNamespace,
        changes=st.one_of(st.just({}), changes(["inputs", *ARGUMENTS])),
        sizes=st.dictionaries(st.sampled_from(_PARTS), JUNK, max_size=2),
    ),
    examples=80,
)
def test_launches(case: SimpleNamespace) -> None:
    sizes = {"x": mx.ones(64), "T": mx.float32, "grid": 64, "threadgroup": 32, "shape": 64}
    sizes = spoilt(sizes, case.sizes)
    arguments = {
        "inputs": [sizes["x"]],
        "template": {"T": sizes["T"]},
        "output_dtypes": None,
        "grid": (sizes["grid"], 1, 1),
        "threadgroup": (sizes["threadgroup"], 1, 1),
        "output_shapes": [(sizes["shape"],)],
        "init_value": None,
    }
    arguments = spoilt(arguments, case.changes)
    with running("checked"):
        try:
            (y,) = _KERNEL(arguments.pop("inputs"), **arguments)
        except (KernelError, TypeError, ValueError):
            return
        except Exception as error:
            # A grid beyond the arrays is the caller's fault, and named.
            assert type(error).__name__ in ("OutOfBounds", "Uninitialised", "Race"), error
            return
        mx.eval(y)
