"""Processes that are forked from one which has imported everything: they begin at once."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from mlx_qlayers.cli import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mlx_lm.server", "mlx_qlayers", "pytest"])


class Command(ForkServerProcess):
    """A running ``mlx-qlayers`` command, asked as a ``Popen`` is; what it says is in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        super().__init__(daemon=True)
        self.arguments, self.log, self.environment = arguments, log, dict(os.environ)
        self.start()

    def run(self) -> None:
        """In the process."""
        os.environ.clear()
        os.environ.update(self.environment)
        with self.log.open("w") as said:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
        sys.exit(main(self.arguments))

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, seconds: float) -> int | None:
        self.join(seconds)
        return self.exitcode
