"""Arguments that more than one command takes, and their checks."""

from __future__ import annotations

import argparse
import math


def add_model(parser: argparse.ArgumentParser, flag: str, *, required: bool = True) -> None:
    """The model argument, and whether its own code may run."""
    parser.add_argument(
        flag,
        required=required,
        metavar="PATH",
        help="a model directory, or a repository of the Hugging Face Hub (owner/name)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that the model brings along",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if (value := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def seed(text: str) -> int:
    """A whole number that MLX's random state takes."""
    if not 0 <= (value := _whole(text)) < 2**64:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**64 - 1, not {value}")
    return value


def temperature(text: str) -> float:
    """A finite number that is not negative."""
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
