"""The Metal source that ``mx.fast.metal_kernel`` generates, generated here.

Backends that compile Metal themselves need the text that MLX would give to Apple's compiler, on
machines where MLX does not make it. The tests hold it against what ``mx.export_function`` records,
byte for byte.

Source: ``mlx/backend/common/metal_kernel.cpp`` of MLX 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .program import CONSTANT_BELOW, Program
from .spec import Spec

# The attributes that MLX offers and their types, in the order of its parameter list.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# Parameters that follow an input where the body asks for it, in MLX's order: suffix, type.
SHAPE_WORDS = (("_shape", "int*"), ("_strides", "int64_t*"), ("_ndim", "int&"))

_INTEGERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_SIZED = *_INTEGERS, "float16", "bfloat16", "complex64"
TYPES: dict[mx.Dtype, str] = {getattr(mx, name): f"{name}_t" for name in _SIZED}
TYPES |= {mx.bool_: "bool", mx.float32: "float"}


# The facts of an input that the text depends on: its type, whether it is 0-d, whether it is small.
_Input = tuple[str, bool, bool]


def generate(
    program: Program,
    inputs: Sequence[mx.array | Spec],
    template: Sequence[tuple[str, bool | int | mx.Dtype]],
    output_dtypes: Sequence[mx.Dtype],
) -> tuple[str, str]:
    """The name of the kernel function and the whole text, without MLX's preamble."""
    padded = [parameter.padded for parameter in program.inputs] or [False] * len(inputs)
    kinds = tuple(
        (TYPES[x.dtype], x.ndim == 0 and not pad, x.size < CONSTANT_BELOW and not pad)
        for x, pad in zip(inputs, padded, strict=True)
    )
    of = {bool: "bool", int: "int"}
    declared = ", ".join(f"{of.get(type(value), 'typename')} {name}" for name, value in template)
    values = ", ".join(
        TYPES[value] if isinstance(value, mx.Dtype) else str(int(value)) for _, value in template
    )
    return _generated(program, kinds, declared, values, tuple(TYPES[d] for d in output_dtypes))


@lru_cache(maxsize=1024)
def _generated(
    program: Program,
    kinds: tuple[_Input, ...],
    declared: str,
    values: str,
    outputs: tuple[str, ...],
) -> tuple[str, str]:
    """The name and the text, which launches share: each would hold 10 KB of its own."""
    name = f"custom_kernel_{program.name}"
    if values:
        name += "__" + values.replace(", ", "_")
    for kind, scalar, constant in kinds:
        name += f"_{kind}" + ("s" if scalar else "c" if constant else "")
    name += "".join(f"_{kind}" for kind in outputs)

    text = program.header
    if values:
        text += f"template <{declared}>\n"
    text += f"[[kernel]] void {name}(\n"
    text += _parameters(program, kinds, outputs)
    text += program.source + "\n}\n"
    if values:
        instance = f"{name}<{values}>"
        text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return name, text


def _parameters(program: Program, inputs: Sequence[_Input], outputs: Sequence[str]) -> str:
    """The parameter list up to and including the brace that opens the body."""
    lines, index = [], 0
    for name, (kind, scalar, constant) in zip(program.input_names, inputs, strict=True):
        space, mark = "constant" if constant else "device", "&" if scalar else "*"
        lines.append(f"  const {space} {kind}{mark} {name} [[buffer({index})]],\n")
        index += 1
        for word in () if scalar else shape_words(program.source, name):
            lines.append(f"  const constant {word} [[buffer({index})]],\n")
            index += 1
    used = [attribute for attribute in ATTRIBUTES if attribute in program.source]
    last = len(inputs) + len(outputs) - 1
    for name, kind in zip(program.output_names, outputs, strict=True):
        kind_text = f"atomic<{kind}>" if program.atomic_outputs else kind
        # MLX compares with the number of arrays, which leaves out the shape words: without an
        # attribute it closes the list early. Kernels here always use one.
        end = ",\n" if index < last or used else ") {\n"
        lines.append(f"  device {kind_text}* {name} [[buffer({index})]]{end}")
        index += 1
    attributes = (f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in used)
    return "".join(lines) + ",\n".join(attributes) + (") {\n" if used else "")


def shape_words(source: str, name: str) -> list[str]:
    """The shape arguments that MLX declares behind an input whose names it finds in the body."""
    return [f"{kind} {name}{suffix}" for suffix, kind in SHAPE_WORDS if name + suffix in source]
