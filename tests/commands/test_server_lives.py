"""The server goes on: after errors of its model, when clients leave, and beside long prompts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from commands.test_serving import COMMAND, COMPLETE, ask, check_health, serving
from mlx_lm.generate import BatchGenerator as Stock
from mlx_lm.models.cache import make_prompt_cache
from small_qwen import qwen
from tiny_model import save_tiny_model

from mlx_qlayers.commands.prompt_parts import BatchGenerator
from mlx_qlayers.commands.serving import PromptCache

# A model that fails on some prompts, as mlx-lm loads its class from a file of the model.
_FAILING = """
from mlx_lm.models.qwen2 import Model as Sound, ModelArgs
ERRORS = {%d: RuntimeError("no memory"), %d: SystemExit("gone")}
class Model(Sound):
    def __call__(self, inputs, *args, **options):
        if inputs.shape[1] > 1:
            for token in set(inputs.flatten().tolist()) & set(ERRORS):
                raise ERRORS[token]
        return super().__call__(inputs, *args, **options)
"""
ERROR, EXIT = "ZZZ", "QQQ"


@pytest.fixture(scope="module")
def failing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("failing") / "model", endless=True)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    (path / "own.py").write_text(_FAILING % (vocabulary["Z"], vocabulary["Q"]))
    config = json.loads((path / "config.json").read_text()) | {"model_file": "own.py"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def start(address: str, prompt: str, tokens: int = 10**6, stream: bool = True) -> socket.socket:
    """Send a request, and read nothing of the answer."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": stream}).encode()
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(
        b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (COMPLETE.encode(), len(body))
    )
    client.sendall(body)
    return client


def rest(client: socket.socket) -> bytes:
    """All that a client is still sent."""
    with client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def health(address: str) -> int:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.status


def test_generation_begins_anew_after_errors(failing_model: Path) -> None:
    options = ["--trust-remote-code", "--log-level", "CRITICAL"]
    with serving(failing_model, *options) as (address, process):
        assert process.stderr is not None
        Thread(target=process.stderr.read, daemon=True).start()
        for bad in (ERROR, EXIT, ERROR, EXIT):
            other = start(address, "a")
            assert other.recv(10)
            status, answer = ask(address, COMPLETE, {"prompt": bad})
            assert status == 503 and "try again" in answer["error"]
            # Who was generated for beside it is told so too.
            assert b'"code": 503' in rest(other)
            check_health(address)
            assert health(address) == 200


def test_errors_in_a_row_end_the_process(failing_model: Path) -> None:
    with serving(failing_model, "--trust-remote-code") as (address, process):
        assert process.stderr is not None
        for _ in range(3):
            assert ask(address, COMPLETE, {"prompt": ERROR})[0] == 503
        assert process.wait(30) == 2
        text = process.stderr.read().decode()
        assert text.splitlines()[-1] == "mlx-qlayers: error: RuntimeError: no memory"


def test_a_model_that_cannot_be_loaded_ends_the_process(failing_model: Path) -> None:
    command = [*COMMAND, "--model", str(failing_model), "--port", "0"]  # its code may not run
    done = subprocess.run(command, timeout=60, check=False, capture_output=True)
    assert done.returncode == 2 and b"trust_remote_code" in done.stderr.splitlines()[-1]


def test_clients_that_leave_make_room(failing_model: Path) -> None:
    one = ["--decode-concurrency", "1", "--prompt-concurrency", "1", "--log-level", "CRITICAL"]
    with serving(failing_model, "--trust-remote-code", *one) as (address, _):
        first = start(address, "a", stream=False)
        time.sleep(0.5)
        queued = start(address, "b", stream=False)
        time.sleep(0.5)
        queued.close()
        first.close()
        check_health(address)


@pytest.fixture(scope="module")
def exact_address(exact_model: Path) -> Iterator[str]:
    with serving(exact_model, "--log-level", "CRITICAL") as (address, _):
        yield address


def test_a_seed_waits_for_nobody(exact_address: str) -> None:
    """And gives the same text beside others as alone."""
    asked: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 7}

    def text(seed: int) -> str:
        return ask(exact_address, COMPLETE, asked | {"seed": seed})[1]["choices"][0]["text"]

    alone, other = text(7), text(8)
    with start(exact_address, "b") as client:
        assert client.recv(10)
        beside = text(7)
        client.setblocking(False)
        assert client.recv(1 << 20)  # it is still generated for
    assert beside == alone != other


def test_a_prompt_that_is_held_whole_is_served(exact_address: str) -> None:
    read = []
    for letter in "abcdefgh":
        prompt = f"The {letter}"
        body = {"prompt": prompt, "max_tokens": 1}
        said = ask(exact_address, COMPLETE, body)[1]["choices"][0]["text"]
        status, answer = ask(exact_address, COMPLETE, body | {"prompt": prompt + said})
        assert status == 200
        usage = answer["usage"]
        read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert 1 in read


def test_caches_leave_a_token_to_be_read() -> None:
    model = qwen()
    held = PromptCache(4)
    for tokens in ([5], [1, 2, 3]):
        cache = make_prompt_cache(model)
        model(mx.array([tokens]), cache=cache)
        held.insert_cache("m", tokens, cache)
        found, left = held.fetch_nearest_cache("m", tokens)
        assert left == tokens[-1:]
        assert found is None or [c.offset for c in found] == [len(tokens) - 1] * len(found)


class Slow(nn.Module):
    """A model that takes 0.6 ms for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = qwen()

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        time.sleep(0.6e-3 * inputs.size)
        return self.inner(inputs, cache=cache)

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers


def texts(kind: type[Stock], prompts: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Sequences and tokens; the second prompt comes when the first one speaks."""
    generator = kind(Slow(), prefill_step_size=2048)
    generator.insert(prompts[:1], max_tokens=[60])
    begun = False
    while True:
        read, said = generator.next()
        for each in said:
            yield each.uid, each.token
            if not begun:
                begun = True
                generator.insert(prompts[1:], max_tokens=[3])
        if begun and not read and not said:
            return


def test_long_prompts_are_read_between_the_tokens_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [[5, 6, 7], [k % 90 for k in range(1500)]]
    meanwhile, found = {}, {}
    for kind in (Stock, BatchGenerator):
        with caplog.at_level("INFO"):
            said = [*texts(kind, prompts)]
        meanwhile[kind] = [uid for uid, _ in said].index(1)
        found[kind] = {u: [token for uid, token in said if uid == u] for u in (0, 1)}
    assert found[BatchGenerator] == found[Stock]
    assert meanwhile[BatchGenerator] > meanwhile[Stock] + 3
    logged = re.findall(
        r"Prompt of (\d+) tokens: (\d+) parts, the longest took (\S+) s", caplog.text
    )
    (short, long) = logged
    assert short[:2] == ("3", "1")
    assert long[0] == "1500" and int(long[1]) > 4 and 0 < float(long[2]) < 10
