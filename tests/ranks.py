"""Runs a function on ranks that talk over MLX's ring, as ``mlx.launch`` would start them.

One process imports everything and forks the ranks, which saves the imports of all but one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

PATIENCE = 10.0  # seconds in which all ranks are to end after one
ROOT = Path(__file__).parents[1]


def hostfile(ranks: int) -> str:
    """Where so many ranks find each other on this machine, for ``MLX_HOSTFILE``."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    return json.dumps(hosts)


def environment(rank: int, file: str) -> dict[str, str]:
    """The environment that makes a process a rank."""
    return {"MLX_RANK": str(rank), "MLX_HOSTFILE": file, "MLX_QLAYERS_CALIBRATE": "0"}


def run(module: str, name: str, ranks: int, *arguments: object) -> list[Any]:
    """The results of a function of a test module on each rank; an error of one is the error.

    Args:
        module: its file, by the name below the root, such as ``tests/test_sharding.py``.
        name: of the function.
        ranks: how many.
        arguments: for it, as JSON.

    Raises:
        AssertionError: a rank failed, with what they all printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, module, name, str(ranks), folder]
        command += [json.dumps(arguments)]
        pipe = subprocess.PIPE
        # In a session of their own: ranks that wait for each other end with what has forked them.
        with subprocess.Popen(
            command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                printed, complaints = process.communicate(timeout=300)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        assert not process.returncode, printed + complaints
        return [json.loads(file.read_text()) for file in files]


def _fork(function: Callable[..., Any], ranks: int, folder: Path, arguments: list[Any]) -> int:
    """Run the function on each rank, and wait; how many failed."""
    file = folder / "hosts"
    file.write_text(hostfile(ranks))
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ |= environment(rank, str(file))
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


if __name__ == "__main__":
    from importlib.util import module_from_spec, spec_from_file_location

    module, name, ranks, folder, given = sys.argv[1:]
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    spec = spec_from_file_location(Path(module).stem, ROOT / module)
    assert spec and spec.loader
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    sys.exit(_fork(getattr(loaded, name), int(ranks), Path(folder), json.loads(given)))
