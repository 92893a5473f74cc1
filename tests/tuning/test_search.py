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


def search(attempt, width):
    return beam_search([], [Point()], near, attempt, width=width)


def test_goes_on_over_one_plateau_and_stops_at_the_second_and_tries_nothing_twice():
    tried = []

    # y gains only after x has been changed to a value that gains nothing by itself.
    def attempt(p):
        tried.append(p)
        return Trial(p, 1.0 if p.x == 7 and p.y == 2 else 2.0)

    assert search(attempt, width=16)[0].config == Point(7, 2)
    assert len(tried) == len(set(tried))
    rounds = search(lambda p: Trial(p, 1.0), width=1)
    assert len(rounds) < len(EVERYTHING) / 2
