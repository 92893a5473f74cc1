"""Arguments that more than one command takes, and the checks of all before any work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..conversion.report import printable
from ..conversion.shares import PARALLEL
from ..runtime.staging import expanded
from .ranges import COUNT, check_number, shown

# Options that may be an empty text; all others are names or paths.
_TEXTS = ("prompt", "system_prompt", "prefill_response", "chat_template", "adapter_path")
_OBJECTS = ("chat_template_args", "chat_template_config")
_FILES = ("text", "config", "resume_adapter_file", "prompt_cache_file")
_FOLDERS = ("out", "save_path")  # that a command writes into
_REPOSITORY, _MODEL = "upload_repo", "draft_model"  # the model beside the one that is loaded
_LONGEST = 600  # characters of an error message


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, and which refuses what no command can work with."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            value = _number(action, text) or super()._get_value(action, text)
            if action.option_strings and text is not action.default:
                check_argument(action.dest, text if isinstance(value, Path) else value)
        except (ArithmeticError, KeyError):  # from mlx-lm's types
            raise argparse.ArgumentError(action, f"cannot be {shown(text)}") from None
        except (ValueError, OSError) as error:
            raise argparse.ArgumentError(action, str(error)) from error
        return value


def _number(action: argparse.Action, text: str) -> Any:
    """The value of an option that takes a number, and None for others."""
    try:
        return action.type(text) if action.type in (int, float) else None
    except ValueError:
        kind = "whole number" if action.type is int else "number"
        raise ValueError(f"must be a {kind}, not {shown(text)}") from None


def check_argument(name: str, value: Any) -> None:
    """Check one argument of any command: an OSError for a wrong file, a ValueError else."""
    check_number(name, value)
    parsed = json.loads(value) if name in _OBJECTS and isinstance(value, str) else value
    if name in _OBJECTS and not isinstance(parsed, dict):
        raise ValueError(f"must be a JSON object, not {shown(value)}")
    for each in value if isinstance(value, list) else ():
        check_argument(name, each)
    if isinstance(value, str):
        _check_text(name, value)


def _check_text(name: str, text: str) -> None:
    if not text and name not in _TEXTS:
        raise ValueError("must not be empty")
    if "\0" in text:
        raise ValueError("must not have a null character")
    path = expanded(text)
    if name in _FILES and not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if name in _FOLDERS and path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is not a directory")
    if name == _MODEL and text:
        from ..conversion.loading import check_model

        check_model(text)
    if name == _REPOSITORY:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(text)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check all arguments of a command by name, wherever they come from."""
    for name, value in arguments.items():
        try:
            check_argument(name, value)
        except (ValueError, OSError) as error:
            raise type(error)(f"{name}: {error}") from error


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an option."""
    try:
        check_number("", value := int(text), COUNT)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {COUNT}, not {shown(text)}") from None
    return value


def one_line(message: str) -> str:
    """A message in one line of bounded length, without what would steer a terminal."""
    text = printable(" ".join(message.split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def add_model(parser: argparse.ArgumentParser, flag: str, *, required: bool = True) -> None:
    """The model argument, and whether its own code may run."""
    parser.add_argument(
        flag,
        required=required,
        metavar="PATH",
        help="a model directory, a GGUF file, or a repository of the Hugging Face Hub (owner/name)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that the model brings along",
    )


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int, temp: float) -> None:
    """How many tokens to generate, and which."""
    option = parser.add_argument
    option("--max-tokens", type=int, default=max_tokens, help="tokens to generate")
    option("--temp", type=float, default=temp, help="0 takes the likeliest token")
    option("--seed", type=int, default=0, help="of the sampling, where --temp is not 0")


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Whether the model's layers are converted, how, and what is said about it."""
    option = parser.add_argument
    option(
        "--backend",
        metavar="NAME",
        help="run kernels on metal, cuda, host or reference (none); auto",
    )
    option("--no-fuse", action="store_true", help="one launch for each product")
    add_activations(parser)
    option(
        "--batch-invariant",
        action="store_true",
        help="compute the same bits alone and in any batch; slower",
    )
    option("--stock", action="store_true", help="leave the model's layers as they are")
    option("--no-calibrate", action="store_true", help="measure nothing on this device")
    option(
        "--parallel", choices=PARALLEL, default="tensor", help="how ranks of mlx.launch share it"
    )
    option("--report", action="store_true", help="list what was done to each layer, and why")


def add_activations(parser: argparse.ArgumentParser) -> None:
    """In what prompts are multiplied."""
    parser.add_argument(
        "--activations",
        choices=("int8",),
        help="multiply prompts, on a CPU tokens, in 8-bit integers",
    )
