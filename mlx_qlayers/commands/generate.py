"""Generate text from a prompt with the converted layers, as mlx_lm.generate does."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from . import borrowed
from .arguments import add_model, add_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    parser.add_argument("--prompt", required=True, help="the prompt; - reads standard input")
    add_sampling(parser, max_tokens=256, temp=0.0)
    borrowed.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from .text import check_prompt

    check_prompt(args.prompt)
    if not args.model:  # mlx-lm has a model of its own for that
        raise FileNotFoundError("the name of the model is empty")
    names = ("model", "prompt", "max_tokens", "temp", "seed")
    ours = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    if args.trust_remote_code:
        ours.append("--trust-remote-code")
    from mlx_lm import stream_generate

    generate = partial(_generate, stream_generate=stream_generate)
    borrowed.run_main(args, [*ours, *args.rest], generate=generate)


def _generate(
    model: Any, tokenizer: Any, prompt: Any, *, verbose: bool, stream_generate: Any, **options: Any
) -> str:
    """``mlx_lm.generate`` with nothing but the text on standard output, maybe with guesses."""
    from .text import stream

    if not prompt:
        raise ValueError("the prompt has no tokens")
    if not verbose:  # their command prints it
        responses = stream_generate(model, tokenizer, prompt, **options)
        return "".join(response.text for response in responses)
    last = stream(model, tokenizer, prompt, stream_generate, echo=sys.stdout, **options)
    print(
        f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s; "
        f"text: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; "
        f"peak memory {last.peak_memory:.3f} GB",
        file=sys.stderr,
    )
    return last.text
