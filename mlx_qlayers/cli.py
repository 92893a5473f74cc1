"""The ``mlx-qlayers`` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ._interrupts import INTERRUPTED, raising
from .commands import borrowed, generate
from .commands.arguments import Parser, one_line
from .runtime.versions import version_of

_NAMES = "generate borrowed convert quantize perplexity tune bench info doctor explain demo"
_COMMANDS = [import_module(f".commands.{name}", __package__) for name in _NAMES.split()]
_ERROR, _BROKEN_PIPE = 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the command's name; those of the process by default.

    Returns:
        The exit code: 0, 2 after an error, 130 after an interrupt.

    Example:
        >>> main(["info", "--model", "models/tales-qwen2"])
        python  ...
        dry run: 55 swapped
        0
    """
    try:
        with raising():
            return _main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    try:
        parser = _parser()
        args, rest = parser.parse_known_args(argv)
        if rest and not hasattr(args, "rest"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.rest = rest
    except SystemExit as stop:  # argparse has said what it had to say
        return _code(stop)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a letter that a model has
        sys.stdout.reconfigure(errors="replace")
    try:
        args.run(args)
        sys.stdout.flush()
    except SystemExit as stop:  # so has mlx-lm's
        return _code(stop)
    except BrokenPipeError:
        # The reader has left: give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        print(f"mlx-qlayers: error: {_one_line(error)}", file=sys.stderr)
        return _ERROR
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="mlx-qlayers",
        description="Language models with the layers of mlx-qlayers.",
    )
    parser.add_argument("--version", action="version", version=version_of("mlx-qlayers"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    summaries = {
        name: (module, summary)
        for module in _COMMANDS
        for name, summary in (getattr(module, "SUMMARIES", None) or _summary(module)).items()
    }
    for name, (module, summary) in summaries.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
            add_help=module not in (borrowed, generate),  # theirs prints mlx-lm's too
        )
        module.add_arguments(command)
        command.add_argument(
            "--traceback", action="store_true", help="print the whole of an error, for a report"
        )
        command.set_defaults(run=module.run)
    return parser


def _summary(module: ModuleType) -> dict[str, str]:
    return {module.__name__.rpartition(".")[2]: (module.__doc__ or "").strip()}


def _code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return stop.code if isinstance(stop.code, int) else _ERROR


def _one_line(error: Exception) -> str:
    text, kind = str(error), type(error).__name__
    if text and not isinstance(error, (ValueError, OSError)):
        text = f"{kind}: {text}"
    shown = one_line(text or kind)
    return f"{shown} (--traceback shows the rest)" if shown.endswith("...") else shown
