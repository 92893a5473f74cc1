"""A small share of what ``make soak`` asks a server for."""

import asyncio

import mlx.core as mx
import pytest

from tests.load import load, model_in, server, texts


@pytest.mark.parametrize("invariant", [False, True])
def test_every_text_is_that_alone(invariant):
    """12 clients at a time, some of which leave or ask for what is refused.

    Batch-invariant ones in bfloat16, where a rounding of another order would show.
    """
    count, rounds = (16, 2) if invariant else (36, 3)
    with model_in(mx.bfloat16 if invariant else mx.float32, layers=2) as model:
        asked = texts(model, 8, 120, 16, invariant=invariant)
        with server(model, *["--batch-invariant"] * invariant) as (address, process):
            clients = load(address, process.pid, asked, count, rounds=rounds, at_once=12)
            report = asyncio.run(clients)
    assert not report.wrong
    assert report.tokens > 3 * count / 2 and len(report.health) > 5
