"""Commands on two ranks, of which one comes to an end before the other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import mlx.core as mx
import mlx_lm.generate
import pytest
from ranks import PATIENCE, run
from tiny_model import save_tiny_model

from mlx_qlayers import cli


def generate(path: str, number: int, tokens: int) -> list[object]:
    """Both ranks generate; the second one gets a signal as soon as it has begun, if any."""
    rank = mx.distributed.init().rank()
    stream = mlx_lm.stream_generate

    def begun(*args, **options):
        for i, response in enumerate(stream(*args, **options)):
            if i == 8 and rank == 1 and number:
                threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
            yield response

    mlx_lm.stream_generate = begun
    arguments = ["--prompt", "Once", "--max-tokens", str(tokens), "--no-calibrate"]
    code = cli.main(["generate", "--model", path, *arguments])
    return [code, sys.stdout.name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(save_tiny_model(path, endless=True, max_position_embeddings=1 << 20))


def test_rank_0_alone_prints(model: str) -> None:
    found, said = run("tests/commands/test_ranks.py", "generate", 2, model, 0, 9, said=True)
    assert [code for code, _ in found] == [0, 0]
    assert found[1][1] == os.devnull
    assert said.count("text: 9 tokens") == 1


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "rank 1 is gone: it was killed"), (signal.SIGINT, "rank 1 was interrupted")],
)
def test_all_end_with_one(model: str, number: int, what: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run("tests/commands/test_ranks.py", "generate", 2, model, number, 1 << 20)
    said = str(error.value)
    assert said.count("mlx-qlayers: error") == 1 and what in said
    assert "go on without" not in said and time.monotonic() - start < 60 + PATIENCE
