"""Commands of mlx-lm, run as they are, with every model that they load converted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

Load = Callable[..., tuple[Any, ...]]
_LOADERS = ("load", "sharded_load")
# What each command does, as mlx_lm's of the same name.
SUMMARIES = {
    "chat": "Chat with a model in the terminal with the converted layers, as mlx_lm.chat does.",
    "server": "Serve a model over HTTP with the converted layers, as mlx_lm.server does.",
    "lora": "Fine-tune a model with the converted layers, as mlx_lm.lora does.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is ours. All other arguments are mlx-lm's, and so is the rest of the help."""
    parser.add_argument("-h", "--help", action="store_true", help="print this, and mlx-lm's help")
    parser.add_argument(
        "--backend", metavar="NAME", help="run kernels on metal, cuda, host or ops (none); auto"
    )
    parser.add_argument("--no-fuse", action="store_true", help="one launch for each product")
    parser.add_argument("--stock", action="store_true", help="leave the model's layers as they are")
    parser.set_defaults(rest=(), print_help=parser.print_help)


def run(args: argparse.Namespace) -> None:
    """Run mlx-lm's command of that name with ``args.rest`` as its command line."""
    name = args.command
    if args.help:
        args.print_help()
        print()
    module = import_module(f"mlx_lm.{name}")

    from ..runtime.backend import default_backend

    command_line = [f"mlx-qlayers {name}", *args.rest, *(["--help"] if args.help else [])]
    # mlx-lm's server generates in a thread of its own.
    backend = default_backend(args.backend) if args.backend else nullcontext()
    loaders = {} if args.stock else _converting(module, fuse=not args.no_fuse)
    with _holding(sys, argv=command_line), _holding(module, **loaders), backend:
        module.main()


def _converting(module: Any, *, fuse: bool) -> dict[str, Load]:
    """The functions by which a module of mlx-lm loads models, which then convert them."""
    from ..convert import convert_model

    def converting(load: Load) -> Load:
        def loading(*args: Any, **options: Any) -> tuple[Any, ...]:
            loaded = load(*args, **options)
            model = loaded[0]
            # mlx-lm serves and trains models without quantized layers too.
            quantized = any("scales" in child for child in model.modules())
            print(convert_model(model, linear=quantized, fuse=fuse).summary(), file=sys.stderr)
            return loaded

        return loading

    return {name: converting(getattr(module, name)) for name in _LOADERS if hasattr(module, name)}


@contextmanager
def _holding(owner: Any, **values: Any) -> Iterator[None]:
    """Let a module hold other values for as long as this lasts."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
