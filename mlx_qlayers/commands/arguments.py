"""Arguments that more than one command takes, and their checks."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from ..conversion.report import printable
from ..conversion.shares import PARALLEL


class Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        line = printable(" ".join(message.split()))
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


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
    option("--max-tokens", type=positive, default=max_tokens, help="tokens to generate")
    option("--temp", type=_temperature, default=temp, help="0 takes the likeliest token")
    option("--seed", type=_seed, default=0, help="of the sampling, where --temp is not 0")


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Whether the model's layers are converted, how, and what is said about it."""
    option = parser.add_argument
    option("--backend", metavar="NAME", help="run kernels on metal, cuda, host or ops (none); auto")
    option("--no-fuse", action="store_true", help="one launch for each product")
    add_activations(parser)
    option("--stock", action="store_true", help="leave the model's layers as they are")
    option("--no-calibrate", action="store_true", help="measure nothing on this device")
    option(
        "--parallel", choices=PARALLEL, default="tensor", help="how ranks of mlx.launch share it"
    )
    option("--report", action="store_true", help="list what was done to each layer, and why")


def add_activations(parser: argparse.ArgumentParser) -> None:
    """In what prompts are multiplied."""
    parser.add_argument(
        "--activations", choices=("int8",), help="multiply prompts in 8-bit integers; faster"
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if (value := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seed(text: str) -> int:
    if not 0 <= (value := _whole(text)) < 2**64:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**64 - 1, not {value}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, not {text}")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
