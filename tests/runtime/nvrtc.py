"""Compiles CUDA kernels without a GPU: the text that MLX would generate, given to NVRTC.

Needs ``pip install nvidia-cuda-nvrtc cuda-bindings`` and, in ``NVRTC_INCLUDES``, separated by
colons, MLX's sources (for ``mlx/backend/cuda/device``), CUDA's headers and CCCL's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_qlayers.runtime import cuda_ahead

# How MLX spells these in a kernel's name.
_SUFFIXES = {mx.float32: "float", mx.bool_: "bool"}


def mlx_text(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]] = (),
) -> tuple[str, str]:
    """The kernel's qualified name and the text that MLX 0.32 generates and compiles."""
    constants = ""
    for key, value in template:
        if isinstance(value, bool):
            constants += f"  constexpr bool {key} = {str(value).lower()};\n"
            name += "_t" if value else "_f"
        elif isinstance(value, int):
            constants += f"  constexpr int {key} = {value};\n"
            name += f"_{value}"
        else:
            constants += f"  using {key} = {cuda_ahead.type_name(value)};\n"
            name += "_" + _SUFFIXES.get(value, str(value).removeprefix("mlx.core.") + "_t")
    body = constants + ("\n" if template else "") + source
    return f"mlx::core::cu::custom_kernel_{name}", cuda_ahead.mlx_text(
        name, header, body, inputs, outputs
    )


def compile_text(name: str, text: str, *, ptx: bool = False) -> bytes:
    """Compile for the H200 as MLX does, to machine code or PTX.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    from cuda.bindings import nvrtc

    def call(function: Callable[..., Any], *args: Any) -> Any:
        error, *result = function(*args)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {error}")
        return result[0] if result else None

    program = call(nvrtc.nvrtcCreateProgram, text.encode(), b"kernel.cu", 0, [], [])
    call(nvrtc.nvrtcAddNameExpression, program, name.encode())
    options = ["--device-as-default-execution-space"]
    options.append(f"--gpu-architecture={'compute' if ptx else 'sm'}_90a")
    options += [f"--include-path={p}" for p in os.environ.get("NVRTC_INCLUDES", "").split(":") if p]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
        call(nvrtc.nvrtcGetProgramLog, program, log)
        raise RuntimeError(f"{name}: {log.decode().rstrip(chr(0))}")
    kind = "PTX" if ptx else "CUBIN"
    binary = bytes(call(getattr(nvrtc, f"nvrtcGet{kind}Size"), program))
    call(getattr(nvrtc, f"nvrtcGet{kind}"), program, binary)
    return binary


def kernel_that(run: Callable[..., list[mx.array]]) -> Callable[..., Any]:
    """A stand-in for ``mx.fast.cuda_kernel``: every launch calls run(declaration, launch)."""

    def cuda_kernel(**declaration: Any) -> Callable[..., list[mx.array]]:
        return lambda **launch: run(declaration, launch)

    return cuda_kernel


def text_of(declaration: dict[str, Any], launch: dict[str, Any]) -> tuple[str, str]:
    """The text of one launch of a kernel declared through :func:`kernel_that`."""
    return mlx_text(
        declaration["name"],
        declaration["header"],
        declaration["source"],
        list(zip(declaration["input_names"], launch["inputs"], strict=True)),
        list(zip(declaration["output_names"], launch["output_dtypes"], strict=True)),
        launch["template"],
    )


@contextmanager
def compile_only() -> Iterator[dict[str, str]]:
    """Inside, launches on the ``cuda`` backend are compiled and give zeros; errors are collected.

    Yields:
        The texts seen so far; each maps to the compiler's messages, or to an empty string.

    Example:
        >>> with compile_only() as seen, use_backend("cuda"):
        ...     quantized_matmul(x, *mx.quantize(w))
        >>> assert not any(seen.values())
    """
    seen: dict[str, str] = {}

    def run(declaration: dict[str, Any], launch: dict[str, Any]) -> list[mx.array]:
        name, text = text_of(declaration, launch)
        if text not in seen:
            try:
                compile_text(name, text)
                seen[text] = ""
            except RuntimeError as error:
                seen[text] = str(error)
        shapes = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    with (
        mock.patch.object(mx.fast, "cuda_kernel", kernel_that(run)),
        mock.patch.dict("mlx_qlayers.runtime.backend.missing", {"cuda": lambda: None}),
    ):
        yield seen
