"""Threads have numbers of their own, and a process that ends after theirs does not abort."""

import sys
from threading import Thread

from mlx_qlayers.runtime import threads


def test_numbers_are_used_once():
    seen: list[tuple[int, int | None]] = []

    def work() -> None:
        seen.append((threads.here.number, thread.native_id))
        seen.append((threads.here.number, thread.native_id))

    for _ in range(200):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert len({number for number, _ in seen}) == 200 and seen[::2] == seen[1::2]
    # Those that have ended are forgotten now and then.
    assert len(threads._natives) <= threads._MANY + 1


def test_short_turns_of_python_end_with_their_block():
    before = sys.getswitchinterval()
    with threads.short_turns():
        assert sys.getswitchinterval() < before / 10
    assert sys.getswitchinterval() == before
