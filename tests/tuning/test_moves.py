"""The moves of the search."""

from dataclasses import dataclass, replace

import pytest

from mlx_qlayers.metal.common.row_sum import RowSum
from mlx_qlayers.tuning import moves
from mlx_qlayers.tuning.moves import Group, Move, PadTo, Upcast


def test_a_move_changes_one_field_to_every_other_value():
    before = RowSum(group=2, local=4)
    assert [*Group("group", (1, 2, 4))(before)] == [replace(before, group=n) for n in (1, 4)]
    assert [c.group for c in Group("group", (1, 2, 4))(RowSum(group=3))] == [1, 2, 4]
    assert [*PadTo("padded", (False, True))(before)] == [replace(before, padded=False)]


def test_what_a_configuration_does_not_have_or_admit_is_left_out():
    assert [*Upcast("tiles", (1, 2))(RowSum())] == []

    @dataclass(frozen=True)
    class Even(RowSum):
        def __post_init__(self):
            if self.group % 2:
                raise ValueError("odd")

    assert [c.group for c in Group("group", (1, 4, 5, 8))(Even(group=2))] == [4, 8]


@pytest.mark.parametrize("name", ["Upcast", "Unroll", "Local", "Group", "GroupTop", "PadTo"])
def test_every_shared_move_shows_what_it_does(name):
    move = getattr(moves, name)
    assert issubclass(move, Move) and ":\n\n        " in move.__doc__
