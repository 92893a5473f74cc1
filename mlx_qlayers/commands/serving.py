"""mlx-lm's server, which answers every request and goes on, whatever one of them was.

An invalid request is answered with 400 and a message, before the thread that generates for all has
it. An error in that thread is answered with 503 to those it generated for; then it
begins anew, and after several errors in a row the process ends.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread, local
from typing import Any, cast
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import CacheNotFound
from mlx_lm import server
from mlx_lm.generate import make_stop_sequences, make_text_state_machine
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..conversion.checkpoint import check_adapter
from ..conversion.loading import check_model
from ..runtime.memory import return_memory
from .requests import BadRequest, check_body

_LARGEST_BODY = 256 << 20  # bytes; images come inside
_ERRORS = 3  # in a row, with no token between, after which the generation thread gives up
_RESTS = 5  # times that nobody asks for anything, a tenth of a second each
_TIMEOUT = 120.0  # seconds without a byte from a client, or room for one
_serve, _make_sampler = server._run_http_server, server._make_sampler
_client = local()  # the connection of the request that a thread answers


class UnavailableError(RuntimeError):
    """The generation thread has failed, or is gone."""


class ModelProvider(server.ModelProvider):
    """mlx-lm's, with what it will load and bind checked before the server starts."""

    def __init__(self, cli_args: argparse.Namespace) -> None:
        if cli_args.adapter_path is not None:
            check_adapter(Path(cli_args.adapter_path))
        if mx.distributed.init().rank() == 0:
            _check_address(cli_args.host, cli_args.port)
        if cli_args.model is not None:
            check_model(cli_args.model, trust_remote_code=cli_args.trust_remote_code)
        super().__init__(cli_args)


def _check_address(host: str, port: int) -> None:
    """Bind it for a moment, as the server will when it has begun to load the model."""
    options: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    family, kind, _, _, address = socket.getaddrinfo(host, port, **options)[0]
    with socket.socket(family, kind) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)


class PromptCache(LRUPromptCache):
    """mlx-lm's; a prompt whose every token is held still has its last one to be read."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if rest or cache is None:
            return cache, rest
        if len(tokens) > 1 and can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]
        return None, tokens


class Answers(Queue):
    """The queue of answers to a request, open for as long as its client is there."""

    left = False

    def put(self, item: Any, *args: Any, **options: Any) -> None:
        super().put(item, *args, **options)
        if self.left and isinstance(item, server.GenerationContext):
            item.stop()

    def leave(self) -> None:
        """Nobody listens any more: the generation, begun or not, is to end."""
        self.left = True  # before what is there is taken, as put() looks in the other order
        with suppress(Empty):
            while True:
                if isinstance(item := self.get_nowait(), server.GenerationContext):
                    item.stop()


class ResponseGenerator(server.ResponseGenerator):
    """mlx-lm's, with the checks that need the model and its tokenizer."""

    failure: BaseException | None = None  # what ended it for good
    singly = False  # whether requests are served one by one, as those with heads are
    # Whether a draft model guesses in batches, and a request with another number of guesses is
    # served alone.
    guesses = False
    context: int | None = None  # the most tokens of a prompt and its text
    _errors, _started = 0, False  # errors in a row; whether the first model was loaded
    _idle = 0  # how often nobody had asked for anything, in a row
    _measured: tuple[Any, Any] = None, None  # the sizes of a model, by its key

    def __init__(self, model_provider: ModelProvider, prompt_cache: LRUPromptCache) -> None:
        self._serving: WeakSet[Answers] = WeakSet()
        self._cache_size = prompt_cache.max_size
        super().__init__(model_provider, prompt_cache)

    def _run_generate(self) -> None:
        # MLX's compiled functions take the interpreter's lock when their thread ends, and abort
        # where that has ended first: the thread that generates waits for the process to end.
        over = Event()

        def generate() -> None:
            try:
                while self.failure is None and not self._stop:
                    self._generate_until_error()
            finally:
                over.set()
            Event().wait()

        Thread(target=generate, daemon=True).start()
        over.wait()

    def _generate_until_error(self) -> None:
        try:
            self._generate()
        except BaseException as error:
            logging.exception("an error ended all generation")
            self._errors += 1
            for answers in list(self._serving):
                answers.put(UnavailableError(f"{type(error).__name__}: {error}; try again"))
            # Ranks generate in step: one cannot begin anew by itself.
            if self._errors == _ERRORS or not self._started or self._is_distributed:
                self.failure = error
        self._serving.clear()
        if not self._stop:
            self.prompt_cache = PromptCache(self._cache_size)
        return_memory()  # of the caches of the batch

    def generation_available(self) -> bool:
        return self._generation_thread.is_alive() and self.failure is None

    def join(self) -> None:
        super().join()
        if self._rank == 0:  # another rank fails as rank 0 ends, which is no failure
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what ended the generation thread for good, if anything did."""
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is not None:
            raise UnavailableError(f"the generation thread ended: {self.failure!r}")

    def generate(self, *args: Any, **options: Any) -> Any:
        if not self.generation_available():
            raise UnavailableError("the server ends")
        context, responses = super().generate(*args, **options)

        def noted() -> Iterator[Any]:
            for response in responses:
                self._errors = 0
                yield response

        return context, noted()

    def _next_request(self, timeout: float | None = None) -> Any:
        self._started = True
        request = super()._next_request(timeout)
        self._idle = self._idle + 1 if request is None and timeout is not None else 0
        if self._idle == _RESTS:  # what generation has freed goes back to the system
            return_memory()
        if request is None or (request[0].left and not self._is_distributed):
            return None
        self._serving.add(request[0])
        return request

    def _await_response(self, response_queue: Answers) -> Any:
        while True:
            if _has_left(getattr(_client, "connection", None)):
                response_queue.leave()
                raise ConnectionAbortedError("the client has left")
            with suppress(Empty):
                return response_queue.get(timeout=1.0)
            if not self.generation_available():
                raise UnavailableError("the server ends")

    def _is_batchable(self, args: Any) -> bool:
        # One with a seed too: its sampler has random numbers of its own.
        provider = self.model_provider
        if self.singly or not self.guesses or provider.model is None:
            return provider.is_batchable and not self.singly
        same = args.num_draft_tokens == self.cli_args.num_draft_tokens
        return same and all(hasattr(c, "merge") for c in server.make_prompt_cache(provider.model))

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        # Here an error reaches the request alone; in later steps it would end the thread.
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
            make_stop_sequences(tokenizer, args.stop_words)
            make_text_state_machine(tokenizer, args.stop_words)
        except Exception as error:
            raise BadRequest(f"it cannot be tokenized: {type(error).__name__}: {error}") from error
        prompt = tokenized[0]
        if not isinstance(prompt, list) or not all(isinstance(t, int) for t in prompt):
            raise BadRequest("it cannot be tokenized: the template gives no list of tokens")
        if not prompt:
            raise BadRequest("the prompt has no tokens")
        self._check_sizes(prompt, args)
        return tokenized

    def _check_sizes(self, prompt: list[int], args: Any) -> None:
        """Check what MLX would index by, which it does unseen."""
        vocabulary, positions = self._sizes()
        if positions is not None:
            if len(prompt) >= positions:
                raise BadRequest(
                    f"the prompt has {len(prompt)} tokens, and the model's context {positions}"
                )
            args.max_tokens = min(args.max_tokens, positions - len(prompt))
        bias, top = args.logits.logit_bias or {}, max(args.sampling.top_k, args.top_logprobs)
        if bias or top > 0:
            if outside := [token for token in bias if not 0 <= token < vocabulary]:
                raise BadRequest(f"logit_bias: no token {outside[0]}; the last is {vocabulary - 1}")
            if top >= vocabulary:
                raise BadRequest(f"top_k and top_logprobs must be below {vocabulary}, not {top}")

    def _sizes(self) -> tuple[int, int | None]:
        """The number of logits, which may be another than that of tokens, and of positions."""
        provider, model = self.model_provider, cast(Any, self.model_provider.model)
        if self._measured[0] != provider.model_key:
            limits = [n for n in (_positions(model), self.context) if n is not None]
            sizes = model(mx.array([[0]])).shape[-1], min(limits, default=None)
            self._measured = provider.model_key, sizes
        return self._measured[1]


def _positions(model: nn.Module) -> int | None:
    """How many positions a model has learned, where it looks them up in a table."""
    tables = [
        module["weight"].shape[0]
        for path, module in model.named_modules()
        if "weight" in module and re.search(r"(^|\.)(wpe|\w*pos\w*)$", path)
        if isinstance(module, nn.Embedding)
    ]
    return min(tables, default=None)


def make_sampler(args: Any, tokenizer: Any) -> Any:
    """mlx-lm's sampler; where the request has a seed, with a state of random numbers of its own."""
    sampler = _make_sampler(args, tokenizer)
    if args.seed is None:
        return sampler
    own = mx.random.key(args.seed)

    def sample(logits: mx.array) -> mx.array:
        others = _exchanged(own)
        try:
            return sampler(logits)
        finally:
            own[:] = _exchanged(others)

    sample.key = own  # type: ignore[attr-defined]  # guesses put it back
    return sample


def _exchanged(key: mx.array) -> mx.array:
    """Put a key in the place of MLX's, which cannot be another array; what was there."""
    state = cast(list[mx.array], mx.random.state)[0]
    before = mx.array(state)
    state[:] = key
    return before


def _has_left(connection: socket.socket | None) -> bool:
    """Whether a client has closed its connection, seen without waiting."""
    if connection is None:
        return False
    try:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


class APIHandler(server.APIHandler):
    """mlx-lm's, with the checks that need the request alone, and an answer to every error."""

    timeout = _TIMEOUT

    def do_POST(self) -> None:
        if (length := self.headers.get("Content-Length")) is None:
            return self._refuse(411, "Content-Length is required")
        if not (length.isascii() and length.isdecimal()):
            return self._refuse(400, f"Content-Length must be a number, not {length!r}")
        if int(length[:20]) > _LARGEST_BODY:
            return self._refuse(413, f"a request has at most {_LARGEST_BODY} bytes, not {length}")
        text = self.rfile.read(int(length))
        try:
            check_body(json.loads(text.decode()))
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"bad request: {error}")
        self.rfile, _client.connection = io.BytesIO(text), self.connection
        super().do_POST()

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        try:
            super().handle_completion(request, stop_words)
        except OSError:  # the client has left
            self.close_connection = True
        except Exception as error:
            # Of a stream the headers have left; those of one answer have not.
            if self.stream:
                event = {"error": {"message": str(error), "code": _status(error)}}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            else:
                self._headers_buffer: list[bytes] = []
                self._refuse(_status(error), str(error))

    def _set_completion_headers(self, status_code: int = 200) -> None:
        # mlx-lm answers every error of the generation thread with 404.
        error = sys.exception()
        if status_code == 404 and error is not None:
            status_code = _status(error)
        super()._set_completion_headers(status_code)

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
        super()._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


def _status(error: BaseException) -> int:
    """The status of an answer that an error leads to."""
    if isinstance(error, UnavailableError):
        return 503
    if isinstance(error, BadRequest | json.JSONDecodeError):
        return 400
    return 404 if isinstance(error, OSError | ValueError) else 500  # of a model that was asked for


def serve(host: str, port: int, response_generator: ResponseGenerator) -> None:
    """Serve until an interrupt or a failure; however this ends, the generation thread ends too."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def service_actions(self) -> None:
            if response_generator.failure is not None:
                time.sleep(1)  # for those who wait for an answer
                response_generator.raise_failure()

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), OSError):  # else the client has left
                super().handle_error(request, client_address)

    try:
        _serve(host, port, response_generator, server_class=Server, handler_class=APIHandler)
    finally:
        response_generator.stop_and_join()
