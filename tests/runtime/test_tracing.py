"""Launches can be recorded."""

import threading

import mlx.core as mx
import pytest

from mlx_qlayers.runtime.kernel import KernelError
from mlx_qlayers.runtime.tracing import Record, trace

from .kernels import GATHER


def launch(n=8):
    sizes = {"grid": (n, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(n,)]}
    return GATHER([mx.zeros(n)], template={"T": mx.float32}, **sizes)


def test_every_launch_is_recorded(metal):
    launch()
    with trace() as launches:
        launch(16)
        launch()
    launch()
    assert launches[0] == Record(
        kernel="gather",
        backend="metal",
        grid=(16, 1, 1),
        threadgroup=(4, 1, 1),
        template={"T": mx.float32},
        input_shapes=((16,),),
        output_shapes=((16,),),
    )
    assert [record.grid for record in launches] == [(16, 1, 1), (8, 1, 1)]


def test_launches_of_other_threads_are_recorded(metal):
    with trace() as launches:
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert len(launches) == 1


def test_a_launch_that_fails_is_not_recorded(metal):
    with trace() as launches, pytest.raises(KernelError):
        launch(0)
    assert launches == []
