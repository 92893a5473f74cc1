"""Prompts through a model's layers on CUDA, in little memory.

MLX hands work over long before it is done, and what it computes with stays in memory until then:
for 2,048 rows of a model with 7 billion parameters 14 GB, most of it dense weights, which takes
time to allocate, too. So here a layer waits until the one before the last is done.

Of many rows over packed caches layers are computed in parts: feed-forward modules as
:mod:`..ops.gated_parts` cuts them, and attention by itself. They are handed over as far ahead as
there is room, so that the GPU waits little for Python; what a part takes is that of the same part
of the layer before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from ..metal.quantized_matmul.gated import RUN
from ..ops.gated_parts import Memory, memory_of
from ..ops.quantized_route import is_dense
from . import compiled
from .compiled_blocks import INT8, Static

# Rows of which a layer is computed in parts; of more, dense weights are not most of its memory.
_ROWS = range(1024, 4097)
# Bytes of a layer's dense feed-forward weights from which it is.
_LEAST = 200 << 20
# Bytes beside the shared memory, for each one of gated rows: what an H200 computes 2,048 rows of a
# 7B model in without waiting, where caches are plain, and nearly so.
_ROOM = {"plain": 5.5, "packed": 3.3}
# Seconds until MLX has given back the memory of what is done.
_GIVES_BACK = 1e-4


class _Turn:
    """What of a call of a model is evaluated next, and what is being evaluated.

    Attributes:
        pending: lists of arrays, to be evaluated one behind the other.
        before: bytes in use before, and what caches have taken since.
        memory: what layers compute in by parts, if they do, of this ``shape``.
        kind: of the caches then, by which there are few large parts or many small ones.
        room: bytes at most beside those before, then.
    """

    def __init__(self) -> None:
        self.pending: list[list[mx.array]] = []
        self.before = mx.get_active_memory()
        self.memory: Memory | None = None
        self.shape: Any = None
        self.kind = ""
        self.room: int | None = None
        self._nothing = mx.array(0)
        self._begun: deque[mx.array] = deque()
        # Bytes of what is evaluated, by how much of its layer follows.
        self._sizes: dict[int, int] = {}

    def run(self) -> None:
        """Begin to evaluate what is pending, all of it, or none where that is not possible."""
        while self.pending:
            number, piece = len(self.pending), self.pending.pop(0)
            if self.room is not None:
                self._make_room(self.before + self.room - self._sizes.get(number, self.room))
            held = mx.get_active_memory()
            if (marker := self._begin(piece)) is None:
                self.pending.clear()
                return
            self._begun.append(marker)
            if self.room is not None:
                size = mx.get_active_memory() - held
                self._sizes[number] = max(size, self._sizes.get(number, 0))
            elif len(self._begun) > 1:
                mx.eval(self._begun.popleft())

    def _begin(self, piece: list[mx.array]) -> mx.array | None:
        """An array that is there when these are, and holds none of them; None in a gradient."""
        marker = mx.depends([self._nothing], piece)[0]
        try:
            mx.async_eval(marker)
        except ValueError:
            return None
        return marker

    def _make_room(self, most: int) -> None:
        """Wait until no more bytes are in use, or nothing is being evaluated."""
        while self._begun and mx.get_active_memory() > most:
            mx.eval(self._begun.popleft())
            end = time.perf_counter() + _GIVES_BACK
            while mx.get_active_memory() > most and time.perf_counter() < end:
                pass


_turn: ContextVar[_Turn | None] = ContextVar("turn", default=None)


def in_turn(call: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """Call a model: what it gives. Of a prompt on CUDA layers wait."""
    if compiled.context() is None:
        return call(model, *args, **options)
    token = _turn.set(_Turn())
    try:
        return call(model, *args, **options)
    finally:
        _turn.reset(token)


def wait(queries: mx.array, keys: Any, values: Any) -> None:
    """Ahead of a layer's attention, for what was before.

    What the last layer gives is not evaluated, as nobody may ask for it.

    Args:
        queries: (B, H, L, D).
        keys: of a cache, with these tokens', in one array (B, H, S, D) or three packed ones.
        values: likewise.
    """
    turn = _turn.get()
    if turn is not None and is_dense(queries[:, 0]):
        cached = [keys, values] if isinstance(keys, mx.array) else [*keys, *values]
        turn.before += sum(a.nbytes for a in cached) * queries.shape[2] // cached[0].shape[2]
        turn.pending.append([queries, *cached] if turn.room is not None else [queries])
        turn.run()


def memory(
    x: mx.array, cache: Any, static: Static, arrays: Sequence[mx.array | None]
) -> Memory | None:
    """What a decoder layer computes its feed-forward module in by parts; None if not by parts.

    It is by parts over packed caches, and where a prompt begins: mlx-lm packs a cache behind that.
    """
    (out, feed, _), turn = static, _turn.get()
    if turn is None or not (out and feed) or x.shape[1] not in _ROWS or not is_dense(x):
        return None
    kind = "packed" if hasattr(cache, "bits") else "plain"
    if kind == "plain" and (type(cache).__name__ != "KVCache" or cache.offset):
        return None
    packings, matrices = (out, *feed[:2]), arrays[-12:]
    (width, _), k = feed[0].shape, x.shape[-1]
    if (
        width % RUN
        or width > 16 * k
        or any(p.fmt == INT8 or p.spread or p.summed or len(p.shape) != 2 for p in packings)
    ):
        return None
    floats = {a.dtype for a in matrices if a is not None} - {mx.uint32, mx.uint8}
    if floats - {x.dtype} or any(bias is not None for bias in matrices[3::4]):
        return None
    shape, turn.kind = (x.shape, x.dtype, width), kind
    if turn.memory is None or turn.shape != shape:
        turn.memory, turn.shape = memory_of(x, width, x), shape
    return turn.memory


def evaluated_in_parts(run: Callable[..., Any]) -> Callable[..., mx.array]:
    """What follows attention, of what :func:`.compiled_blocks.tail` gives with parts."""

    def behind(x: mx.array, attended: mx.array, *arrays: mx.array | None) -> mx.array:
        turn = _turn.get()
        assert turn and turn.memory
        y, pieces = run(x, attended, *arrays, *turn.memory)
        # Whoever computes in this memory next does so behind this.
        turn.memory = turn.memory._replace(after=y)
        weights, gated, _ = turn.memory
        turn.room = weights.nbytes + int((1 + _ROOM[turn.kind]) * gated.nbytes)
        few = [[attended], pieces[len(pieces) // 2], [y]]
        turn.pending += [[attended], *pieces, [y]] if turn.kind == "packed" else few
        return y

    return behind
