"""Threads, tasks, interrupts and exits, a thousand rounds of each: ``make stress``.

Each function below makes so many rounds and raises where something is lost: an interrupt, a count,
a value, the backend of a block, the state of a model, or the status of a process that ends.
"""

import argparse
import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_qlayers import attention, convert_model, explain, quantized_matmul, revert_model
from mlx_qlayers.dispatch import Operation, Plan, choose, dispatch
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.backend import (
    Context,
    Mode,
    advance_epoch,
    backend,
    current,
    epoch,
    mode,
    requested,
)
from mlx_qlayers.runtime.explain import collectors, recording
from tests.machine import on_a_gpu
from tests.numerics import assert_function, assert_same_model, assert_same_sums
from tests.small_qwen import BASE, TOKENS, qwen, snapshot
from tests.threads import in_threads, switching

Check = Callable[[], object]


@contextmanager
def interrupts() -> Iterator[Callable[[Callable[[], object], float], None]]:
    """A thread that interrupts a function called again and again, after so many seconds.

    It raises where the interrupt does not arrive as a KeyboardInterrupt. The garbage collector
    waits until the end: what its callbacks raise, and finalizers of models that earlier tests left,
    Python only prints.
    """
    dropped: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run(function: Callable[[], object], seconds: float) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                function()
        except KeyboardInterrupt:
            return
        raise AssertionError(f"an interrupt was lost; Python dropped {dropped}")

    gc.collect()
    gc.disable()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda it: dropped.append(f"{it.exc_value!r} in {it.object!r}")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield run
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
        gc.enable()


def interrupted(rounds: int, function: Callable[[], object], check: Check) -> None:
    """Interrupt a function at other moments each round, and check what it leaves."""
    function()
    with interrupts() as run:
        for turn in range(rounds):
            run(function, 1e-5 + turn % 97 * 1e-5)
            check()


def interrupts_of_blocks(rounds: int) -> None:
    """Nothing stays forced, recorded or traced."""

    def enter() -> None:
        for _ in range(20):
            with use_backend("reference"), mode(Mode.INFERENCE), use_backend("auto"):
                pass

    def observe() -> None:
        with trace(), recording():
            exp(x)

    def check() -> None:
        state = current.get(), epoch.debug, dict(collectors)
        assert state == (Context(), frozenset(), {}), state

    x = mx.ones(8)
    interrupted(rounds, enter, check)
    interrupted(rounds, observe, check)


def interrupts_of_launches(rounds: int) -> None:
    """The next launch computes: small and large ones, those of gradients and of new shapes."""
    q, sizes = mx.random.normal((1, 4, 8, 64)), itertools.count()
    gradient = mx.grad(lambda q: attention(q, q, q, scale=0.125, mask="causal").sum())
    small, large = mx.arange(64, dtype=mx.float32), mx.zeros((1 << 18,))
    mx.eval(q, small, large)

    def check() -> None:
        assert_function(exp(small / 64), np.exp, small / 64)

    with use_backend("host"):
        wanted = gradient(q)
        for function in (
            lambda: exp(small),
            lambda: exp(large),
            lambda: mx.eval(gradient(q)),
            lambda: exp(mx.zeros(next(sizes) % 5000)),
        ):
            interrupted(rounds, function, check)
        assert mx.array_equal(gradient(q), wanted)


def interrupts_of_graphs(rounds: int) -> None:
    """Amid tracing by mx.compile, for new shapes, and amid gradients: later calls compute."""
    x, packed = mx.random.normal((40, 128)), mx.quantize(mx.random.normal((64, 128)))
    mx.eval(x, packed)
    turns = itertools.cycle(range(1, 41))

    def both(function: Callable[..., mx.array], rows: int) -> list[mx.array]:
        gradient = mx.grad(lambda x: mx.sin(function(x, *packed)).sum())
        return [function(x[:rows], *packed), gradient(x[:rows])]

    def compute() -> None:
        if (rows := next(turns)) == 1:
            advance_epoch()
        mx.eval(both(quantized_matmul, rows))

    def check() -> None:
        for ours, stock in zip(
            both(quantized_matmul, 7), both(mx.quantized_matmul, 7), strict=True
        ):
            assert_same_sums(ours, stock)

    with on_a_gpu(), use_backend("reference"):
        interrupted(rounds, compute, check)


def interrupts_of_conversion(rounds: int) -> None:
    """A model is converted or as it was, never something between."""
    model = qwen(quantized=False)
    config = {"quantization": BASE}
    quantized = qwen()
    converted = [(model, config), (quantized, None)]
    for each, wanted in converted:
        kinds = lambda each=each: [type(m) for m in each.modules()]  # noqa: E731
        states = [kinds()]
        before = snapshot(each)
        convert_model(each, config=wanted)
        states.append(kinds())
        revert_model(each)
        states.append(kinds())

        def both(each: nn.Module = each, wanted: object = wanted) -> None:
            convert_model(each, config=wanted, verify=False)
            revert_model(each)

        def check(each: nn.Module = each, states: list = states, kinds: Check = kinds) -> None:
            assert kinds() in states
            assert each(TOKENS).shape == (1, 7, 96)

        interrupted(rounds, both, check)
        if wanted is None:
            revert_model(each)
            assert snapshot(each) == before


@contextmanager
def meanwhile(function: Callable[[], object], number: int = 1) -> Iterator[Callable[[], bool]]:
    """Threads that call a function until the end; what they raise is raised there.

    Gives a function that says whether none of them has raised yet.
    """
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            function()

    with ThreadPoolExecutor(number) as pool:
        others = [pool.submit(again) for _ in range(number)]
        try:
            yield lambda: not any(other.done() for other in others)
        finally:
            over.set()
    for other in others:
        other.result()


def threads(rounds: int) -> None:
    """Backends, values and counts of four threads, beside explain() and new epochs."""
    x, packed = mx.random.normal((3, 128)), mx.quantize(mx.random.normal((64, 128)))
    mx.eval(x, packed)
    wanted = mx.quantized_matmul(x, *packed)
    mx.eval(wanted)
    counted = Operation("stressed", lambda *_: Plan(choose("stressed", False), lambda x: x))

    def work(number: int) -> None:
        name = ("host", "reference")[number % 2]
        for turn in range(rounds):
            with use_backend(name):
                assert backend() == requested() == name
                y = quantized_matmul(x, *packed)
                assert_same_sums(y, wanted)
            assert requested() == "auto"
            dispatch(counted, (x,), (turn % 3,))

    def watch() -> None:
        explain()
        with trace(), recording():
            pass
        advance_epoch()
        time.sleep(1e-3)

    explain(reset=True)
    with meanwhile(watch):
        in_threads(work, 4)
    calls = Counter[str]()
    for decision in explain():
        calls[decision.op] += decision.calls
    expected = {"stressed": 4 * rounds, "quantized_matmul": 4 * rounds}
    assert expected.items() <= calls.items(), calls


def tasks(rounds: int) -> None:
    """Async tasks, and threads with the context of a task, have backends of their own."""
    x = mx.ones((8,))

    async def work(name: str) -> None:
        loop = asyncio.get_running_loop()
        for turn in range(rounds):
            with use_backend(name):
                await asyncio.sleep(0)
                assert backend() == name
                exp(x)
                if turn % 10 == 0:
                    context = copy_context()
                    assert await loop.run_in_executor(None, context.run, backend) == name
            await asyncio.sleep(0)
            assert requested() == "auto"

    async def together() -> None:
        await asyncio.gather(*map(work, ("reference", "host", "reference", "host")))

    asyncio.run(together())


def conversion_in_use(rounds: int) -> None:
    """Other threads compute with a model that is converted and reverted."""
    model = qwen()
    # Other threads cannot evaluate what belongs to a stream of this one.
    mx.eval(TOKENS, model.parameters())
    wanted = model(TOKENS)
    mx.eval(wanted)

    def use() -> None:
        assert_same_model(model(TOKENS), wanted, bits=None, what="in use")

    with switching(1e-6), meanwhile(use, 2) as going:
        for _ in range(rounds):
            convert_model(model, verify=False)
            revert_model(model)
            if not going():
                break
    time.sleep(0.2)  # MLX frees what a thread compiled after its end, and needs Python for it


def exits(rounds: int) -> None:
    """Processes end with their status: after operations in threads, amid them, by an interrupt.

    Not those whose daemon threads compute as they end: with MLX's own operators they abort too.
    """
    code = """
import os, signal, sys, threading, time
import mlx.core as mx
from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.ops.exp import exp
import mlx_qlayers.runtime.host
device = mx.Device(mx.gpu)
mx.default_device, mx.default_stream = lambda: device, "of {}".format
bad = []
for turn in range(int(sys.argv[1])):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != (0, 0, -signal.SIGINT)[turn % 3]:
        bad.append((turn % 3, status))
else:
    print(bad, flush=True)
    os._exit(0)
def work(times):
    with use_backend("host"):
        for k in range(times):
            mx.eval(mx.grad(lambda x: exp(x).sum())(mx.ones(8 + k % 3)))
    # Compiled graphs, which a thread frees that has to wait for Python's lock.
    x, packed = mx.random.normal((4, 128)), mx.quantize(mx.random.normal((64, 128)))
    with use_backend("reference"):
        for rows in range(1, 5):
            mx.eval(quantized_matmul(x[:rows], *packed))
if turn % 2:
    sys.setswitchinterval(1000)
begun = threading.Thread(target=work, args=(30 if turn % 3 == 1 else 5,))
begun.start()
if turn % 3 != 1:
    begun.join()
work(3)
if turn % 3 == 2:
    sys.stderr = None
    signal.setitimer(signal.ITIMER_REAL, 1e-3 + turn % 7 * 1e-4)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    work(10**9)
"""
    command = [sys.executable, "-c", code, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", (done.stdout, done.stderr[-2000:])


ALL = (
    interrupts_of_blocks,
    interrupts_of_launches,
    interrupts_of_graphs,
    interrupts_of_conversion,
    threads,
    tasks,
    conversion_in_use,
    exits,
)


def main() -> None:
    """Run all, or those that are named."""
    names = [each.__name__ for each in ALL]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=names, help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    failed = 0
    for each in ALL:
        if each.__name__ in args.names:
            start = time.monotonic()
            try:
                each(args.rounds)
                outcome = "nothing lost"
            except Exception as error:
                failed, outcome = 1, f"FAILED: {error!r}"
            seconds = time.monotonic() - start
            print(f"{each.__name__}: {args.rounds} rounds, {seconds:.0f} s, {outcome}", flush=True)
    os._exit(failed) if failed else None


if __name__ == "__main__":
    main()
