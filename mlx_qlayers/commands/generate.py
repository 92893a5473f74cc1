"""Generate text from a prompt with the converted layers."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_model, positive, seed, temperature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    parser.add_argument("--prompt", required=True, help="the prompt; - reads standard input")
    parser.add_argument("--max-tokens", type=positive, default=256, help="tokens to generate")
    parser.add_argument("--temp", type=temperature, default=0.0, help="0 takes the likeliest token")
    parser.add_argument(
        "--seed", type=seed, default=0, help="of the sampling, where --temp is not 0"
    )
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
    speed = stream(
        model, tokenizer, tokens, max_tokens=args.max_tokens, temp=args.temp, echo=sys.stdout
    )
    print(speed, file=sys.stderr)
