"""Beam search."""

from dataclasses import dataclass, replace

import pytest

from mlx_qlayers.tuning.search import Stopped, Trial, beam_search


@dataclass(frozen=True)
class Point:
    x: int = 0
    y: int = 0


EVERYTHING = [Point(x, y) for x in range(8) for y in range(8) if x * y <= 20]


def near(p: Point) -> list[Point]:
    return [q for q in EVERYTHING if (q.x == p.x) != (q.y == p.y)]


def bowl(p: Point) -> Trial[Point]:
    return Trial(p, 1.0 + (p.x - 3) ** 2 + (p.y - 5) ** 2)


def search(starts, attempt=bowl, width=4):
    return beam_search([], starts, near, attempt, width=width)


def test_finds_the_best_with_fewer_tries_than_there_are_configurations():
    trials = search([Point()], width=2)
    assert trials[0] == min(map(bowl, EVERYTHING), key=lambda t: t.seconds)
    assert trials[0] == Trial(Point(3, 5), 1.0) and len(trials) < len(EVERYTHING)


def test_does_not_try_again_what_is_known():
    def attempt(p):
        assert p != Point()
        return bowl(p)

    known = [bowl(Point())]
    trials = beam_search(known, [Point()], near, attempt)
    assert trials[0].config == Point(3, 5) and known[0] in trials


def test_what_is_tried_was_prepared_and_what_is_far_was_not():
    prepared = [[]]

    def attempt(p):
        assert p in [*EVERYTHING[:1], *(q for some in prepared for q in some)]
        return bowl(p)

    trials = beam_search([bowl(Point())], [], near, attempt, prepare=prepared.append)
    assert trials[0].config == Point(3, 5)
    assert prepared[2] == near(Point())


def test_tries_nothing_twice():
    tried = []

    def attempt(p):
        tried.append(p)
        return bowl(p)

    search([Point(), Point(1, 1)], attempt, width=8)
    assert len(tried) == len(set(tried))


def test_a_candidate_that_does_not_work_is_recorded_and_not_followed():
    def attempt(p):
        return Trial(p, problem="broken") if p.y == 5 else bowl(p)

    trials = search([Point()], attempt)
    assert trials[0].config in (Point(3, 4), Point(3, 6))
    assert {t.config.y for t in trials if t.problem} == {5}
    assert trials[-1].problem == "broken"


def test_goes_on_over_one_plateau_and_stops_at_the_second():
    # y gains only after x has been changed to a value that gains nothing by itself.
    def attempt(p):
        return Trial(p, 1.0 if p.x == 7 and p.y == 2 else 2.0)

    assert search([Point()], attempt, width=16)[0].config == Point(7, 2)
    rounds = search([Point()], lambda p: Trial(p, 1.0), width=1)
    assert len(rounds) < len(EVERYTHING) / 2


def test_what_one_change_tells_spares_others_before_the_round_is_over():
    # Both starts are close; that x = 2 is slow after the first is not tried again after the second.
    def steps(p):
        return [replace(p, x=x) for x in (1, 2)]

    tried = []

    def attempt(p):
        tried.append(p)
        return Trial(p, 1.0 + 4 * (p.x == 2) + 0.01 * p.y)

    beam_search([], [Point(1, 0), Point(1, 1)], steps, attempt)
    assert [p.y for p in tried if p.x == 2] == [0]


def test_a_gain_spares_what_was_as_good_as_the_best_before_it():
    # What is tried after 2 would have to gain as much to be worth a try.
    tried = []

    def attempt(p):
        tried.append(p)
        return Trial(p, {1: 2.0, 2: 1.0}.get(p.x, 3.0))

    def steps(p):
        return [Point(x) for x in (2, 16) if p.x == 1]

    assert beam_search([], [Point(1)], steps, attempt)[0].config == Point(2)
    assert tried == [Point(1), Point(2)]


def test_what_is_not_answered_is_asked_once():
    asked = []

    def attempt(p):
        asked.append(p)
        return bowl(p) if p.x != 3 else None

    trials = beam_search([], [Point()], near, attempt)
    assert trials[0].config in (Point(2, 5), Point(4, 5))
    assert any(p.x == 3 for p in asked) and all(t.config.x != 3 for t in trials)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_spent_budget_ends_it_with_what_was_found(after):
    tried = []

    def attempt(p):
        if len(tried) == after:
            raise Stopped
        tried.append(p)
        return bowl(p)

    trials = search([Point()], attempt)
    assert sorted(t.seconds for t in trials) == [t.seconds for t in trials] and len(trials) == after


def test_is_the_same_every_time():
    start = [replace(Point(), y=7)]
    assert search(start) == search(start)
