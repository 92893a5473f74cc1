"""Random calls of the operations of the table, on all backends, against float64."""

from tests.examples import RANDOM
from tests.fuzz.target import fuzz

TARGETS = {
    f"test_{name}": fuzz(each.cases, examples=each.examples)(each.check)
    for name, each in RANDOM.items()
}
globals().update(TARGETS)
