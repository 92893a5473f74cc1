"""Print the perplexity of a model, stock and converted, and its distance from another one."""

from __future__ import annotations

import argparse
from typing import Any

from . import kv_cache
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
    kv_cache.add_arguments(parser)
    option("--converted", action="store_true", help="leave the stock model out")


def run(args: argparse.Namespace) -> None:
    caches = kv_cache.are_wanted(args)
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
    linear = any(hasattr(module, "scales") for module in stock.modules())
    if linear or caches:
        convert_model(converted, config=quantization, linear=linear)
    contenders = {} if args.converted else {"stock": stock}
    contenders["converted"] = converted
    if args.activations is not None:
        rounded = copy.deepcopy(stock)
        convert_model(rounded, config=quantization, activations=args.activations)
        contenders[args.activations] = rounded
    reference = None if args.activations is None and not caches else converted
    if caches:
        contenders |= _with_caches(args, converted, tokenizer)
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


def _with_caches(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The model over quantized caches as asked for, and if these are rotated as they are not."""
    from ..decode.quantized_caches import CacheFormat, make_prompt_cache

    def over(formats: Any) -> Any:
        return lambda tokens: model(tokens, cache=make_prompt_cache(model, formats=formats))

    asked = kv_cache.formats_of(args, model, tokenizer)
    if not isinstance(asked, CacheFormat):
        return {f"{args.kv_bits_per_value:g} bits a value in caches": over(asked)}
    name = "{0} bits" if asked.bits == asked.v_bits else "{0} and {1} bits"
    name = f"{name.format(asked.bits, asked.v_bits)} in caches"
    found = {name: over(asked._replace(hadamard=False))}
    return found | ({f"{name}, rotated": over(asked)} if asked.hadamard else {})
