"""The server goes on: after errors of its model, when clients leave, and beside long prompts."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from queue import Queue
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
import pytest
from commands.test_serving import COMPLETE, ask, check_health, rest, serving, start
from mlx_lm.generate import BatchGenerator as Stock
from small_qwen import qwen
from tiny_model import save_tiny_model

from mlx_qlayers.commands import serving as serving_module
from mlx_qlayers.commands.prompt_parts import BatchGenerator
from tests.forks import Command

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
def failing_model(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("failing") / "model", endless=True)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    (path / "own.py").write_text(_FAILING % (vocabulary["Z"], vocabulary["Q"]))
    config = json.loads((path / "config.json").read_text()) | {"model_file": "own.py"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_generation_begins_anew_after_errors_unless_there_are_many_in_a_row(
    failing_model, tmp_path
):
    log = tmp_path / "log"
    with serving(failing_model, "--trust-remote-code", log=log) as (address, process):
        for bad in (ERROR, EXIT, ERROR, EXIT):
            other = start(address, "a")
            assert other.recv(10)
            status, answer = ask(address, COMPLETE, {"prompt": bad})
            assert status == 503 and "try again" in answer["error"]
            # Who was generated for beside it is told so too.
            assert b'"code": 503' in rest(other)
            check_health(address)
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
        for _ in range(3):  # in a row
            assert ask(address, COMPLETE, {"prompt": ERROR})[0] == 503
        assert process.wait(30) == 2
    assert log.read_text().splitlines()[-1] == "mlx-qlayers: error: RuntimeError: no memory"


def test_a_model_that_cannot_be_loaded_ends_the_process(failing_model, tmp_path):
    log = tmp_path / "log"
    command = ["server", f"--model={failing_model}", "--port=0"]  # its code may not run
    assert Command(command, log).wait(60) == 2
    assert "trust_remote_code" in log.read_text().splitlines()[-1]


def test_clients_that_leave_make_room(failing_model):
    one = ["--decode-concurrency", "1", "--prompt-concurrency", "1", "--log-level", "CRITICAL"]
    with serving(failing_model, "--trust-remote-code", *one) as (address, _):
        first = start(address, "a", stream=False)
        time.sleep(0.5)
        queued = start(address, "b", stream=False)
        time.sleep(0.5)
        queued.close()
        first.close()
        check_health(address)


def test_memory_goes_back_where_nobody_asks(monkeypatch):
    """Half a second after the last text, once; and never between tokens."""
    returned: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: returned.append(len(asked)))
    generator = object.__new__(serving_module.ResponseGenerator)
    generator._is_distributed, generator._serving = False, WeakSet()
    generator.requests = Queue()
    asked: list[Any] = []
    for timeout in (None, *[0.0] * 4, None, *[0.0] * 9):
        asked.append(generator._next_request(timeout))
    assert returned == [10]
    generator.requests.put((serving_module.Answers(), None, None))
    for _ in range(6):
        asked.append(generator._next_request(0.0))
    assert returned == [10, 20]


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


def test_long_prompts_are_read_between_the_tokens_of_others(caplog):
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
