"""The moves of the search."""

from dataclasses import FrozenInstanceError

import pytest

from mlx_qlayers.metal.common.row_sum import RowSum
from mlx_qlayers.tuning import moves
from mlx_qlayers.tuning.moves import Axis, Group, Move, PadTo, Upcast


def test_a_move_changes_one_field_of_a_copy():
    before = RowSum(local=4)
    assert Upcast("upcast", 2)(before) == RowSum(upcast=2, local=4)
    assert before == RowSum(local=4)
    with pytest.raises(FrozenInstanceError):
        before.local = 2  # type: ignore[misc]


def test_moves_are_named_after_what_they_do():
    assert str(Group("group", 8)) == "GROUP group=8"
    assert str(PadTo("padded", True)) == "PADTO padded=True"


def test_an_axis_moves_to_every_other_value():
    axis = Axis(Group, "group", (1, 2, 4))
    assert [m.value for m in axis.moves(RowSum(group=2))] == [1, 4]
    assert [m.value for m in axis.moves(RowSum(group=3))] == [1, 2, 4]


@pytest.mark.parametrize("name", ["Upcast", "Unroll", "Local", "Group", "GroupTop", "PadTo"])
def test_every_shared_move_shows_what_it_does(name):
    move = getattr(moves, name)
    assert issubclass(move, Move) and "::" in move.__doc__
