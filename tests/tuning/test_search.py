"""Beam search, and the search of everything."""

from dataclasses import dataclass, replace

import pytest

from mlx_qlayers.tuning.moves import Axis, Local, Upcast
from mlx_qlayers.tuning.search import (
    Stopped,
    Trial,
    all_configurations,
    beam_search,
    exhaustive_search,
    neighbours,
)


@dataclass(frozen=True)
class Point:
    x: int = 0
    y: int = 0


AXES = (Axis(Upcast, "x", tuple(range(8))), Axis(Local, "y", tuple(range(8))))


def legal(p: Point) -> str | None:
    return "too much" if p.x * p.y > 20 else None


def near(p: Point) -> list[Point]:
    return neighbours(p, AXES, legal)


def bowl(p: Point) -> Trial[Point]:
    return Trial(p, 1.0 + (p.x - 3) ** 2 + (p.y - 5) ** 2)


def test_finds_the_best_with_fewer_tries_than_there_are_configurations():
    trials = beam_search([Point()], near, bowl, width=2)
    everything = exhaustive_search(Point(), AXES, legal, bowl)
    assert trials[0] == everything[0] == Trial(Point(3, 5), 1.0)
    assert len(trials) < len(everything) == len(all_configurations(Point(), AXES, legal))


def test_never_tries_what_is_not_legal_or_was_tried():
    tried = []

    def attempt(p):
        tried.append(p)
        return bowl(p)

    beam_search([Point(), Point(1, 1)], near, attempt, width=8)
    assert len(tried) == len(set(tried)) and all(legal(p) is None for p in tried)


def test_a_candidate_that_does_not_work_is_recorded_and_not_followed():
    def attempt(p):
        return Trial(p, problem="broken") if p.y == 5 else bowl(p)

    trials = beam_search([Point()], near, attempt)
    assert trials[0].config in (Point(3, 4), Point(3, 6))
    assert {t.config.y for t in trials if t.problem} == {5}
    assert trials[-1].problem == "broken"


def test_goes_on_over_one_plateau_and_stops_at_the_second():
    # y gains only after x has been changed to a value that gains nothing by itself.
    def attempt(p):
        return Trial(p, 1.0 if p.x == 7 and p.y == 2 else 2.0)

    assert beam_search([Point()], near, attempt, width=16)[0].config == Point(7, 2)
    rounds = beam_search([Point()], near, lambda p: Trial(p, 1.0), width=1)
    assert len(rounds) < len(all_configurations(Point(), AXES, legal)) / 2


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_spent_budget_ends_it_with_what_was_found(after):
    tried = []

    def attempt(p):
        if len(tried) == after:
            raise Stopped
        tried.append(p)
        return bowl(p)

    trials = beam_search([Point()], near, attempt)
    assert sorted(t.seconds for t in trials) == [t.seconds for t in trials] and len(trials) == after


def test_is_the_same_every_time():
    start = [replace(Point(), y=7)]
    assert beam_search(start, near, bowl) == beam_search(start, near, bowl)
