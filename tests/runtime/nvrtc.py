"""The text that MLX would generate of a CUDA kernel and give to its compiler."""

from collections.abc import Callable, Sequence
from typing import Any

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
