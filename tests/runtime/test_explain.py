"""Paths and reasons are counted, from all threads."""

import threading

import mlx.core as mx
import pytest

from mlx_qlayers.dispatch import Choice, Operation, Plan, dispatch
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import Decision, count, explain, note, recording, row
from tests.threads import in_threads


def test_a_decision_is_listed_once_for_each_reason_and_evidence():
    for _ in range(2):
        note("op", "reference", "why", "rule")
        note("op", "reference", "why", "measured here")
        note("op", "host", "why")
    assert {(d.path, d.evidence, d.calls) for d in explain()} == {
        ("reference", "rule", 2),
        ("reference", "measured here", 2),
        ("host", "rule", 2),
    }


def test_decisions_print_as_a_table_in_which_figures_do_not_count():
    for speed, calls in (("0.7", 2), ("0.71", 3), ("12", 1), ("1,200", 1)):
        for _ in range(calls):
            note("some name", "reference", f"on a CPU the kernel has {speed} times the speed")
    note("own", "host", "asked for", "asked for")
    assert len(explain()) == 5
    assert str(explain()) == repr(explain())
    assert str(explain()).splitlines() == [
        "operation  path       calls  evidence   reason",
        "some name  reference  7      rule       on a CPU the kernel has 0.71 times the speed",
        "own        host       1      asked for  asked for",
    ]


def test_a_reset_forgets():
    note("op", "reference", "why")
    assert str(explain()[0]) == "op: reference (why), 1 calls"
    assert explain(reset=True) == [Decision("op", "reference", "why")]
    assert explain() == []
    note("op", "reference", "why")
    assert explain() == [Decision("op", "reference", "why")]


def test_what_is_recorded_is_not_counted():
    one, other = row("one", "reference", "why"), row("other", "reference", "why")
    with recording() as outer:
        count((one,))
        with recording() as inner:
            count((one, other))
        count((other,))
    assert (outer, inner) == ([one, other], [one, other])
    assert explain() == []
    with recording(notes=False):
        count((other,))
        note("one", "reference", "why")
    assert [d.op for d in explain()] == ["one"]


@pytest.mark.parametrize("reset", [False, True])
def test_no_call_of_a_thread_is_lost(reset):
    """80,000 calls, which are counted exactly, even if somebody resets the counts meanwhile."""
    twice = Operation("twice", lambda specs: Plan(Choice("twice", "reference", "a test"), _same))
    x = mx.ones(1)
    mx.eval(x)

    def work(_):
        for _ in range(10_000):
            dispatch(twice, (x,))

    thread = threading.Thread(target=in_threads, args=(work, 8))
    thread.start()
    found = 0
    while reset and thread.is_alive():
        found += sum(d.calls for d in explain(reset=True))
    thread.join()
    assert found + sum(d.calls for d in explain()) == 80_000


def _same(x):
    return x


def test_launches_are_counted_where_they_happen():
    """Of a plan with two kernels, the one that runs."""
    from mlx_qlayers.ops.exp import exp

    with use_backend("host"):
        exp(mx.ones(5))
        assert {d.op: d.calls for d in explain(reset=True)} == {"exp": 1, "kernel exp_forward": 1}
        mx.eval(mx.grad(lambda x: exp(x).sum())(mx.ones(5)))
        calls = {d.op: d.calls for d in explain()}
    assert calls["kernel exp_forward"] == calls["kernel exp_gradient"] == 1
