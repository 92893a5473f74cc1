"""Requests to a server that runs: each is answered, or refused, and it goes on."""

import atexit
import contextlib
import json
import tempfile
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

from tests.commands.test_serving import CHAT, COMPLETE, check_health, serving
from tests.fuzz.documents import Damage, damaged, spoilt_bytes, spoilt_document
from tests.fuzz.target import fuzz
from tests.tiny_model import save_tiny_model

# The answers of a server that goes on.
_ANSWERS = (200, 400, 404, 411, 413)
_BODY: dict[str, Any] = {
    "prompt": "a",
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "repetition_penalty": 1.1,
    "repetition_context_size": 4,
    "presence_penalty": 0.1,
    "presence_context_size": 5,
    "frequency_penalty": 0.1,
    "frequency_context_size": 6,
    "num_draft_tokens": 2,
    "stream_options": {"include_usage": True},
    "role_mapping": {"user": "U: "},
    "logit_bias": {"7": 1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x", "yz"],
    "stream": True,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.1,
    "chat_template_kwargs": {"a": 1},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


@cache
def _address() -> str:
    """A server of the small model, until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = save_tiny_model(folder / "model")
    return stack.enter_context(serving(model, "--log-level", "CRITICAL"))[0]


def sent(address: str, path: str, data: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    try:
        answer = urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.read()


@fuzz(damaged(CHAT, COMPLETE), examples=90, seconds=4)
def test_server_requests(case: Damage) -> None:
    body = spoilt_document(_BODY, case.edits)
    if isinstance(body, dict):  # no longer texts
        body["max_tokens"] = 3
    data = spoilt_bytes(json.dumps(body).encode(), case.cuts)
    status, text = sent(_address(), case.name, data)
    assert status in _ANSWERS, (status, text)
    if text.startswith((b"data: ", b": keepalive")):  # a whole stream
        assert text.endswith(b"data: [DONE]\n\n"), text
        parts = [line[6:] for line in text.splitlines() if line.startswith(b"data: {")]
        assert not any("error" in json.loads(part) for part in parts), text
    else:
        assert isinstance(json.loads(text), dict)
    check_health(_address())
