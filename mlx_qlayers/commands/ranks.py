"""Commands on ranks that ``mlx.launch`` has started: they speak by rank 0, and end together."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..runtime.ranks import RanksError, gathered
from . import rank_watch
from .rank_watch import FAILED, INTERRUPTED

_LONGEST = 2000  # characters of an error: a pipe takes that in one piece


@contextmanager
def ending_on_all_ranks(group: mx.distributed.Group) -> Iterator[None]:
    """Run a command on all ranks: only rank 0 prints, and when one ends early, all do.

    An error, an interrupt or the death of a rank ends the processes of all, within ten seconds,
    with a message that names it. MLX's backends notice that a rank is gone late or never: each rank
    has :mod:`.rank_watch` beside it.
    """
    if group.size() == 1:
        yield
        return
    watch = _watch(group)
    if group.rank():
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    told = ""
    doubted = False
    try:
        yield
    except RanksError:
        raise  # all of them have it
    except KeyboardInterrupt:
        told = f"{INTERRUPTED} rank {group.rank()} was interrupted\n"
        raise
    except Exception as error:
        # MLX raises this where a connection is lost: then another rank has ended.
        doubted = isinstance(error, RuntimeError)
        text = " ".join(str(error).split())[:_LONGEST]
        told = f"{FAILED} rank {group.rank()}: {type(error).__name__}: {text}\n"
        raise
    finally:
        assert watch.stdin is not None and watch.stdout is not None
        with suppress(OSError):
            watch.stdin.write(f"{'?' * doubted}{told}bye\n")
            watch.stdin.close()
        if doubted:
            watch.stdout.read()  # until it knows of no other, or it ends this process
        if told and group.rank():  # MLX may wait for the others at the end, or abort
            os._exit(int(told.split()[0]))


def _watch(group: mx.distributed.Group) -> subprocess.Popen[str]:
    """The program beside this rank, connected with those of the others."""
    rank, size = str(group.rank()), str(group.size())
    command, token = [sys.executable, "-I", rank_watch.__file__, rank, size], secrets.token_hex()
    if group.rank():
        port, token = gathered(group, "")[0].split()
        command += [port, *_hosts_of_first()]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # By the environment: no other program shall know the token.
    environment = {**os.environ, rank_watch.TOKEN: token}
    watch = subprocess.Popen(command, text=True, env=environment, **pipes)
    if group.rank() == 0:
        assert watch.stdout is not None
        gathered(group, f"{watch.stdout.readline().strip()} {token}")
    return watch


def _hosts_of_first() -> list[str]:
    """Where rank 0 may be, by MLX's own variables; it may be on this machine."""
    addresses = [os.environ.get("NCCL_HOST_IP", ""), os.environ.get("MLX_JACCL_COORDINATOR", "")]
    if file := os.environ.get("MLX_HOSTFILE"):
        addresses += json.loads(Path(file).read_text())[0]
    hosts = [address.rpartition(":")[0] or address for address in addresses if address]
    return [*hosts, "127.0.0.1"]
