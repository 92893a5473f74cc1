"""MLX 0.32.4: a compiled function that two threads called leaves its graph to another function.

``mx.compile`` keeps what it traced for each thread, by the address of the Python function. Where
the compiled function is freed, that is erased for the thread that called it last, and no other.
Python gives the address to the next function, whose first call in the first thread finds the old
graph: the numbers are the old function's, without an error.

    python mlx_compile_address.py

prints ``297 of 298 are wrong``. MLX could erase the address from the caches of all threads, or
number compiled functions. Until then a program can keep each function that it compiles, or call
it in one thread only, as the graphs of ``mlx_qlayers`` are.
"""

import threading

import mlx.core as mx

x, wrong = mx.ones(3), 0
for k in range(2, 300):
    run = mx.compile(lambda x, k=k: x * k)
    wrong += run(x)[0].item() != k
    thread = threading.Thread(target=lambda run=run: mx.eval(run(x)))
    thread.start()
    thread.join()
    del run, thread
print(f"{wrong} of 298 are wrong")
