"""Checks requests to the server before they reach the generation thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import signature
from typing import Any

from .ranges import RANGES, Range, check_number, shown

# The fields of a request that mlx-lm reads and does not check; null counts as absent.
_TYPES: Mapping[str, type] = {
    "prompt": str,
    "messages": list,
    "tools": list,
    "model": str,
    "draft_model": str,
    "role_mapping": dict,
    "stream_options": dict,
    "chat_template_kwargs": dict,
    "logit_bias": dict,
}
_NAMES: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}
NUMBERS = frozenset(
    [f"{kind}_{what}" for kind in ("repetition", "presence", "frequency")
     for what in ("penalty", "context_size")]
    + ["max_tokens", "max_completion_tokens", "num_draft_tokens", "seed", "temperature", "top_k"]
    + ["top_p", "min_p", "top_logprobs", "xtc_probability", "xtc_threshold"]
)  # fmt: skip
_BIAS = Range(-1e9, 1e4, whole=False)  # of a logit; where float16 has it as an infinity, it bans
_MOST_STOPS, _LONGEST_STOP = 64, 1024
_DEEPEST = 64  # lists and objects inside each other, as templates go through them


class BadRequest(ValueError):
    """A request that cannot be served; the message says why."""


def check_body(body: Any) -> None:
    """Check the parts of a parsed request that mlx-lm takes on trust; a ValueError names one."""
    if not isinstance(body, dict):
        raise ValueError("it must be a JSON object")
    for name, value in body.items():
        if (kind := _TYPES.get(name)) and not isinstance(value, kind | None):
            raise ValueError(f"{name} must be {_NAMES[kind]}")
        if name in NUMBERS and value is not None:
            _check(name, value, RANGES[name])
    for token, bias in (body.get("logit_bias") or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise ValueError(f"logit_bias must have tokens as names, not {shown(token)}")
        _check(f"logit_bias of {token}", bias, _BIAS)
    if body.get("prompt") == "":
        raise ValueError("prompt is empty")
    stop = body.get("stop")
    words = stop if isinstance(stop, list) else [stop or "none"]
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError("stop must be a string or a list of strings that are not empty")
    if len(words) > _MOST_STOPS or any(len(word) > _LONGEST_STOP for word in words):
        raise ValueError(
            f"stop must have at most {_MOST_STOPS} strings of at most {_LONGEST_STOP} letters"
        )
    if (options := body.get("stream_options")) is not None and "include_usage" not in options:
        raise ValueError("stream_options must have include_usage")
    if given := sorted(_own_arguments() & (body.get("chat_template_kwargs") or {}).keys()):
        raise ValueError(f"chat_template_kwargs must not have {given[0]}")
    if (messages := body.get("messages")) is not None:
        if not messages:
            raise ValueError("messages is empty")
        for message in messages:
            _check_message(message)
    if any(_deeper(body)):
        raise ValueError(f"it has more than {_DEEPEST} lists and objects inside each other")


@cache
def _own_arguments() -> frozenset[str]:
    """Arguments of transformers that are no variables of a template: other templates, padding."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _check(name: str, value: Any, allowed: Range) -> None:
    try:
        check_number(name, value, allowed)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages must be objects with a role")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ValueError("the content of a message must be a string or a list")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("the parts of a message must be objects with a type")


def _deeper(value: Any, depth: int = 0) -> Iterator[bool]:
    """Whether values inside a value are deeper than allowed."""
    if isinstance(value, list | dict):
        yield depth > _DEEPEST
        if depth <= _DEEPEST:
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _deeper(inner, depth + 1)
