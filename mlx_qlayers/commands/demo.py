"""Generate text with the model that ships with the package, stock and converted."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .arguments import add_sampling

if TYPE_CHECKING:
    import mlx.nn as nn

MODEL = "tales-qwen2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="another model than the one that ships")
    parser.add_argument("--prompt", default="Once upon a time there was a king", help="its start")
    add_sampling(parser, max_tokens=200, temp=0.7)


def run(args: argparse.Namespace) -> None:
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler
    from tqdm import tqdm

    from ..conversion.loading import load_stock
    from ..convert import convert_model
    from ..runtime.backend import backend, use_backend
    from ..runtime.devices import device_of
    from ..runtime.explain import aligned
    from ..runtime.host import cache
    from .text import check_prompt, stream

    check_prompt(args.prompt)
    stock, tokenizer, _, quantization = load_stock(args.model or shipped_model())
    converted = copy.deepcopy(stock)  # the arrays are shared
    print(convert_model(converted, config=quantization).summary(), end="\n\n")
    prompt = tokenizer.encode(args.prompt)
    contenders = [
        ("stock mlx-lm", stock, "reference"),
        ("converted, reference path", converted, "reference"),
    ]
    if device_of().launches_at_once:
        contenders.append(("converted, Metal kernels on the CPU", converted, "auto"))

    def generate(model: nn.Module, echo: TextIO | None = None, **options: Any) -> Any:
        mx.random.seed(args.seed)
        options = {"max_tokens": args.max_tokens, "sampler": make_sampler(args.temp)} | options
        return stream(model, tokenizer, prompt, echo=echo, **options)

    rows: list[tuple[str, ...]] = []
    for name, model, path in reversed(contenders):
        echo = None if rows else sys.stdout
        with use_backend(path):
            # Before the clock runs all is paged in, and the same text has compiled every kernel.
            if path == "reference":
                generate(model, max_tokens=2)
            else:
                with tqdm(total=args.max_tokens, desc="compiling kernels", disable=None) as bar:
                    generate(model, progress=bar.update)
            if echo:
                if seconds := cache.seconds():
                    print(f"kernels were compiled for {seconds:.1f} s, once\n")
                print(args.prompt, end="", flush=True)
            last = generate(model, echo)
        rows.append((name, f"{last.prompt_tps:.1f}", f"{last.generation_tps:.1f}"))
    print(f"\nTokens per second on {mx.default_device()}, backend {backend()}:")
    print(*aligned([("layers", "prompt", "text"), *rows[::-1]], numbers=True), sep="\n")


def shipped(folder: str, *parts: str) -> Path:
    """A folder of the repository, or its copy inside an installed package."""
    package = Path(__file__).parents[1]
    places = [top.joinpath(*parts) for top in (package / f"_{folder}", package.parent / folder)]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f"{places[0]}: {folder} are not part of this installation")


def shipped_model() -> Path:
    """The directory of the model that ships with the package."""
    return shipped("models", MODEL)
