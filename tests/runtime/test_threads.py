"""Threads have numbers of their own, and a process that ends after theirs does not abort."""

import subprocess
import sys
from threading import Thread

from mlx_qlayers.runtime import threads

# Operations as on a GPU, each a compiled graph, in a thread that has to wait for Python's lock when
# it frees them. Processes are forked before MLX is used.
_EXIT = """
import os, sys, threading
from unittest import mock
import mlx.core as mx
from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.dispatch import dispatcher
statuses = []
for turn in range(10):
    if not (child := os.fork()):
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(statuses, flush=True)
    os._exit(0)
def work():
    x, packed = mx.random.normal((4, 128)), mx.quantize(mx.random.normal((64, 128)))
    with mock.patch.object(dispatcher, "_can_compile", lambda: True), use_backend("reference"):
        for rows in range(1, 5):
            mx.eval(quantized_matmul(x[:rows], *packed))
sys.setswitchinterval(1000)
for _ in range(2):  # the second one may have the first one's identifier
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_processes_end_after_threads_that_compiled():
    done = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, check=False)
    assert done.stdout.decode() == f"{[0] * 10}\n", done.stderr.decode()


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
