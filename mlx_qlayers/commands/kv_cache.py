"""Options for quantized caches of generate, chat, server and perplexity, in whatever caches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from weakref import ref

from .ranges import check_number

_COMMANDS = ("generate", "chat", "server", "perplexity")
# Formats by the identity of a model, where each layer has its own.
_measured: dict[int, tuple[Any, Any]] = {}


def _bits(text: str) -> tuple[int, int]:
    """Bits of keys and of values: one number for both, or two."""
    try:
        some = [int(each) for each in text.split(",")]
        for each in some:
            check_number("kv_bits", each)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; or two with a comma between") from None
    if len(some) > 2:
        raise argparse.ArgumentTypeError("must be one number, or two: of keys and of values")
    return some[0], some[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's options, which its chat lacks, and what it has no caches for."""
    name = parser.prog.rpartition(" ")[2]
    if name not in _COMMANDS:
        return
    option = parser.add_argument
    start = "from --quantized-kv-start on" if name == "generate" else "from the first token on"
    text = f"bits of keys and values in caches, {start}; also in windows; as 8,4 of either"
    option("--kv-bits", dest="kv_widths", type=_bits, metavar="N[,N]", help=text)
    text = "numbers that share a scale: 32, 64 or 128"
    option("--kv-group-size", type=int, metavar="N", default=64, help=text)
    text = "mix the channels of a head before it is packed; fewer bits lose less then"
    option("--kv-rotate", action="store_true", help=text)
    text = "instead of --kv-bits: each layer's keys and values get bits by what they cost it"
    option("--kv-bits-per-value", type=float, metavar="X", help=f"{text}; scales count")


def are_wanted(args: argparse.Namespace) -> bool:
    """Whether caches are to be quantized; a ValueError for options that do not go together."""
    asked = getattr(args, "kv_widths", None), getattr(args, "kv_bits_per_value", None)
    if None not in asked:
        raise ValueError("--kv-bits and --kv-bits-per-value are two ways to say the same")
    if asked == (None, None) and getattr(args, "kv_rotate", False):
        raise ValueError("--kv-rotate needs --kv-bits or --kv-bits-per-value")
    return asked != (None, None)


def command_line(args: argparse.Namespace) -> list[str]:
    """The options for mlx-lm's command, where it has them; ours take the place of what it does."""
    if args.command not in ("generate", "server") or not are_wanted(args):
        return []
    bits = (args.kv_widths or (8,))[0]
    return [f"--kv-bits={bits}", f"--kv-group-size={args.kv_group_size}"]


def _asked(args: argparse.Namespace) -> Any:
    from ..decode.quantized_caches import CacheFormat

    return CacheFormat(args.kv_group_size, args.kv_widths[0], args.kv_widths[1], args.kv_rotate)


def formats_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    """The format of a model's caches, or that of each, once they were measured."""
    if args.kv_widths is not None:
        return _asked(args)
    from ..conversion.kv_mixture import summary, value_mixture
    from ..decode.quantized_caches import CacheFormat

    key = id(model)
    known, found = _measured.get(key, (lambda: None, None))
    if known() is not model:
        form = CacheFormat(args.kv_group_size, hadamard=args.kv_rotate)
        found = value_mixture(model, tokenizer, args.kv_bits_per_value, form=form)
        print(summary(found), file=sys.stderr)
        _measured[key] = ref(model, lambda _: _measured.pop(key, None)), found
    return found


@contextmanager
def quantizing(args: argparse.Namespace, holding: Any) -> Iterator[None]:
    """mlx-lm's code makes and quantizes caches as the options say, windows as well.

    ``holding`` lets a module hold other values, see :mod:`.borrowed`.
    """
    if not are_wanted(args):
        yield
        return
    from ..decode import quantized_caches as ours
    from ..speculation import loop, rounds

    module, generate = (import_module(f"mlx_lm.{n}") for n in (args.command, "generate"))
    loaded: list[Any] = []

    def load(*inputs: Any, **options: Any) -> Any:
        found = theirs(*inputs, **options)
        if not loaded or args.command == "server":  # else that of a draft
            loaded[:] = found[:2]
        return found

    def formats(model: Any = None) -> Any:
        known, tokenizer = loaded
        return formats_of(args, known if model is None else model, tokenizer)

    def make(model: Any, *rest: Any) -> Any:
        return ours.make_prompt_cache(model, *rest, formats=formats(model))

    def quantize(caches: Any, quantized_kv_start: int, *_: Any, **__: Any) -> None:
        ours.maybe_quantize_kv_cache(caches, quantized_kv_start, formats=formats())

    theirs = module.load
    with ExitStack() as held:
        held.enter_context(holding(module, load=load))
        for each in (generate, loop, rounds):
            held.enter_context(holding(each, maybe_quantize_kv_cache=quantize))
        if args.command == "generate":
            read = partial(_read, args, module.load_prompt_cache)
            held.enter_context(holding(module, load_prompt_cache=read))
        else:
            held.enter_context(holding(generate, make_prompt_cache=make))
            held.enter_context(holding(module, make_prompt_cache=make))
        yield


def _read(args: argparse.Namespace, load: Any, name: str, **options: Any) -> Any:
    """mlx-lm's function that reads a prompt cache, which has to be in the format asked for."""
    from ..decode.quantized_caches import PackedKVCache, format_of

    found = load(name, **options)
    caches = found[0] if isinstance(found, tuple) else found
    if args.kv_widths is not None:
        form = _asked(args)
        if any(format_of(c) != form for c in caches if isinstance(c, PackedKVCache)):
            raise ValueError(f"{name}: its caches are packed in another way than asked for")
    return found
