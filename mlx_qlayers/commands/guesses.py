"""Options for guesses of generate, chat and server, and mlx-lm's stream of tokens with these."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

_COMMANDS = ("generate", "chat", "server")
_MOST = "--num-draft-tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sources of guesses that mlx-lm's command of that name lacks."""
    name = parser.prog.rpartition(" ")[2]
    if name not in _COMMANDS:
        return
    option = parser.add_argument
    one_by_one = "; requests are served one by one" if name == "server" else ""
    option(
        "--prompt-lookup",
        action="store_true",
        help=f"guess what followed the last tokens where they stood before{one_by_one}",
    )
    if name == "chat":
        option("--draft-model", metavar="PATH", help="a smaller model, which guesses")
        option(_MOST, type=int, metavar="N", help="guesses in a step at most, up to 15")


def are_wanted(args: argparse.Namespace, command_line: Sequence[str]) -> bool:
    """Whether a command has a source of guesses."""
    drafts = any(word.partition("=")[0] == "--draft-model" for word in command_line)
    return args.command in _COMMANDS and (
        args.prompt_lookup or getattr(args, "draft_model", None) is not None or drafts
    )


def most(command_line: Sequence[str]) -> list[str]:
    """As many guesses as are worth it, where the command line of mlx-lm's does not say how many."""
    given = any(word.partition("=")[0] == _MOST for word in command_line)
    return [] if given else [f"{_MOST}=15"]


def replaced(args: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    """What takes the place of names of mlx-lm's command, as :func:`.borrowed.run_main` has them."""
    load = _drawing_once(names["load"])
    stream = Guessed(args, load)
    if args.command != "generate":
        return {"load": load, "stream_generate": stream}
    return {"load": load, "generate": partial(names["generate"], stream_generate=stream)}


def _drawing_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """A function that loads models, of which the first alone takes random numbers.

    MLX draws the parameters of a model before it reads them; a draft is to change no text.
    """
    first = True

    def loaded(*args: Any, **options: Any) -> Any:
        nonlocal first
        before, was_first, first = mx.array(cast(Any, mx.random.state)[0]), first, False
        found = load(*args, **options)
        if not was_first:
            cast(Any, mx.random.state)[0][:] = before
        return found

    return loaded


class Guessed:
    """``mlx_lm.stream_generate`` with guesses, for all texts of a command.

    Args:
        args: what :func:`add_arguments` has added.
        load: loads a model and its tokenizer.
    """

    def __init__(self, args: argparse.Namespace, load: Callable[..., Any]) -> None:
        self.lookup, self.load = args.prompt_lookup, load
        self.say: Callable[[str], Any] = partial(print, "", sep="\n", file=sys.stderr)
        if args.command == "server":
            self.say = logging.info
        self.is_chat, self.drafter = args.command == "chat", getattr(args, "draft_model", None)
        self.options = {}
        if self.is_chat and args.num_draft_tokens is not None:
            self.options["num_draft_tokens"] = args.num_draft_tokens
        # Of a chat: its caches, those of the draft, and its tokens.
        self.draft: Any = None
        self.chat: tuple[Any, list[Any], list[int]] = None, [], []

    def __call__(
        self, model: Any, tokenizer: Any, prompt: Any, *, draft_model: Any = None, **options: Any
    ) -> Iterator[Any]:
        from ..speculation.loop import Speculation
        from ..speculation.text import stream

        history: list[int] = []
        if self.is_chat:
            draft_model, history = self._goes_on(tokenizer, options)
        if draft_model is None and not self.lookup:
            self.say("no guesses: there is no draft model")
        speculation = Speculation(draft_model, self.lookup, history=[*history])
        history += prompt
        options |= self.options
        try:
            for response in stream(model, tokenizer, prompt, speculation, **options):
                history.append(response.token)
                yield response
        finally:  # a server leaves at a stop word
            self.say(str(speculation.report))

    def _goes_on(self, tokenizer: Any, options: dict[str, Any]) -> tuple[Any, list[int]]:
        """The draft model, and what was said so far, once caches are what holds it."""
        from mlx_lm.models.cache import make_prompt_cache

        if self.drafter is not None and self.draft is None:
            self.draft, theirs = self.load(self.drafter)
            if theirs.vocab_size != tokenizer.vocab_size:
                raise ValueError("the draft model has other tokens than the model")
        if self.chat[0] is not options["prompt_cache"]:
            caches = [] if self.draft is None else make_prompt_cache(self.draft)
            self.chat = options["prompt_cache"], caches, []
        own, caches, history = self.chat
        options["prompt_cache"] = [*own, *caches]
        return self.draft, history
