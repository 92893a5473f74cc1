"""The table of examples: of each operation its calls, and what is expected of them.

Sound calls are those of the package's own table, which doctor and the sanitizer run as well. The
modules of this package add what needs NumPy: awkward and random calls, held against float64, and
invalid ones with their messages.
"""

from functools import partial

import mlx.core as mx

from mlx_qlayers.commands.example import Example, mapped
from mlx_qlayers.commands.examples import examples, families
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
from tests.examples.calls import Random
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

# Calls of public operations by name, but for those that are large to be fast on a GPU.
MOST = 1 << 17
CALLS: dict[str, Example] = {
    example.name: example
    for family in families()
    for example in examples(family)
    if not isinstance(example.function, partial) and sum(a.size for a in example.arrays) < MOST
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
_FACTORS = "cholesky", "cholesky_inv", "cho_solve", "solve_triangular", "qr", "gptq"
# Small calls with all arguments of operations.
SOUND: dict[str, Example] = {
    f"{name} {i}": Example(
        f"{name} {i}",
        calls.function,
        calls.sound(i) if name in _FACTORS else mapped(_random, calls.sound(i)),
    )
    for name, calls in OPERATIONS.items()
    for i in range(len(calls.arguments))
}
