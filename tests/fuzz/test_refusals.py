"""Calls of every operation as they should not be: taken by all backends, or refused by all."""

from functools import partial
from types import SimpleNamespace

from hypothesis import strategies as st

from mlx_qlayers.formats import Format
from mlx_qlayers.options import PackedMatrix, Rotation, Router
from tests.examples import arrays
from tests.examples.invalid import OPERATIONS
from tests.fuzz.target import fuzz

# Values in an argument that is more than an array.
FIELDS = (PackedMatrix, Format, Rotation, Router)
PARTS = [name for kind in FIELDS for name in kind._fields] + ["matrices", "q_norm", "k_norm"]


# Composed of others, which refuse; or none of whose arrays may be empty.
LEFT_OUT = {"cholesky_inv", "gptq", "experts_products", "experts_combined", "experts_chosen"}


def spoilable(name: str) -> list[str]:
    """The arguments that are no flags: what is true or not Python says of anything."""
    return [key for key, value in OPERATIONS[name].sound().items() if type(value) is not bool]


@fuzz(
    st.sampled_from(sorted(set(OPERATIONS) - LEFT_OUT)).flatmap(
        lambda name: st.builds(
            SimpleNamespace,
            name=st.just(name),
            number=st.integers(0, 2),
            changes=arrays.changes(spoilable(name)),
        )
    ),
    examples=400,
    seconds=10.0,
)
def test_refusals(case: SimpleNamespace) -> None:
    calls = OPERATIONS[case.name]
    arguments = calls.sound(case.number)
    spoilt = arrays.spoilt(arguments, case.changes)
    arrays.same_answers(partial(calls.function, **spoilt), [*arguments, *PARTS])
