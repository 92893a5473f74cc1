"""Print the perplexity of a model, stock and converted, and its distance from another one."""

from __future__ import annotations

import argparse

from .arguments import add_activations, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    option = parser.add_argument
    option("--text", metavar="FILE", help="to predict; the last 5%% of the repository's texts")
    option(
        "--reference", metavar="PATH", help="the unquantized model; with activations the converted"
    )
    option("--samples", type=int, default=16, help="sequences of the text")
    option("--sequence-length", type=int, default=512, help="tokens of each")
    add_activations(parser)
    option("--converted", action="store_true", help="leave the stock model out")


def run(args: argparse.Namespace) -> None:
    import copy
    from pathlib import Path

    from ..conversion.gptq import shipped_text, windows
    from ..conversion.loading import check_model, load_stock
    from ..convert import convert_model
    from ..runtime.explain import aligned
    from .perplexities import perplexities

    text = shipped_text("test") if args.text is None else Path(args.text).read_text("utf-8")
    if args.reference is not None:
        check_model(args.reference, trust_remote_code=args.trust_remote_code)
    stock, tokenizer, _, quantization = load_stock(
        args.model, trust_remote_code=args.trust_remote_code
    )
    tokens = windows(tokenizer.encode(text), args.samples, args.sequence_length)
    converted = copy.deepcopy(stock)  # the arrays are shared
    if any(hasattr(module, "scales") for module in stock.modules()):
        convert_model(converted, config=quantization)
    contenders = {} if args.converted else {"stock": stock}
    contenders["converted"] = converted
    if args.activations is not None:
        rounded = copy.deepcopy(stock)
        convert_model(rounded, config=quantization, activations=args.activations)
        contenders[args.activations] = rounded
    reference = None if args.activations is None else converted
    if args.reference is not None:
        reference = load_stock(args.reference, trust_remote_code=args.trust_remote_code).model
        contenders["reference"] = reference
    found = perplexities([*contenders.values()], tokens, reference)
    rows = [
        (
            name,
            f"{p.value:.3f}",
            f"{p.error:.3f}",
            "" if p.rise is None else f"{p.rise:.4f}",
            "" if p.rise_error is None else f"{p.rise_error:.4f}",
            "" if p.divergence is None else f"{p.divergence:.5f}",
        )
        for name, p in zip(contenders, found, strict=True)
    ]
    print(f"{found[0].tokens} tokens")
    header = "model", "perplexity", "+-", "rise of loss", "+-", "KL, nats"
    print(*aligned([header, *rows], numbers=True), sep="\n")
