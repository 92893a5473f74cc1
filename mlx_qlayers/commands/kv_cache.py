"""Options for quantized caches of generate, chat and server, in whatever caches the model has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

_COMMANDS = ("generate", "chat", "server")
_BITS, _GROUP_SIZE = "--kv-bits", "--kv-group-size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options, which its chat lacks."""
    name = parser.prog.rpartition(" ")[2]
    if name not in _COMMANDS:
        return
    start = "from --quantized-kv-start on" if name == "generate" else "from the first token on"
    help_text = f"bits of keys and values in caches, {start}; also in windows"
    parser.add_argument(_BITS, type=int, metavar="N", help=help_text)
    text = "numbers that share a scale: 32, 64 or 128"
    parser.add_argument(_GROUP_SIZE, type=int, metavar="N", default=64, help=text)


def command_line(args: argparse.Namespace) -> list[str]:
    """The options for mlx-lm's command, where it has them."""
    if args.command not in ("generate", "server") or args.kv_bits is None:
        return []
    return [f"{_BITS}={args.kv_bits}", f"{_GROUP_SIZE}={args.kv_group_size}"]


@contextmanager
def quantizing(args: argparse.Namespace, holding: Any) -> Iterator[None]:
    """mlx-lm's code quantizes caches of windows as well, and makes those of a server so.

    Args:
        args: what :func:`add_arguments` has added, and ``command``.
        holding: lets a module hold other values, see :mod:`.borrowed`.
    """
    if getattr(args, "kv_bits", None) is None:
        yield
        return
    from ..decode import quantized_caches as ours

    module, generate = (import_module(f"mlx_lm.{n}") for n in (args.command, "generate"))
    make = partial(ours.make_prompt_cache, formats=ours.CacheFormat(args.kv_group_size, args.kv_bits))
    with ExitStack() as held:
        held.enter_context(holding(generate, maybe_quantize_kv_cache=ours.maybe_quantize_kv_cache))
        if args.command != "generate":
            held.enter_context(holding(generate, make_prompt_cache=make))
            held.enter_context(holding(module, make_prompt_cache=make))
        yield
