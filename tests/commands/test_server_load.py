"""A small share of what ``make soak`` asks a server for."""

import asyncio

import mlx.core as mx

from tests.load import load, model_in, server, texts


def test_every_text_is_that_alone():
    """12 clients at a time, some of which leave or ask for what is refused."""
    with model_in(mx.float32) as model:
        asked = texts(model, 8, 120, 16)
        with server(model) as (address, process):
            report = asyncio.run(load(address, process.pid, asked, 36, rounds=3, at_once=12))
    assert not report.wrong
    assert report.tokens > 100 and len(report.health) > 5
