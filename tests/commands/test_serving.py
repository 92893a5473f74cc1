"""Requests to mlx-lm's server: bad ones get 400 and harm no other; it ends cleanly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlx_qlayers import convert_model
from mlx_qlayers.commands.ranges import RANGES
from mlx_qlayers.commands.requests import NUMBERS
from mlx_qlayers.conversion.kv_mixture import value_mixture
from mlx_qlayers.decode.quantized_caches import CacheFormat, PackedKVCache
from tests.forks import Command

COMMAND = [sys.executable, "-m", "mlx_qlayers", "server"]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def serving(
    model: Path, *arguments: str, log: Path = Path(os.devnull), forked: bool = True
) -> Iterator[tuple[str, Any]]:
    """The address of a server and its process, from when it answers; what it says is in a file.

    A forked one ends without Python's last steps.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--model", str(model), "--port", str(port), "--max-tokens", "3", *arguments]
    with log.open("w") as said:
        process: Any = (
            Command(["server", *options], log)
            if forked
            else subprocess.Popen([*COMMAND, *options], stderr=said)
        )
    try:
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def address(exact_model, tmp_path_factory):
    """Of a server that an interrupt ends in the end."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(folder / "cache"))
        log = folder / "log"
        with serving(exact_model, "--log-level=CRITICAL", log=log, forked=False) as (at, process):
            yield at
            interrupt(process, log)


def interrupt(process: subprocess.Popen[bytes], log: Path) -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    text = log.read_text()
    assert "Traceback" not in text and "terminate" not in text


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


def ask(address: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and answer; a body of bytes is sent as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        answer = urllib.request.urlopen(
            urllib.request.Request(address + path, data, headers), timeout=60
        )
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, json.loads(answer.read())


def check_health(address: str) -> None:
    status, answer = ask(address, COMPLETE, {"prompt": "a"})
    assert status == 200 and answer["choices"][0]["text"] is not None


USER = {"role": "user", "content": "a"}
BAD: list[tuple[str, Any, str]] = [
    (COMPLETE, {"prompt": "a", "logit_bias": {"1000000": 1}}, "no token 1000000"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"-1": 1}}, "tokens as names"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"1": None}}, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"1": 10**400}}, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"one": 1}}, "logit_bias"),
    (COMPLETE, {"prompt": "a", "logit_bias": [1]}, "logit_bias must be an object"),
    (COMPLETE, {"prompt": ""}, "prompt is empty"),
    (COMPLETE, {"prompt": ["a"]}, "prompt must be a string"),
    (COMPLETE, {"prompt": "\ud800"}, "tokenized"),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": "a", "stop": 5}, "stop"),
    (COMPLETE, {"prompt": "a", "stop": [5]}, "stop"),
    (COMPLETE, {"prompt": "a", "stop": [["a"]]}, "stop"),
    (COMPLETE, {"prompt": "a", "stop": {"a": 1}}, "stop"),
    (COMPLETE, {"prompt": "a", "stop": ["a", ""]}, "stop"),
    (COMPLETE, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": "7"}, "max_tokens"),
    (COMPLETE, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETE, {"prompt": "a", "temperature": 10**400}, "temperature"),
    (COMPLETE, {"prompt": "a", "temperature": float("nan")}, "temperature"),
    (COMPLETE, {"prompt": "a", "presence_penalty": float("inf")}, "presence_penalty"),
    (COMPLETE, {"prompt": "a", "top_k": 10**9, "temperature": 1}, "top_k"),
    (COMPLETE, {"prompt": "a", "seed": -1}, "seed"),
    (COMPLETE, {"prompt": "a", "seed": 1.5}, "seed"),
    (COMPLETE, {"prompt": "a", "temperature": 1, "top_k": True}, "top_k must be a whole number"),
    (COMPLETE, {"prompt": "a", "temperature": 1, "xtc_threshold": 0.9}, "from 0 to 0.5"),
    (COMPLETE, {"prompt": "a", "temperature": 1, "top_p": 1e-300}, "top_p"),
    (COMPLETE, {"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty"),
    (COMPLETE, {"prompt": "a", "stop": ["ab"] * 65}, "stop must have at most 64"),
    (COMPLETE, {"prompt": "a", "stop": "a" * 1025}, "stop must have at most 64"),
    (COMPLETE, {"prompt": "a", "model": 5}, "model must be a string"),
    (COMPLETE, {"prompt": "a", "draft_model": [5]}, "draft_model must be a string"),
    (COMPLETE, {"prompt": "a", "stream_options": {"include_usage": True}, "stream": 1}, "stream"),
    (COMPLETE, {"prompt": "a", "stream_options": {"x": 1}, "stream": True}, "include_usage"),
    (COMPLETE, {"prompt": "a", "stream_options": {}, "stream": True}, "include_usage"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": "a"}, "messages must be a list"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, {"messages": ["a"]}, "messages must be objects"),
    (CHAT, {"messages": [{"content": "a"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "parts"),
    (CHAT, {"messages": [USER], "role_mapping": "a"}, "role_mapping"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": 5}, "chat_template_kwargs"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"return_dict": True}}, "return_dict"),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"chat_template": "a"}}, "chat_template"),
    (CHAT, {"messages": [USER], "tools": json.loads("[" * 66 + "]" * 66)}, "inside each other"),
    (COMPLETE, b"\xff\xfe", "utf-8"),
    (COMPLETE, b"[" * 100_000, "recursion"),
    (COMPLETE, b'{"prompt": 1', "bad request"),
    (COMPLETE, b"[]", "object"),
    (COMPLETE, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "bad request"),
]


@pytest.mark.parametrize(("path", "body", "says"), BAD, ids=lambda x: str(x)[:60])
def test_bad_requests_are_refused(path, body, says, address):
    status, answer = ask(address, path, body)
    assert status == 400
    assert says in answer["error"]
    check_health(address)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_numbers_of_any_size_are_answered(name, address):
    """Those with an effect, so that they are used; the largest that is allowed is served."""
    base = {"prompt": "abc", "temperature": 1, "repetition_penalty": 1.1, "xtc_probability": 0.5}
    base |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "logprobs": True}
    allowed = RANGES[name]
    # A generation that goes on for as many tokens as it may would not end.
    for value in {0, 1, -1, 2**31, 2**40, 2**62, 2**63, 10**400, 1e308, 1e-308, allowed.low} | (
        set() if name.startswith("max_") else {allowed.high}
    ):
        inside = name == "seed" and type(value) is int and 0 <= value < 2**64
        status, answer = ask(address, COMPLETE, base | {name: value})
        assert status in (200, 400), value
        if abs(value) >= 2**31 and not inside:
            assert status == 400 and name in answer["error"], value
    check_health(address)


@pytest.mark.parametrize(("length", "status"), [("-1", 400), ("x", 400), ("9" * 30, 413)])
def test_lengths_are_checked(length, status, address):
    assert ask(address, COMPLETE, b"{}", **{"Content-Length": length})[0] == status
    check_health(address)


def test_good_requests_are_served(address):
    for body in (
        {"prompt": "a", "logit_bias": {"7": 100}, "top_k": 3, "temperature": 1, "seed": 2**63 - 1},
        {"prompt": "a", "stop": "x", "temperature": 1e-5, "top_logprobs": 2},
        {"prompt": "a", "stop": ["x", "yz"], "logprobs": True, "max_tokens": None},
        {"prompt": "a", "stop": None, "repetition_penalty": 1e-4, "messages": None},
    ):
        expected = 400 if "max_tokens" in body else 200  # mlx-lm takes no null there
        assert ask(address, COMPLETE, body)[0] == expected, body


def test_the_served_model_is_listed_without_a_cache(address, exact_model):
    for path, ids in (("", [str(exact_model)]), ("/nobody/nothing", [])):
        with urllib.request.urlopen(f"{address}/v1/models{path}") as answer:
            listed = json.loads(answer.read())
        assert listed["object"] == "list" and [each["id"] for each in listed["data"]] == ids


def test_a_seed_waits_for_nobody(address):
    """And gives the same text beside others as alone."""
    asked: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 7}

    def text(seed: int) -> str:
        return ask(address, COMPLETE, asked | {"seed": seed})[1]["choices"][0]["text"]

    alone, other = text(7), text(8)
    with start(address, "b") as client:
        assert client.recv(10)
        beside = text(7)
        client.setblocking(False)
        assert client.recv(1 << 20)  # it is still generated for
    assert beside == alone != other


ROTATED = CacheFormat(32, 8, 4, hadamard=True)


@pytest.mark.parametrize(
    ("options", "caches"),
    [
        (["--kv-bits=8"], lambda *_: [QuantizedKVCache(32, 8) for _ in range(2)]),
        (["--kv-bits=8,4", "--kv-rotate"], lambda *_: [PackedKVCache(form=ROTATED) for _ in "ab"]),
        (
            ["--kv-bits-per-value=7", "--kv-rotate"],
            lambda *of: [PackedKVCache(form=f) for f in value_mixture(*of, 7.0, form=ROTATED)],
        ),
    ],
)
def test_quantized_caches_are_batched(options, caches, exact_model):
    """Beside a long text; each text is that of the model alone with such a cache."""
    prompts = ["Once upon a time", "One day", "Perhaps some accident has befallen him, said the"]
    model, tokenizer = mlx_lm.load(str(exact_model))
    if "--kv-rotate" in options:  # which stock attention does not take
        convert_model(model)
    wanted = []
    for prompt in prompts:
        cache = caches(model, tokenizer)
        text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=cache)
        wanted.append(text)
    with serving(exact_model, *options, "--kv-group-size=32") as (address, _):
        with start(address, "b") as client, ThreadPoolExecutor(3) as pool:
            assert client.recv(10)
            bodies = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts]
            for _ in range(2):  # the second time behind prompts whose caches are held
                answers = [*pool.map(lambda body: ask(address, COMPLETE, body)[1], bodies)]
                assert [answer["choices"][0]["text"] for answer in answers] == wanted
            client.setblocking(False)
            assert client.recv(1 << 20)  # it is still generated for
        assert all(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)


def test_a_prompt_that_is_held_whole_is_served(address):
    read = []
    for letter in "abcdefgh":
        prompt = f"The {letter}"
        body = {"prompt": prompt, "max_tokens": 1}
        said = ask(address, COMPLETE, body)[1]["choices"][0]["text"]
        status, answer = ask(address, COMPLETE, body | {"prompt": prompt + said})
        assert status == 200
        usage = answer["usage"]
        read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert 1 in read


def test_an_interrupt_ends_it_while_it_generates(tiny_model, tmp_path):
    log = tmp_path / "log"
    running = serving(tiny_model, log=log, forked=False)
    with running as (address, process), start(address, "a") as client:
        assert client.recv(10)
        interrupt(process, log)
