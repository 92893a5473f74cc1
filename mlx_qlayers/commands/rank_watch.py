"""Ends a rank's process when another rank ends: run as a program of its own beside each rank.

A process that waits inside MLX for a rank that is gone sees no signal, and its threads may have to
wait with it. Rank 0's program listens; those of the others hold a connection to it. Nothing beyond
the standard library is imported.

    MLX_QLAYERS_RANKS=TOKEN python rank_watch.py RANK SIZE [PORT HOST...]

Without a port it listens, and prints on which. All that connect know the token. On its standard
input the rank says why it ends, ``CODE TEXT``, and that it did, ``bye``. The programs tell each
other the same. ``?CODE TEXT`` is an error that the end of another rank may have caused: the
program waits whether it hears of one, and closes its standard output when it has not.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

TOKEN = "MLX_QLAYERS_RANKS"
# Seconds between two signs of life, without one until a rank counts as lost, to end by oneself, and
# to hear of another rank's end (twice that for rank 0, which hears from all).
EACH, SILENCE, GRACE, DOUBT = 1.0, 8.0, 3.0, 1.5
FAILED, INTERRUPTED = 2, 130


class Watch:
    """The connections of a rank: to all others where it is the first, else to that one."""

    def __init__(self, rank: int, peers: dict[socket.socket, int]) -> None:
        self.rank, self.peers, self.parent = rank, peers, os.getppid()
        self.heard = dict.fromkeys(peers, time.monotonic())
        self.rest: dict[socket.socket, str] = {}  # of lines that have not come whole
        self.until, self.at_the_end = float("inf"), (0, "")
        self.doubted_until, self.doubted = float("inf"), ""
        signal.signal(signal.SIGINT, self.interrupted)

    def interrupted(self, *_: object) -> None:
        """The rank has the same signal: it may end by itself."""
        self.end_after(GRACE, INTERRUPTED, f"rank {self.rank} was interrupted")

    def end_after(self, seconds: float, code: int, text: str) -> None:
        """End the rank then, if it has not ended."""
        if self.until == float("inf"):
            self.until, self.at_the_end = time.monotonic() + seconds, (code, text)

    def send(self, line: str) -> None:
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.sendall(f"{line}\n".encode())

    def run(self) -> None:
        """Until the rank has ended."""
        sent = 0.0
        while True:
            own = [] if self.doubted else [sys.stdin]
            ready, _, _ = select.select([*own, *self.peers], [], [], EACH)
            now = time.monotonic()
            if now > self.until:
                self.end(*self.at_the_end)
            if sys.stdin in ready:
                self.from_rank(os.read(sys.stdin.fileno(), 1 << 16).decode())
            for peer, rank in list(self.peers.items()):
                if peer in ready:
                    self.heard[peer] = now
                    self.from_peer(peer, rank)
                elif now > self.heard[peer] + SILENCE:
                    self.end(FAILED, f"rank {rank} has not been heard of for {SILENCE:.0f} s")
            if now > self.doubted_until:
                self.failed([self.doubted])
            if now >= sent + EACH:  # not in answer to another's, which would be answered at once
                sent = now
                self.send("")

    def from_rank(self, text: str) -> None:
        """Read a message of the own rank; an empty one says that it is gone."""
        lines = text.splitlines()
        if not lines:
            lines = [f"{FAILED} rank {self.rank} is gone: it was killed or crashed"]
            if self.rank == 0:
                print(f"mlx-qlayers: error: {lines[0][2:]}", file=sys.stderr, flush=True)
        elif lines[0].startswith("?"):
            self.doubted = lines[0][1:]
            self.doubted_until = time.monotonic() + (DOUBT if self.rank else 2 * DOUBT)
            return
        elif lines[0] != "bye":
            self.failed(lines)
        for line in lines:
            self.send(line)
        sys.exit()

    def failed(self, lines: list[str]) -> None:
        """The own rank prints its error and ends, if MLX lets it."""
        for line in lines:
            self.send(line)
        sys.stdout.close()
        time.sleep(GRACE)
        self.end(int(lines[0].partition(" ")[0]), "")

    def from_peer(self, peer: socket.socket, rank: int) -> None:
        """Read the messages of another rank's program."""
        try:
            text = peer.recv(1 << 16).decode(errors="replace")
        except OSError:
            text = ""
        if not text:
            self.end(FAILED, f"rank {rank} is gone, with the program beside it")
        *lines, self.rest[peer] = (self.rest.get(peer, "") + text).split("\n")
        for line in filter(None, lines):
            if line == "bye":
                del self.peers[peer]
                if rank == 0:  # which has done what there was to do
                    self.end_after(GRACE, 0, "")
                return
            code, _, what = line.partition(" ")
            self.end(int(code), what)

    def end(self, code: int, text: str) -> None:
        """End the own rank, and all others by rank 0."""
        if self.rank == 0 and text:
            self.send(f"{code} {text}")
        # Somebody has to say it where rank 0 is gone.
        if text and (self.rank == 0 or (self.rank == 1 and text.startswith("rank 0 is gone"))):
            print(f"mlx-qlayers: error: {text}; all ranks end", file=sys.stderr, flush=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() == self.parent:
                os.kill(self.parent, number)
                time.sleep(0.5)
        sys.exit(code)


def accepted(
    listener: socket.socket, count: int, token: str
) -> Iterator[tuple[socket.socket, int]]:
    """The connections of the other ranks, those that come in time."""
    listener.settimeout(SILENCE)
    with contextlib.suppress(OSError):
        while count:
            peer, _ = listener.accept()
            peer.settimeout(SILENCE)
            # Unbuffered: what comes after this line is read from the socket.
            line = peer.makefile("rb", buffering=0).readline().decode(errors="replace")
            rank, _, given = line.strip().partition(" ")
            if hmac.compare_digest(given, token):
                count -= 1
                yield peer, int(rank)


def connected(port: int, hosts: list[str], greeting: str) -> socket.socket:
    """A connection to rank 0's program, at the first of some hosts where there is one."""
    for host in hosts:
        with contextlib.suppress(OSError):
            peer = socket.create_connection((host, port), timeout=2)
            peer.settimeout(SILENCE)
            peer.sendall(f"{greeting}\n".encode())
            return peer
    sys.exit(f"rank 0 is not to be reached at {', '.join(hosts)}, port {port}")


def main() -> None:
    rank, size, *address = sys.argv[1:]
    token = os.environ[TOKEN]
    if address:
        peers = {connected(int(address[0]), address[1:], f"{rank} {token}"): 0}
    else:
        with socket.create_server(("", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            peers = dict(accepted(listener, int(size) - 1, token))
    with contextlib.suppress(KeyboardInterrupt):
        Watch(int(rank), peers).run()


if __name__ == "__main__":
    main()
