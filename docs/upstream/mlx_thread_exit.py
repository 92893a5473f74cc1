"""MLX 0.32.4: a process aborts as it ends, if a thread that has ended had compiled something.

The destructors of a thread's C++ variables free what ``mx.compile`` keeps for that thread.
They hold Python objects, so they take Python's lock. Before Python 3.13, ``Thread.join`` returns
when the thread has left Python, and its destructors may come later than the interpreter's end.
Then taking the lock ends the thread by ``pthread_exit``, which on Linux unwinds its stack through
the destructor, and that is noexcept: ``terminate called without an active exception``.

    for i in $(seq 20); do python mlx_thread_exit.py; echo $?; done

prints 134 for some of them. MLX could free what a thread compiled without the lock once
``Py_IsFinalizing``, or keep no Python objects there. Until then a program can wait, at exit, until
the system knows the thread no more; ``mlx_qlayers.runtime.threads`` does so for threads that have
run its operations.
"""

import sys
import threading

import mlx.core as mx

x = mx.ones(8)
graphs = [mx.compile(lambda x, k=k: mx.sin(x) * k) for k in range(50)]


def work() -> None:
    for graph in graphs:
        mx.eval(graph(x))


sys.setswitchinterval(1000)  # the thread that ends has to wait for the lock
thread = threading.Thread(target=work)
thread.start()
thread.join()
