"""How work is cut, and that it comes out the same on another core."""

from itertools import product

import mlx.core as mx

from mlx_qlayers.reference import cores


def test_parts_are_even_and_large_enough(machine):
    for available, count, work in product((1, 2, 8), (0, 1, 2, 7, 12), (0, 1, 1 << 17, 1 << 30)):
        machine.cores(available)
        found = cores.parts(count, work)
        assert [i for part in found for i in range(count)[part]] == list(range(count))
        sizes = [part.stop - part.start for part in found]
        assert 1 <= len(found) <= available and max(sizes) - min(sizes) <= 1
        if len(found) > 1:
            assert min(sizes) >= 1 and count * work >= len(found) * (1 << 18)


def test_results_do_not_depend_on_the_core():
    x = mx.random.normal((65, 33), key=mx.random.key(1))
    results = []
    for core in range(3):
        with cores.on_core(core):
            results.append(mx.softmax(x @ x.T, axis=-1))
    assert all(mx.array_equal(result, results[0]) for result in results)
