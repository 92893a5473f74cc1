"""The table of examples: of each operation its calls, and what is expected of them.

Sound calls are those of the package's own table, which doctor and the sanitizer run as well, and
changes to them. The modules of this package add what needs NumPy: awkward and random calls, held
against float64, and invalid ones with their messages.
"""

import mlx.core as mx

from mlx_qlayers.commands.example import Example, mapped
from tests.examples import (
    adapters,
    elements,
    experts,
    factors,
    fused,
    heads,
    integers,
    losses,
    products,
    recurrent,
    rounding,
    sampled,
)
from tests.examples.calls import SHIPPED, Random
from tests.examples.invalid import OPERATIONS

MODULES = adapters, elements, experts, factors, fused, heads, integers, losses, products
MODULES += recurrent, rounding, sampled
# Random and awkward calls by operation.
RANDOM: dict[str, Random] = {
    name.lower(): each
    for module in MODULES
    for name, each in vars(module).items()
    if isinstance(each, Random)
}


def is_float(array: mx.array) -> bool:
    """Whether an array holds floating-point numbers."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


def in_float32(arrays: list[mx.array]) -> list[mx.array]:
    """Arrays whose floating-point numbers are float32."""
    return [a.astype(mx.float32) if is_float(a) else a for a in arrays]


def _random(array: mx.array) -> mx.array:
    mx.random.seed(array.size)
    return mx.random.normal(array.shape).astype(array.dtype) if is_float(array) else array


# Of these no matrix is one of random numbers.
_FACTORS = "cholesky_inv", "cho_solve", "gptq"
# Sound calls of public operations, those of the package and further ones.
CALLS: dict[str, Example] = SHIPPED | {
    f"{name} {i}": Example(
        f"{name} {i}",
        calls.function,
        change if name in _FACTORS else calls.arguments[0] | mapped(_random, change),
    )
    for name, calls in OPERATIONS.items()
    for i, change in enumerate(calls.more)
}
