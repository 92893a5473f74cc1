"""Runs a function on ranks that talk over MLX's ring, as ``mlx.launch`` would start them."""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.forks import CONTEXT

PATIENCE = 10.0  # seconds in which all ranks are to end after one
ROOT = Path(__file__).parents[1]


def hostfile(ranks: int) -> str:
    """Where so many ranks find each other on this machine, for ``MLX_HOSTFILE``."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    return json.dumps(hosts)


def run(function: Callable[..., Any], ranks: int, *arguments: object) -> list[Any]:
    """The results of a function on so many ranks, as JSON.

    An error of one is an AssertionError, with what they all printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = function, ranks, Path(folder), arguments, dict(os.environ)
        process = CONTEXT.Process(target=_apart, args=given)
        process.start()
        try:
            process.join(300)
        finally:
            if process.is_alive():
                os.killpg(process.ident, signal.SIGKILL)
        assert process.exitcode == 0, (Path(folder) / "printed").read_text()
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def _apart(function: Any, ranks: int, folder: Path, arguments: Any, environment: Any) -> None:
    """In a session of their own: ranks that wait for each other end with what has forked them."""
    os.setsid()
    os.chdir(ROOT)
    os.environ |= environment
    with open(folder / "printed", "w") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    sys.exit(_fork(function, ranks, folder, arguments))


def _fork(function: Any, ranks: int, folder: Path, arguments: Any) -> int:
    """Run the function on each rank, and wait; how many failed."""
    file = folder / "hosts"
    file.write_text(hostfile(ranks))
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
            mx.set_default_device(mx.cpu)
            code = 1
            try:
                result = function(*arguments)
                (folder / str(rank)).write_text(json.dumps(result))
                code = 0
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(code)
        children.append(child)
    failed, until = 0, float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
            failed += bool(status)
            until = min(until, time.monotonic() + PATIENCE) if status else until
        elif time.monotonic() > until:
            print(f"{len(children)} ranks go on without another", file=sys.stderr)
            for other in children:
                os.kill(other, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.02)
    return failed
