"""Operations whose arguments one signature declares, and arguments that are drawn from it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_qlayers.ops import (
    add_low_rank,
    attention,
    attention_checks,
    experts,
    gated_delta,
    latent_attention,
    linalg,
    linear_cross_entropy,
    rotary,
)
from mlx_qlayers.ops import exp as elementwise
from mlx_qlayers.ops import swiglu as gates
from mlx_qlayers.ops.signature import FLOATS, Signature
from mlx_qlayers.options import Router
from tests.numerics import random

# Sizes of what a letter stands for, and numbers that all bounds allow.
SIZES = (1, 1, 2, 3, 4, 6, 8)
VALUES = {"int": (1, 7, 2**40), "number": (0.5, 0.125), "flag": (True, False)}
_INTEGERS = (mx.int32, mx.int64, mx.uint32, mx.uint8)


class Declared(NamedTuple):
    """An operation, its signature, what else it takes, sizes of letters that go with that, and
    whether results of random numbers are compared: no factors of what may be nearly singular.
    """

    function: Callable[..., Any]
    signature: Signature
    more: Mapping[str, Any] = MappingProxyType({})
    sizes: Mapping[str, int] = MappingProxyType({})
    compared: bool = True

    def drawn(self, rng: np.random.Generator) -> dict[str, Any]:
        """Arguments that fit, by trial: shapes, dtypes, numbers, and which of them are None."""
        for _ in range(5000):
            sizes = {"1": 1, **self.sizes}
            values: dict[str, Any] = {}
            kind = FLOATS[rng.integers(3)]
            mixed = rng.integers(2)
            for argument in self.signature.arguments:
                if argument.optional and rng.integers(2):
                    values[argument.name] = None
                elif argument.is_array:
                    kind = FLOATS[rng.integers(3)] if mixed else kind
                    values[argument.name] = _array(argument, sizes, values, kind, rng)
                else:
                    several = argument.choices or VALUES[argument.kind]
                    values[argument.name] = several[rng.integers(len(several))]
            if self.refused(values) is None:
                return values
        raise AssertionError("nothing fits")

    def refused(self, values: dict[str, Any]) -> str | None:
        """The signature's message about these arguments, if there is one."""
        try:
            self.signature.check(*values.values())
        except ValueError as error:
            return str(error)
        return None

    def __call__(self, **values: Any) -> Any:
        """The operation's results."""
        return self.function(**values, **self.more)


def _array(
    argument: Any,
    sizes: dict[str, int],
    values: dict[str, Any],
    kind: mx.Dtype,
    rng: np.random.Generator,
) -> mx.array:
    tokens = argument.shapes and argument.shapes[rng.integers(len(argument.shapes))]
    shape = []
    for token in tokens:
        if not token.strip("*.").isidentifier() and not token.isdigit() and "|" not in token:
            shape.append(eval(token, {}, sizes) if token != "..." else 2)  # as 2 * L
        else:
            name = token.split("|")[-1]
            shape.append(int(sizes.setdefault(name, rng.choice(SIZES))))
    kinds = argument.kind.split("|")
    name = kinds[rng.integers(len(kinds))]
    if name == "bool":
        return mx.array(rng.random(shape) < 0.8)
    if name == "integer" or name.startswith("int"):
        of = mx.int32 if name == "int32" else _INTEGERS[rng.integers(4)]
        return mx.array(rng.integers(0, 1 if name == "int32" else 2, shape), of)
    given = values[name].dtype if name in values else mx.float32 if name == "float32" else kind
    return random(rng, shape, given)


DECLARED = [
    Declared(add_low_rank.add_low_rank, add_low_rank._TAKES),
    Declared(elementwise.exp, elementwise._TAKES),
    Declared(gates.swiglu, gates._TAKES),
    Declared(rotary.rotary_embedding, rotary._TAKES, {"dims": 2}, {"D": 4}),
    Declared(gated_delta.gated_delta, gated_delta._TAKES),
    Declared(latent_attention.latent_attention, latent_attention._TAKES),
    Declared(attention.attention, attention_checks._TAKES),
    Declared(linalg.solve_triangular, linalg._SYSTEM, compared=False),
    Declared(linalg.subtract_product, linalg._DIFFERENCE),
    Declared(linalg.cholesky, linalg._SQUARE, {"check": False}, compared=False),
    Declared(linalg.cholesky_inv, linalg._FACTOR, compared=False),
    Declared(linalg.qr, linalg._MATRICES, compared=False),
    Declared(experts.experts_chosen, experts._LOGITS, {"router": Router(1)}),
    Declared(
        linear_cross_entropy.linear_cross_entropy,
        linear_cross_entropy._TAKES,
        {"scales": None, "biases": None},
    ),
]
