"""Generate text from a prompt with the converted layers."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_model, add_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    parser.add_argument("--prompt", required=True, help="the prompt; - reads standard input")
    add_sampling(parser, max_tokens=256, temp=0.0)
    parser.add_argument("--stock", action="store_true", help="leave the model's layers as they are")
    parser.add_argument("--no-fuse", action="store_true", help="one launch for each product")
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="take the prompt as it is, even where the tokenizer has a chat template",
    )


def run(args: argparse.Namespace) -> None:
    import mlx.core as mx

    from ..conversion.loading import load_stock
    from ..convert import convert_model
    from .text import encode, stream

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    loaded = load_stock(args.model, trust_remote_code=args.trust_remote_code)
    model, tokenizer = loaded.model, loaded.tokenizer
    tokens = encode(tokenizer, prompt, chat=not args.ignore_chat_template)
    if not args.stock:
        convert_model(model, config=loaded.quantization, fuse=not args.no_fuse)
    mx.random.seed(args.seed)
    last = stream(
        model, tokenizer, tokens, max_tokens=args.max_tokens, temp=args.temp, echo=sys.stdout
    )
    print(
        f"prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s; "
        f"text: {last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; "
        f"peak memory {last.peak_memory:.3f} GB",
        file=sys.stderr,
    )
