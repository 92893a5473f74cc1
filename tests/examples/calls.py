"""The record of an operation in the table: sound calls, invalid ones, random ones by float64."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.commands.example import Example
from mlx_qlayers.commands.examples import examples, families
from mlx_qlayers.ops.signature import Signature
from mlx_qlayers.runtime import trace
from tests.examples import arrays
from tests.gpus import STAND_INS
from tests.numerics import behind_one, random, to64

Numbers = dict[str, np.ndarray]
BACKENDS = ("host", "checked", *STAND_INS, "cuda", "metal")


class Call(NamedTuple):
    """A call, and what float64 makes of it."""

    function: Callable[..., Any]  # an operation, or a layer that calls one
    arrays: dict[str, mx.array | None]  # arguments that are arrays or None, by name
    options: dict[str, Any]  # the others
    shape: tuple[int, ...]  # of the first result
    # From numbers in float64 or float32, cotangents, and whether MLX's operators compute: results
    # by their place and gradients by their names, so exactly; and the terms of each for `compare`.
    expected: Callable[[Numbers, list[np.ndarray], bool], tuple[Numbers, Numbers]]
    gradients: Sequence[str] = ()  # names of the arrays that are differentiated
    by_kernel: bool = True  # whether a kernel takes the call, so that a backend can be forced
    dtypes: Sequence[mx.Dtype] = ()  # of the results; the last one is that of all others
    holds: Callable[[list[mx.array]], None] = lambda _: None  # raises unless results are right

    def check(self, backend: str, what: str = "") -> tuple[list[mx.array], list[str]]:
        """Hold results and gradients against float64, and float32 rounded once.

        Returns:
            The results, and the names of the kernels that were launched.
        """
        if not self.by_kernel and backend in BACKENDS:
            backend = "auto"
        names = [name for name in self.gradients if self.arrays[name] is not None]
        inputs, rng = [self.arrays[name] for name in names], np.random.default_rng(1)

        def run(*given: mx.array) -> list[mx.array]:
            changed = self.arrays | dict(zip(names, given, strict=True))
            found = self.function(**changed, **self.options)
            return [found] if isinstance(found, mx.array) else list(found)

        with arrays.running(backend), trace() as launches:
            outputs = run(*inputs)
            up = [random(rng, y.shape, y.dtype) for y in outputs] if names else []
            if backend not in ("host", "auto"):  # as a view
                up = [behind_one(y) for y in up]
            gradients = mx.vjp(run, inputs, up)[1] if names else []
            mx.eval(outputs, gradients)
        assert outputs[0].shape == self.shape, f"{outputs[0].shape}, not {self.shape}: {what}"
        assert backend not in BACKENDS or launches, f"no kernel: {what}"
        for y, array in zip(gradients, inputs, strict=True):
            assert (y.shape, y.dtype) == (array.shape, array.dtype), what
        dtypes = self.dtypes or [next(a for a in self.arrays.values() if a is not None).dtype]
        for i, y in enumerate(outputs):
            assert y.dtype == dtypes[min(i, len(dtypes) - 1)], f"result {i}: {y.dtype}: {what}"
        kernels = [launch.kernel for launch in launches]
        if not outputs[0].size:
            return outputs, kernels
        with np.errstate(all="ignore"):
            self.holds(outputs)
            (truth, terms), (rough, _) = (
                self.expected(
                    {n: to64(a).astype(kind) for n, a in self.arrays.items() if a is not None},
                    [to64(y).astype(kind) for y in up],
                    backend in ("reference", "auto"),
                )
                for kind in (np.float64, np.float32)
            )
        found = dict(zip(map(str, range(len(outputs))), outputs, strict=True))
        for name, y in (found | dict(zip(names, gradients, strict=True))).items():
            if name in truth:
                arrays.compare(y, truth[name], rough[name], terms[name], f"{name} of {what}")
        return outputs, kernels


class Random(NamedTuple):
    """Random calls of an operation, and awkward ones."""

    fields: dict[str, Any]  # values of which a case has one, the first if plain; or a strategy too
    build: Callable[[SimpleNamespace, np.random.Generator], Call]  # of a case and its backend
    awkward: Sequence[dict[str, Any]] = ({},)  # changes to a plain case, for all backends
    examples: int = 20  # of how many random cases the suite takes

    @property
    def cases(self) -> st.SearchStrategy[SimpleNamespace]:
        """All that a fuzzer takes."""
        fields = {
            name: values[1] if _is_pair(values) else st.sampled_from(list(values))
            for name, values in self.fields.items()
        }
        return st.builds(
            SimpleNamespace, **fields, seed=arrays.SEEDS, layouts=_LAYOUTS, backend=arrays.BACKENDS
        )

    def case(self, backend: str, seed: int = 0, **changes: Any) -> SimpleNamespace:
        """A plain case but for changes."""
        plain = {n: v[0] if _is_pair(v) else next(iter(v)) for n, v in self.fields.items()}
        given = plain | {"layouts": ("dense",) * 9, "seed": seed, "backend": backend}
        return SimpleNamespace(**given | changes)

    def call(self, backend: str, seed: int = 0, **changes: Any) -> Call:
        """The call of a plain case but for changes."""
        return self.build(self.case(backend, seed, **changes), np.random.default_rng(seed))

    def check(self, case: SimpleNamespace) -> None:
        """Hold a case against float64."""
        self.build(case, np.random.default_rng(case.seed)).check(case.backend, f"{case}")


def declared(*signatures: Signature) -> dict[str, Any]:
    """Fields of the flags and the strings to choose from that signatures declare."""
    given = [argument for each in signatures for argument in each.arguments]
    kinds = {a.name: a.choices or (False, True) * (a.kind == "flag") for a in given}
    return {name: [*values] for name, values in kinds.items() if values}


_LAYOUTS = st.tuples(*[arrays.LAYOUTS] * 9)


def _is_pair(values: Any) -> bool:
    return (
        isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], st.SearchStrategy)
    )


# The package's calls of public operations, but for those that are large to be fast on a GPU.
_MOST = 1 << 17
SHIPPED: dict[str, Example] = {
    example.name: example
    for family in families()
    for example in examples(family)
    if not isinstance(example.function, partial) and sum(a.size for a in example.arrays) < _MOST
}


class Calls(NamedTuple):
    """Calls of an operation beside those of the package's table."""

    function: Callable[..., Any]  # the operation
    invalid: list[tuple[dict[str, Any], str]]  # changes to its first sound call, and what is said
    more: Sequence[dict[str, Any]] = ()  # sound ones, as changes to the package's first, or whole

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Those of all sound calls."""
        shipped = [e.arguments for e in SHIPPED.values() if e.function is self.function]
        return shipped + [{**(shipped or [{}])[0], **change} for change in self.more]

    def sound(self, number: int = 0) -> dict[str, Any]:
        """All arguments of a sound call."""
        parameters = signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
        return defaults | self.arguments[number % len(self.arguments)]
