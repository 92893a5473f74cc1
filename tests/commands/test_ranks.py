"""Commands on two ranks, of which one comes to an end before the other, and what they tell then."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm.generate
import pytest
from commands.test_borrowed import texts
from commands.test_serving import COMPLETE
from commands.test_serving import ask as post
from fine_tuning import Losses
from mlx_lm.generate import generation_stream
from numerics import assert_same_losses
from ranks import run
from tiny_model import save_tiny_model

from mlx_qlayers import cli, explain
from mlx_qlayers.commands import rank_watch
from mlx_qlayers.runtime.ranks import gathered


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
        arguments = ["--prompt", "Once", "--max-tokens", str(tokens), "--backend", "reference"]
        assert cli.main(["generate", "--model", path, *arguments]) == 0
        assert sys.stdout.name == (os.devnull if rank else "<stdout>")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return str(save_tiny_model(path, endless=True, max_position_embeddings=1 << 20))


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "rank 1 is gone: it was killed"), (signal.SIGINT, "rank 1 was interrupted")],
)
def test_all_end_with_one(model, number, what):
    with pytest.raises(AssertionError) as error:
        run(generate, 2, model, number)
    said = str(error.value)
    assert said.count("text: 9 tokens") == 1
    assert said.count("mlx-qlayers: error") == 1 and what in said
    assert "go on without" not in said


def chat_and_serve(path: str, port: int) -> tuple[str, list[str], int]:
    """A chat of two questions, two requests at once, and the end by Ctrl-C."""
    steps_ahead()
    arguments = ["--model", path, "--max-tokens", "5", "--backend", "reference"]
    sys.stdin, sys.stdout = io.StringIO("Once\nr\nA cat\nq\n"), io.StringIO()
    printed, answers = sys.stdout, []
    assert cli.main(["chat", *arguments]) == 0

    def ask(prompt: str) -> None:
        _, answer = post(f"http://127.0.0.1:{port}", COMPLETE, {"prompt": prompt})
        answers.append(answer["choices"][0]["finish_reason"])

    def ask_both() -> None:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        threads = [threading.Thread(target=ask, args=(p,)) for p in ("Once upon a time", "A cat")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.kill(os.getpid(), signal.SIGINT)

    if mx.distributed.init().rank() == 0:
        threading.Thread(target=ask_both).start()
    code = cli.main(["server", *arguments, "--port", str(port)])
    return printed.getvalue(), answers, code


def test_chat_and_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = run(chat_and_serve, 2, "models/tales-qwen2", port)
    printed, answers, code = first
    assert printed.count("5 tokens") == 2 and "bye" in printed
    assert answers == ["length", "length"] and (code, second) == (0, ["", [], 0])


def lora(model: str, folder: str) -> tuple[list[float], list[str]]:
    """The loss of each step, of all ranks together, and where products were computed."""
    callback, module = Losses(), import_module("mlx_lm.lora")
    train = module.train

    def told(**options):
        train(**options | {"training_callback": callback})

    arguments = [f"--model={model}", "--train", f"--data={folder}/data", "--backend=host"]
    arguments += ["--iters=6", "--batch-size=4", "--num-layers=2", "--learning-rate=1e-3"]
    arguments += ["--val-batches=0", "--steps-per-report=1", f"--adapter-path={folder}/adapters"]
    explain(reset=True)
    with patch.object(module, "train", told):
        assert cli.main(["lora", *arguments]) == 0
    return callback.losses, [d.path for d in explain() if d.op == "quantized_matmul"]


def test_lora_has_the_losses_of_one(exact_model, tmp_path):
    """By kernels, whose gradients ranks average."""
    texts(tmp_path / "data")
    given = str(exact_model), str(tmp_path)
    one, _ = lora(*given)
    assert len(one) == 6 and one[-1] < 0.9 * one[0]
    for losses, paths in run(lora, 2, *given):
        assert_same_losses(losses, one)
        assert {*paths} == {"host"}


def steps_ahead() -> None:
    """A text has ended, and sums of the step after it do not mix with what ranks tell."""
    group = mx.distributed.init()
    for _ in range(5):
        with mx.stream(generation_stream):
            x = mx.ones(1 << 18)
            for _ in range(8):
                x = mx.distributed.all_sum(x, group=group) / 2
        mx.async_eval(x)
        assert gathered(group, f"this is {group.rank()}") == ["this is 0", "this is 1"]
        assert mx.all(x == 1)


@contextmanager
def watched() -> Iterator[tuple[Any, socket.socket]]:
    """A process that stands for rank 0, whose watch may end it, and rank 1's connection to that."""
    # It waits less than usual.
    watch = "from mlx_qlayers.commands import rank_watch as w; w.DOUBT = w.GRACE = 0.5; w.main()"
    program = f"import subprocess; subprocess.run({[sys.executable, '-c', watch, '0', '2']})"
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, rank_watch.TOKEN: "secret"},
    )
    assert rank.stdin and rank.stdout
    port = int(rank.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(b"1 secret\n")
        yield rank, other


@pytest.mark.parametrize("of_other", ["", "2 rank 1 is gone: it was killed or crashed"])
def test_a_lost_connection_is_not_the_cause_where_a_rank_ended(of_other):
    with watched() as (rank, other):
        for _ in range(40 if of_other else 0):  # a sign of life is not answered by one
            other.sendall(b"\n")
            time.sleep(0.02)
        assert not of_other or 0 < len(other.recv(1 << 12)) <= 3  # one a second
        rank.stdin.write("?2 rank 0: RuntimeError: connection lost\nbye\n")
        rank.stdin.flush()
        if of_other:
            other.sendall(f"{of_other}\n".encode())
        assert rank.stdout.read() == ""  # closed: the rank may go on
        said = "".join(iter(lambda: other.recv(1 << 12).decode(), "")).strip()
    _, printed = rank.communicate()
    if of_other:
        assert (
            said == of_other and printed == f"mlx-qlayers: error: {of_other[2:]}; all ranks end\n"
        )
        assert rank.returncode == -signal.SIGTERM
    else:
        assert said == "2 rank 0: RuntimeError: connection lost" and not printed
