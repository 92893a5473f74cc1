"""Beam search."""

from dataclasses import dataclass

from mlx_qlayers.tuning.search import Trial, beam_search


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
    assert trials[0] == Trial(Point(3, 5), 1.0) and len(trials) < len(EVERYTHING)


def test_tries_nothing_twice():
    tried = []

    def attempt(p):
        tried.append(p)
        return bowl(p)

    search([Point(), Point(1, 1)], attempt, width=8)
    assert len(tried) == len(set(tried))


def test_goes_on_over_one_plateau_and_stops_at_the_second():
    # y gains only after x has been changed to a value that gains nothing by itself.
    def attempt(p):
        return Trial(p, 1.0 if p.x == 7 and p.y == 2 else 2.0)

    assert search([Point()], attempt, width=16)[0].config == Point(7, 2)
    rounds = search([Point()], lambda p: Trial(p, 1.0), width=1)
    assert len(rounds) < len(EVERYTHING) / 2
