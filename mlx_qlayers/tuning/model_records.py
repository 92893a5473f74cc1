"""The records of the kernels that a model asks for: its operations are run and watched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decode import engine
from ..decode.caches import blank
from ..decode.twin import is_stepped, leaves, twin
from ..dispatch.measurements import collected_records
from ..metal.record import Record
from ..runtime.backend import advance_epoch, backend
from ..runtime.cuda_ahead import compiled_in_parallel
from ..runtime.devices import device_of
from ..runtime.explain import note, recording
from ..runtime.transformed import has_values

# Tokens of prompts whose kernels are compiled first; 0 stands for one token after the other.
_PROMPTS = (0, 8, 512)
# Rows of buffers, rounded, behind prompts of 4,096, 16,384 and 32,768 tokens: on them depends among
# how many threadgroups a step of decoding is divided.
_BUFFERS = (8192, 32768, 65536)


def records_of_model(model: nn.Module, *, prompt: int = 512, batch: int = 1) -> list[Record]:
    """Run one prefill and two decode steps, and collect what could be tuned.

    On a GPU nothing is evaluated, so that no kernel is built. The prefill goes without the head, of
    which mlx-lm evaluates one row alone.

    Args:
        model: a converted language model of mlx-lm.
        prompt: tokens of the prefill; 0 leaves it out.
        batch: sequences side by side.

    Returns:
        The records of decoding, also with longer caches, then those of the prefill.
    """
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    body: Any = getattr(model, "model", model)
    with collected_records() as prefill:
        if prompt:
            body(mx.zeros((batch, prompt), mx.int32), cache=cache)
    with collected_records() as decoding:
        for _ in range(2):
            model(mx.zeros((batch, 1), mx.int32), cache=cache)
            blank([*leaves(cache)])
    longer = [
        record.at(size)
        for record in decoding
        for size in _BUFFERS
        if record.family == "attention_step" and device_of().gpu
    ]
    return records_of([*decoding, *longer, *prefill])


def asked_by(model: nn.Module, prompt: int = 0) -> bool:
    """Collect the records of a prompt or of single tokens, under :func:`..collected_records`.

    It is traced on arrays without values; the result says whether it could be.
    """
    try:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(model)
        on_host = device_of().launches_at_once
        body: Any = getattr(model, "model", model) if prompt else model

        def run(tokens: mx.array) -> mx.array:
            if on_host and has_values([tokens]):
                raise ValueError("nothing is traced while mx.disable_compile holds")
            if on_host and not prompt and is_stepped(model):
                return engine.Steps(model).outputs(tokens, cache)
            y: mx.array = body(tokens, cache=cache)
            return y

        if not prompt:  # the second token of a sequence, for which a graph takes a cache
            twin(model, lambda path, array: array)(mx.zeros((1, 1), mx.int32), cache=cache)
            blank([*leaves(cache)])
        trace = mx.compile(run) if on_host else run
        trace(mx.zeros((1, prompt or 1), mx.int32))
    except Exception as error:  # a model of another kind, of which nothing is known
        note("calibration", "not traced", f"{type(model).__name__}: {error}")
        return False
    return True


def compile_kernels(model: nn.Module) -> None:
    """Compile what a converted model launches for a token, a short and a long prompt."""
    if not device_of().stock_compiles:
        return
    with compiled_in_parallel(waits=False), recording():
        for prompt in _PROMPTS:
            asked_by(model, prompt)
    advance_epoch()  # so that whoever launches one of them binds it, and waits for it


def records_of(asked: Iterable[Record], searched: bool = True) -> list[Record]:
    """Records in their order, one of those that share results.

    Records whose configuration on this backend is no family's are left out and, if ``searched``,
    those that have no other configuration.
    """
    found: dict[str, Record] = {}
    for record in asked:
        config = record.heuristic(backend())
        if not isinstance(config, record.configs):
            continue
        if not searched or record.values.keys() & record.fields(config):
            found.setdefault(record.key, record)
    return list(found.values())
