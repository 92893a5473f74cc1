"""Options for guesses of generate, chat and server, and mlx-lm's stream of tokens with these."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

_COMMANDS = ("generate", "chat", "server")
_MOST = "--num-draft-tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sources of guesses that mlx-lm's command of that name lacks."""
    name = parser.prog.rpartition(" ")[2]
    if name not in _COMMANDS:
        return
    option = parser.add_argument
    text = "guess what followed the last tokens where they stood before"
    option("--prompt-lookup", action="store_true", help=text)
    one_by_one = "; requests are served one by one" if name == "server" else ""
    text = "guess by multi-token-prediction heads: the model's, or those of a checkpoint"
    option("--heads", nargs="?", const=True, metavar="PATH", help=f"{text}{one_by_one}")
    if name == "chat":
        option("--draft-model", metavar="PATH", help="a smaller model, which guesses")
        option(_MOST, type=int, metavar="N", help="guesses in a step at most, up to 15")


def are_wanted(args: argparse.Namespace, command_line: Sequence[str]) -> bool:
    """Whether a command has a source of guesses."""
    drafts = any(word.partition("=")[0] == "--draft-model" for word in command_line)
    return args.command in _COMMANDS and (
        args.prompt_lookup
        or args.heads is not None
        or getattr(args, "draft_model", None) is not None
        or drafts
    )


def of_batches(args: argparse.Namespace, providers: Sequence[Any]) -> tuple[Any, int]:
    """Where the guesses of a server's batch come from, and how many there are at most."""
    from ..speculation.loop import Speculation

    provider = providers[-1]
    return Speculation(provider.draft_model, args.prompt_lookup), provider.cli_args.num_draft_tokens


def most(command_line: Sequence[str]) -> list[str]:
    """As many guesses as are worth it, where the command line of mlx-lm's does not say how many."""
    given = any(word.partition("=")[0] == _MOST for word in command_line)
    return [] if given else [f"{_MOST}=15"]


def replaced(args: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    """The replacements for names of mlx-lm's command, as :func:`.borrowed.run_main` has them."""
    load = Loads(names["load"])
    stream = Guessed(args, load)
    if args.command != "generate":
        return {"load": load, "stream_generate": stream}
    return {"load": load, "generate": partial(names["generate"], stream_generate=stream)}


class Loads:
    """A function that loads models, of which the first alone takes random numbers.

    MLX draws the parameters of a model before it reads them; a draft is to change no text.
    """

    def __init__(self, load: Callable[..., Any]) -> None:
        self.load, self.names = load, dict[int, Any]()  # where models come from, by their identity

    def __call__(self, name: Any, *args: Any, **options: Any) -> Any:
        from ..tuning.calibrate import same_random_state

        with same_random_state() if self.names else nullcontext():
            found = self.load(name, *args, **options)
        self.names[id(found[0])] = name
        return found

    def heads(self, model: Any, path: Any) -> Any:
        """The heads that are at a path, or for true of where the model comes from."""
        from ..convert import load_heads
        from ..tuning.calibrate import same_random_state

        with same_random_state():
            return load_heads(self.names[id(model)] if path is True else path, model)


class Guessed:
    """``mlx_lm.stream_generate`` with guesses, for all texts of a command."""

    def __init__(self, args: argparse.Namespace, load: Loads) -> None:
        self.lookup, self.load, self.path = args.prompt_lookup, load, args.heads
        self.heads: Any = None
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
        if self.path is not None and (self.heads is None or self.heads.trunk.model is not model):
            self.heads = self.load.heads(model, self.path)
        if draft_model is None and not self.lookup and self.heads is None:
            self.say("no guesses: there is no draft model")
        speculation = Speculation(draft_model, self.lookup, history=[*history], heads=self.heads)
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
