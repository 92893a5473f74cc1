"""mlx-lm's server, with requests checked before the generation thread, which errors end, has them.

What a request is to blame for is answered with 400 and a message.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from collections.abc import Mapping
from threading import Event, Thread
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import CacheNotFound
from mlx_lm import server
from mlx_lm.generate import make_stop_sequences, make_text_state_machine

from ..conversion.loading import check_model

_LARGEST_BODY = 256 << 20  # bytes; images come inside
_LARGEST_NUMBER = 2**63
_serve = server._run_http_server
# The types of what mlx-lm does not check itself; null counts as absent.
_TYPES: Mapping[str, type] = {
    "prompt": str,
    "messages": list,
    "tools": list,
    "model": str,
    "draft_model": str,
    "role_mapping": dict,
    "stream_options": dict,
    "chat_template_kwargs": dict,
    "logit_bias": dict,
}
# Python counts true and false among the numbers, and so does mlx-lm; MLX does not.
_NUMBERS = re.compile(
    r"seed|temperature|(top|min)_[pk]|top_logprobs|num_draft_tokens|max_(completion_)?tokens"
    r"|(repetition|presence|frequency)_(penalty|context_size)|xtc_(probability|threshold)"
)
_NAMES: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}


class BadRequest(ValueError):
    """A request that cannot be served; the message says why."""


class ModelProvider(server.ModelProvider):
    """mlx-lm's, with the model's files checked before the server starts."""

    def __init__(self, cli_args: argparse.Namespace) -> None:
        if cli_args.model is not None:
            check_model(cli_args.model, trust_remote_code=cli_args.trust_remote_code)
        super().__init__(cli_args)


class ResponseGenerator(server.ResponseGenerator):
    """mlx-lm's, with the checks that need the model and its tokenizer."""

    _measured: tuple[Any, int] = None, 0  # a model and the number of its logits

    def _run_generate(self) -> None:
        # MLX's compiled functions take the interpreter's lock when their thread ends, and abort
        # where that has ended first: the thread that generates waits for the process to end.
        over, run = Event(), super()._run_generate

        def generate() -> None:
            run()
            over.set()
            Event().wait()

        Thread(target=generate, daemon=True).start()
        over.wait()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        # Here an error reaches the request alone; in later steps it would end the thread.
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
            make_stop_sequences(tokenizer, args.stop_words)
            make_text_state_machine(tokenizer, args.stop_words)
        except Exception as error:
            raise BadRequest(f"it cannot be tokenized: {type(error).__name__}: {error}") from error
        if not tokenized[0]:
            raise BadRequest("the prompt has no tokens")
        bias, top = args.logits.logit_bias or {}, max(args.sampling.top_k, args.top_logprobs)
        if bias or top > 0:
            size = self._vocabulary()
            if outside := [token for token in bias if not 0 <= token < size]:
                raise BadRequest(f"logit_bias: no token {outside[0]}; the last is {size - 1}")
            if top >= size:
                raise BadRequest(f"top_k and top_logprobs must be below {size}, not {top}")
        return tokenized

    def _vocabulary(self) -> int:
        """The number of logits, which may be another than the number of tokens."""
        model: Any = self.model_provider.model
        if self._measured[0] is not model:
            self._measured = model, model(mx.array([[0]])).shape[-1]
        return self._measured[1]


class APIHandler(server.APIHandler):
    """mlx-lm's, with the checks that need the request alone."""

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal():
            return self._refuse(400, f"Content-Length must be a number, not {length!r}")
        if int(length[:20]) > _LARGEST_BODY:
            return self._refuse(413, f"a request has at most {_LARGEST_BODY} bytes, not {length}")
        text = self.rfile.read(int(length))
        try:
            check_body(json.loads(text.decode()))
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"bad request: {error}")
        self.rfile = io.BytesIO(text)
        super().do_POST()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm answers every error of the generation thread with 404.
        bad = isinstance(sys.exception(), BadRequest)
        super()._set_completion_headers(400 if bad else status_code)

    def handle_models_request(self) -> None:
        """Answer with the model that is served, then those of the Hub's cache."""
        served = self.response_generator.cli_args.model
        wanted = "/".join(self.path.split("/")[3:])
        try:
            cached = [r.repo_id for r in server.scan_cache_dir().repos if r.repo_type == "model"]
        except CacheNotFound:
            cached = []
        ids = dict.fromkeys([*([served] if served else []), *sorted(cached)])
        data = [
            {"id": name, "object": "model", "created": self.created}
            for name in ids
            if wanted in ("", name)
        ]
        self._answer(200, {"object": "list", "data": data})

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": message})

    def _answer(self, status: int, value: object) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def serve(host: str, port: int, response_generator: ResponseGenerator) -> None:
    """Serve until an interrupt; however this ends, the generation thread ends too."""
    try:
        _serve(host, port, response_generator, handler_class=APIHandler)
    finally:
        response_generator.stop_and_join()


def check_body(body: Any) -> None:
    """Check the parts of a request that mlx-lm takes on trust.

    Args:
        body: the request, parsed.

    Raises:
        ValueError: something has a wrong type or value; the message names it.
    """
    if not isinstance(body, dict):
        raise ValueError("it must be a JSON object")
    for name, value in body.items():
        if (kind := _TYPES.get(name)) and not isinstance(value, kind | None):
            raise ValueError(f"{name} must be {_NAMES[kind]}")
        if isinstance(value, bool) and _NUMBERS.fullmatch(name):
            raise ValueError(f"{name} must be a number, not {str(value).lower()}")
        _check_number(name, value)
    for token, bias in (body.get("logit_bias") or {}).items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"logit_bias of {token} must be a number")
        _check_number(f"logit_bias of {token}", bias)
    threshold = body.get("xtc_threshold")
    if isinstance(threshold, int | float) and threshold > 0.5:  # mlx-lm's check takes up to 1
        raise ValueError(f"xtc_threshold must be at most 0.5, not {threshold}")
    if body.get("prompt") == "":
        raise ValueError("prompt is empty")
    if (seed := body.get("seed")) is not None and not (isinstance(seed, int) and seed >= 0):
        raise ValueError("seed must be a whole number of at least 0")
    stop = body.get("stop")
    words = stop if isinstance(stop, list) else [stop or "none"]
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError("stop must be a string or a list of strings that are not empty")
    if body.get("stream_options") and "include_usage" not in body["stream_options"]:
        raise ValueError("stream_options must have include_usage")
    if (messages := body.get("messages")) is not None:
        if not messages:
            raise ValueError("messages is empty")
        for message in messages:
            _check_message(message)


def _check_number(name: str, value: Any) -> None:
    # Whole numbers first: isfinite overflows at large ones.
    if isinstance(value, int | float) and not (
        abs(value) < _LARGEST_NUMBER and math.isfinite(value)
    ):
        raise ValueError(f"{name} must be finite and below 2**63 in size")


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages must be objects with a role")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ValueError("the content of a message must be a string or a list")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("the parts of a message must be objects with a type")
