"""The graphs that MLX is given on an NVIDIA GPU, on machines without one: the same, never computed.

Kernels are chosen, bound and added to graphs as for an H200, but each is a ``Depends`` of MLX's: a
primitive of the same inputs that gives zeros. So a model decodes zeros, at the cost of its graph.
"""

import importlib
import io
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from decoding_model import QWEN2_7B
from devices import can_run
from machine import on_a_gpu
from mlx.utils import tree_map

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.decode import ahead, weights
from mlx_qlayers.runtime import backend, cuda_ahead
from mlx_qlayers.runtime.arena import beside
from mlx_qlayers.runtime.spec import Spec

# Primitives that only describe an array anew and start nothing.
_VIEWS = re.compile(
    r"Reshape|Transpose|Broadcast$|Slice$|ExpandDims|Squeeze|Flatten|Unflatten|AsStrided|Split|"
    r"StopGradient|CustomTransforms"
)
KERNEL = "Depends"
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
}


class Recorded(NamedTuple):
    """One launch of a kernel."""

    name: str  # the kernel's, on CUDA with a hash
    text: int  # how many characters MLX hashes for each launch
    inputs: list[Spec]
    outputs: list[Spec]
    marker: mx.array | None = None  # one input more, which tells it from others


@contextmanager
def recorded_gpu(device: str = "cuda", name: str = "sm_90") -> Iterator[list[Recorded]]:
    """Inside, the backend is ``cuda`` as on an H200, or that of an Apple GPU, ``applegpu_g16s``.

    The list gets each launch that is added.
    """
    seen: list[Recorded] = []

    def gpu_kernel(**declaration: Any) -> Callable[..., list[mx.array]]:
        name = declaration["name"]
        size = len(declaration["header"]) + len(declaration["source"])

        def launch(
            *,
            inputs: list[mx.array],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
            **_: Any,
        ) -> list[mx.array]:
            # MLX makes one constant of numbers that are equal, so these are like no other.
            marker, made = mx.array(len(seen) + 0.5), [*map(Spec, output_shapes, output_dtypes)]
            seen.append(Recorded(name, size, [*map(Spec.of, inputs)], made, marker))
            outputs = [zeros(tuple(each.shape), each.dtype) for each in made]
            return mx.depends(outputs, [*inputs, marker])

        return launch

    def like(x: mx.array, *others: Any, **_: Any) -> mx.array:
        (y,) = mx.depends([zeros(x.shape, x.dtype)], [x, *others])
        return y

    stock, export, exporting = mx.fast.rms_norm, mx.export_function, list[bool]()

    def norm(x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
        if exporting:
            return stock(x, weight, eps)
        return like(x, *([] if weight is None else [weight]))

    def exported(*arguments: Any) -> None:
        exporting.append(True)
        try:
            export(*arguments)
        finally:
            exporting.pop()

    backend.advance_epoch()  # plans may be there for another GPU
    facts = {"architecture": name, "device_name": name, "memory_size": 1 << 37}
    with pytest.MonkeyPatch.context() as patch, on_a_gpu(), cuda_ahead.nothing_compiled():
        can_run(patch, device)
        patch.setattr(mx, "device_info", lambda *_: facts)
        patch.setattr(mx, "export_function", exported)
        patch.setattr(mx.fast, f"{device}_kernel", gpu_kernel)
        patch.setattr(mx.fast, "rms_norm", norm)
        # As if they lay side by side: a buffer for the weights of a 7B would take gigabytes.
        patch.setattr(weights, "still_there", list)
        patch.setattr(weights, "side_by_side", lambda x: beside(x, zeros((8,), mx.uint64)))
        with use_backend(device):
            yield seen
            made_ready()


def made_ready() -> None:
    """Wait for the kernels of other batch sizes."""
    for thread in threading.enumerate():
        if thread.name == ahead.THREAD:
            thread.join()


def used(seen: list[Recorded], *outputs: mx.array) -> list[Recorded]:
    """The launches in the list that a graph has, in turn."""
    text, numbers = io.StringIO(), range(len(seen))
    for start in numbers[::1000]:  # as many names as a call takes
        names = {f"launch_{i}": seen[i].marker for i in numbers[start : start + 1000]}
        mx.export_to_dot(text, *outputs, **names)
    there = {*re.findall(r'"?launch_(\d+)"? ->', text.getvalue())}
    return [seen[i] for i in numbers if str(i) in there]


@lru_cache(maxsize=64)
def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros, evaluated."""
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array


def without_numbers(model: nn.Module, group_size: int = 64, bits: int = 4) -> nn.Module:
    """A quantized model in bfloat16 of zeros that take no memory."""

    def empty(x: mx.array) -> mx.array:
        return mx.broadcast_to(zeros((), x.dtype), x.shape)

    model.set_dtype(mx.bfloat16)
    model.update(tree_map(empty, model.parameters()))
    nn.quantize(model, group_size, bits)
    model.eval()
    model.update(tree_map(empty, model.parameters()))
    mx.eval(model.parameters())
    return model


def wide_model(name: str, **changes: Any) -> nn.Module:
    """A converted model as wide as one of 7B."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    config |= QWEN2_7B | MODELS[name] | changes
    model = without_numbers(module.Model(module.ModelArgs.from_dict(config)))
    convert_model(model, verify=False, calibrate=False)
    return model


def primitives(*outputs: mx.array) -> Counter[str]:
    """Those of a graph by name; kernels are :data:`KERNEL`."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return Counter(re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue()))


def starting(found: Counter[str]) -> int:
    """How many primitives of those start work on a device."""
    return sum(count for name, count in found.items() if not _VIEWS.match(name))
