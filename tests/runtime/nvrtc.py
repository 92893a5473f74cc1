"""The text that MLX would generate of a CUDA kernel and give to its compiler."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_qlayers.runtime import cuda_ahead


def kernel_that(run: Callable[..., list[mx.array]]) -> Callable[..., Any]:
    """A stand-in for ``mx.fast.cuda_kernel``: every launch calls run(declaration, launch)."""

    def cuda_kernel(**declaration: Any) -> Callable[..., list[mx.array]]:
        return lambda **launch: run(declaration, launch)

    return cuda_kernel


def text_of(declaration: dict[str, Any], launch: dict[str, Any]) -> tuple[str, str]:
    """The qualified name and the text that MLX 0.32 generates and compiles for one launch."""
    name = declaration["name"]
    text = cuda_ahead.mlx_text(
        name,
        declaration["header"],
        declaration["source"],
        list(zip(declaration["input_names"], launch["inputs"], strict=True)),
        list(zip(declaration["output_names"], launch["output_dtypes"], strict=True)),
    )
    return f"mlx::core::cu::custom_kernel_{name}", text
