"""A kernel's text and parameters, as ``mx.fast.metal_kernel`` takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# MLX passes inputs with fewer elements in the constant address space.
CONSTANT_BELOW = 8

# The name of a generated text in messages.
_CITED = re.compile(r"source\.metal:(\d+)(?::\d+)?")
_COOPERATIVE = re.compile(r"\b(simd_|quad_|simdgroup_|threadgroup_barrier)")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel function."""

    name: str
    type: str  # its type in MLX's spelling (`uint32_t`, `float16_t`), or a template parameter
    space: str = ""  # `"device"`, `"constant"` or `""`
    reference: bool = False  # whether it is a reference, so that its array is 0-d
    attribute: str = ""  # what `[[...]]` holds, such as `thread_position_in_grid`
    buffer: int | None = None  # the number in `[[buffer(...)]]`, which may be left out
    writable: bool = False
    atomic: bool = False
    padded: bool = False  # to 8 elements, lest MLX pass it as `constant`; not if the shape is read


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel's text and parameters; compares by identity, so that it can key a cache."""

    name: str  # the kernel's name, without MLX's prefix
    header: str  # what the body uses, as MLX's `header`
    source: str  # the body, as MLX's `source`
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    # Their parameters, in order; types of outputs are without `atomic<...>`.
    inputs: tuple[Parameter, ...] = ()
    outputs: tuple[Parameter, ...] = ()
    # Names and kinds (`"typename"`, `"int"` or `"bool"`) of the template's parameters.
    template: tuple[tuple[str, str], ...] = ()
    atomic_outputs: bool = False  # every output is an `atomic<...>`
    ensure_row_contiguous: bool = True  # inputs are copied where they are not contiguous
    # Where the lines of `header` and `source` come from, as `"exp.metal:12"`.
    file_lines: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @cached_property
    def cooperative(self) -> bool:
        """Whether threads exchange data, so that the grid must be whole threadgroups."""
        return bool(_COOPERATIVE.search(self.header + self.source))

    def cite(self, message: str, text: str) -> str:
        """A compiler's message with the lines of the user's file for those of a generated text."""
        header, body = self.file_lines
        start = text.count("\n", 0, text.index(self.source, len(self.header)))

        def replaced(match: re.Match[str]) -> str:
            line = int(match[1]) - 1
            if line < len(header):
                return header[line]
            # MLX's parameter list in front of the body, and the instantiation behind it, have none.
            return body[min(max(line - start, 0), len(body) - 1)] if body else match[0]

        return _CITED.sub(replaced, message)
