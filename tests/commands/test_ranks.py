"""Commands on two ranks, of which one comes to an end before the other."""

from __future__ import annotations

import os
import signal
import sys
import threading

import mlx.core as mx
import mlx_lm.generate
import pytest
from ranks import run
from tiny_model import save_tiny_model

from mlx_qlayers import cli


def generate(path: str, number: int) -> None:
    """Both ranks generate; the second time the second one gets a signal when it has begun."""
    rank, stream = mx.distributed.init().rank(), mlx_lm.stream_generate

    def begun(*args, **options):
        for i, response in enumerate(stream(*args, **options)):
            if i == 20 and rank == 1:
                threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
            yield response

    mlx_lm.stream_generate = begun
    for tokens in (9, 1 << 20):
        arguments = ["--prompt", "Once", "--max-tokens", str(tokens), "--backend", "ops"]
        assert cli.main(["generate", "--model", path, *arguments]) == 0
        assert sys.stdout.name == (os.devnull if rank else "<stdout>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(save_tiny_model(path, endless=True, max_position_embeddings=1 << 20))


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "rank 1 is gone: it was killed"), (signal.SIGINT, "rank 1 was interrupted")],
)
def test_all_end_with_one(model: str, number: int, what: str) -> None:
    with pytest.raises(AssertionError) as error:
        run("tests/commands/test_ranks.py", "generate", 2, model, number)
    said = str(error.value)
    assert said.count("text: 9 tokens") == 1
    assert said.count("mlx-qlayers: error") == 1 and what in said
    assert "go on without" not in said
