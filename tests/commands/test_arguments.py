"""Arguments that more than one command takes; bad ones are in test_bad_input.py."""

from __future__ import annotations

import argparse

import pytest

from mlx_qlayers.commands.arguments import add_model, add_sampling, positive


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_model(parser, "--model", required=False)
    add_sampling(parser, max_tokens=7, temp=0.5)
    return parser.parse_args(arguments)


def test_defaults_and_values() -> None:
    assert vars(parsed()) == {
        "model": None,
        "trust_remote_code": False,
        "max_tokens": 7,
        "temp": 0.5,
        "seed": 0,
    }
    args = parsed("--model", "m", "--max-tokens", "1", "--temp", "0", "--seed", str(2**64 - 1))
    assert (args.model, args.max_tokens, args.temp, args.seed) == ("m", 1, 0.0, 2**64 - 1)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "ten"])
def test_numbers_that_are_not_positive(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        positive(text)


@pytest.mark.parametrize("arguments", [("--temp", "inf"), ("--seed", str(2**64)), ("--temp", "x")])
def test_values_out_of_range(arguments: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match="must be"):
        parsed(*arguments)
