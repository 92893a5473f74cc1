"""Command lines that nobody would type."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category
from unittest import mock

import mlx.core as mx
from command_line import outcome
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, save_prompt_cache

from mlx_qlayers import cli
from tests.commands.test_arguments import OPTIONS, REQUIRED
from tests.fuzz.documents import Damage, damaged, spoilt_bytes
from tests.fuzz.target import fuzz
from tests.tiny_model import save_tiny_model

_COMMANDS = ["generate", "chat", "server", "lora", "convert", "tune", "bench", "info", "demo"]
_COMMANDS += ["quantize", "perplexity"]
# Those with a value are in a table.
_FLAGS = ["--stock", "--no-fuse", "--no-calibrate", "--list", "--clear", "--quick", "--traceback"]
_FLAGS += ["--help", "-h", "--version", "--trust-remote-code", "--", "-"]
_OPTIONS = sorted({option for _, option in OPTIONS} | {*_FLAGS})
_VALUES = st.one_of(
    st.sampled_from(["", " ", "0", "-1", "1e999", "nan", "99999999999999999999", "/no/where"]),
    st.sampled_from(["\udcff", "\x1b[31m", "\x00", "a\nb", "é" * 2000, "%s", "{}", "@f"]),
    st.text(max_size=8),
)


@dataclass(frozen=True)
class Line:
    """The arguments after the command's name."""

    arguments: tuple[str, ...]


_WORD = st.one_of(st.sampled_from(_OPTIONS), _VALUES, st.sampled_from(_COMMANDS))
_LINES = st.tuples(
    st.one_of(st.sampled_from(_COMMANDS), st.sampled_from(_COMMANDS), _VALUES),
    st.lists(_WORD, max_size=6),
).map(lambda both: Line((both[0], *both[1])))


@fuzz(_LINES, examples=40)
def test_command_lines(case: Line) -> None:
    """Valid command lines are not run: the commands' own tests do that."""
    with contextlib.ExitStack() as stack:
        for module in cli._COMMANDS:
            stack.enter_context(mock.patch.object(module, "run", lambda args: None))
        check_line(*case.arguments)


def check_line(*arguments: str) -> None:
    """An error is foreseen, and takes one line."""
    code, _, text = outcome(*arguments)
    assert code in (0, 2), code
    if code == 2:
        assert text.startswith("mlx-qlayers") and text.endswith("\n"), text
        assert text.count("\n") == 1, text
        odd = [c for c in text if category(c) == "Cc" and c != "\n"]
        assert not odd, f"prints {odd[:3]}"
        kinds = "Type|Attribute|Key|Index|Assertion|Overflow|Memory"
        assert not re.match(rf"mlx-qlayers: error: ({kinds})Error", text), text


class Begun(RuntimeError):
    """The work of a command."""


@cache
def _model() -> str:
    return str(save_tiny_model(Path(tempfile.mkdtemp(prefix="fuzz-")) / "model"))


@contextlib.contextmanager
def before_work() -> Iterator[Path]:
    """A folder to be in, where no command does more than to look at its arguments."""

    def work(*args: Any, **options: Any) -> None:
        raise Begun("work has begun")

    def offline(*args: Any, **options: Any) -> None:
        raise LocalEntryNotFoundError("nothing is downloaded")

    names = ["mlx_lm.utils.load_model", "mlx_lm.server.run"]
    names += [f"mlx_qlayers.commands.{name}.run" for name in ("bench", "doctor")]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name, work))
        stack.enter_context(mock.patch("huggingface_hub.snapshot_download", offline))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.chdir(folder))
        yield Path(folder)


_NUMBER = st.one_of(
    st.integers(-3, 70).map(str),
    st.floats().map(str),
    st.sampled_from([str(2**k + d) for k in (31, 32, 53, 63, 64) for d in (-1, 0, 1)]),
    st.sampled_from(["9" * 5000, "1_0", "0x10", "1e-320", "-0", "+1", "1e", "\u0663"]),
)
_OPTION = st.tuples(st.sampled_from(sorted(OPTIONS)), st.one_of(_NUMBER, _NUMBER, _VALUES))


@fuzz(st.lists(_OPTION, min_size=1, max_size=3), examples=60, seconds=3)
def test_option_values(case: list[tuple[tuple[str, str], str]]) -> None:
    """Every option of every command, those of mlx-lm's too."""
    command = case[0][0][0]
    given = [f"{option}={value}" for (of, option), value in case if of == command]
    needed = [_model() if word == "m" else word for word in REQUIRED.get(command, [])]
    if command in ("chat", "server", "lora", "fuse", "info", "tune", "demo"):
        needed = ["--model", _model()]
    with before_work():
        check_line(command, *needed, *given)


_LORA = {
    "train": True,
    "iters": 5,
    "learning_rate": 1e-5,
    "num_layers": 2,
    "seed": 0,
    "data": ".",
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "optimizer_config": {"adam": {"betas": [0.9, 0.98]}},
    "lr_schedule": {"name": "cosine_decay", "warmup": 2, "arguments": [1e-5, 5]},
    "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
}
_FILES = {
    "lora.yaml": ["lora", "-c"],
    "cache.safetensors": ["generate", "--prompt", "p", "--prompt-cache-file"],
    "words.txt": ["perplexity", "--text"],
    "more.txt": ["quantize", "--mlx-path", "out", "--text"],
    "train.jsonl": ["lora", "--train", "--data", ".", "--resume-adapter-file"],
}


@cache
def _prompt_cache() -> bytes:
    held = KVCache()
    held.update_and_fetch(*[mx.zeros((1, 2, 3, 32))] * 2)
    with tempfile.TemporaryDirectory() as folder:
        save_prompt_cache(
            f"{folder}/c.safetensors", [held] * 2, {"model": _model(), "tokenizer_config": "{}"}
        )
        return Path(folder, "c.safetensors").read_bytes()


@fuzz(damaged(*sorted(_FILES)), examples=30, seconds=3)
def test_files_of_options(case: Damage) -> None:
    if case.name == "cache.safetensors":
        data = spoilt_bytes(_prompt_cache(), case.cuts)
    else:
        data = case.of_json(json.dumps(_LORA).encode())
    with before_work() as folder:
        (folder / case.name).write_bytes(data)
        (folder / "train.jsonl").touch()
        check_line(*_FILES[case.name], case.name, "--model", _model())
