"""A process for work that may never be done."""

import time

import pytest

from mlx_qlayers.runtime.worker import Worker


def work(seconds, tell):
    tell(seconds)
    time.sleep(seconds)


def test_messages_come_until_a_job_takes_too_long():
    worker = Worker(work)
    for seconds in (0, 0, 60):
        worker.jobs.send(seconds)
        assert worker.received() == seconds
    with pytest.raises(EOFError):
        worker.received(0.1)
    assert worker.ending() == "its process ended with SIGKILL"
