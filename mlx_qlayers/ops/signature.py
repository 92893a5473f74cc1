"""Declared signatures of operations: :class:`Signature` makes checks and messages of them."""

from __future__ import annotations

import re
from ast import literal_eval
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..formats import Format

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_INTEGERS = tuple(getattr(mx, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = {"float": FLOATS, "bool": (mx.bool_,), "integer": _INTEGERS}
_VALUES = {"int": "an integer", "number": "a finite number", "flag": "True or False"}
_LARGEST = mx.finfo(mx.float32).max

Sizes = dict[str, Any]

# Texts are compiled once: a plan for shapes that are new evaluates ten or twenty.
_code = cache(partial(compile, filename="<signature>", mode="eval"))


class Signature:
    """The arguments of an operation, one a line.

    ``q: bool|float (B, L) or None; L > 0`` is an array, or None. Its dtype is one of those named,
    that of another argument, or ``any``. A letter stands for the same number in all shapes, which
    the first array that has it gives; ``*N`` for several numbers, ``...`` for any, ``1|B`` for
    either. There may be several shapes, joined by ``or``; one behind ``to`` is what the array
    broadcasts to. Other lines are ``int``, ``number`` or ``flag`` with a bound, or strings to
    choose from.

    Example:
        >>> takes = Signature("q: float (B, L)\\nk: q (B, 2 * L)\\nwindow: int >= 1 or None")
        >>> takes.check(mx.ones((3, 4)), mx.ones((3, 8)), None)
        {'B': 3, 'L': 4}
        >>> takes.check(mx.ones((3, 4)), mx.ones((3, 9)), None)
        Traceback (most recent call last):
        ValueError: k must be (3, 8), but its shape is (3, 9)
    """

    def __init__(self, text: str) -> None:
        self.arguments = [_Argument(line.strip()) for line in text.strip().splitlines()]

    def check(self, *values: Any, **sizes: Any) -> Sizes:
        """The numbers of letters, or a ValueError that names the argument that does not fit."""
        dtypes: dict[str, tuple[mx.Dtype, ...]] = {}
        for argument, value in zip(self.arguments, values, strict=True):
            if value is None and argument.optional:
                continue
            if not argument.is_array:
                argument.check_value(value)
                continue
            dtypes[argument.name] = (argument.check_dtype(value, dtypes),)
            sizes = argument.check_shape(tuple(value.shape), sizes)
        return sizes


class _Argument:
    """A line of a :class:`Signature`."""

    def __init__(self, line: str) -> None:
        self.name, text = line.split(": ", 1)
        text, *conditions = text.split("; ")
        self.conditions = [each for more in conditions for each in more.split(" and ")]
        self.optional = text.endswith(" or None")
        self.text = text.removesuffix(" or None")
        self.choices = literal_eval(f"({self.text},)") if text.startswith("'") else ()
        self.kind, _, self.rest = self.text.partition(" ")
        self.is_array = not self.choices and self.kind not in _VALUES
        shapes = re.findall(r"\(((?:[^()]|\([^()]*\))*)\)", self.rest) if self.is_array else ()
        self.shapes = [[token.strip() for token in s.split(",") if token.strip()] for s in shapes]

    def check_value(self, value: Any) -> None:
        """Raise unless it is what the line says of a number, a flag or a string."""
        if self.choices:
            what, fits = _either(self.choices), isinstance(value, str) and value in self.choices
        else:
            what = f"{_VALUES[self.kind]} {self.rest}".strip()
            kind: Any = {"int": int, "flag": bool}.get(self.kind)
            fits = is_finite(value) if kind is None else type(value) is kind
            bound = f"value {self.rest}" if self.rest else "True"
            fits = fits and eval(_code(bound), {}, {"value": value})
        if not fits:
            what += " or None" * self.optional
            raise ValueError(f"{self.name} must be {what}, not {value!r}")

    def check_dtype(self, array: Any, others: dict[str, tuple[mx.Dtype, ...]]) -> mx.Dtype:
        """Its dtype, if the line allows it."""
        dtype = getattr(array, "dtype", None)
        if not isinstance(dtype, mx.Dtype):
            kind = "" if dtype is None else f" of {dtype!r}"
            raise ValueError(f"{self.name} must be an mx.array, not {type(array).__name__}{kind}")
        kinds = self.kind.split("|")
        lists = [others.get(k) or _DTYPES.get(k) or (getattr(mx, k),) for k in kinds]
        if self.kind != "any" and dtype not in (allowed := sum(lists, ())):
            names = [str(each).rpartition(".")[2] for each in allowed]
            what = "integers" if allowed == _INTEGERS else _either(names)
            what += f" as {self.kind}" if self.kind in others else ""
            raise ValueError(f"{self.name} must be {what}, not {dtype}")
        return dtype

    def check_shape(self, shape: tuple[int, ...], known: Sizes) -> Sizes:
        """The numbers that letters stand for with this array."""
        to = self.rest.startswith("to ")
        lacking = ""
        for tokens in self.shapes:
            found = _broadcast(tokens, shape, known) if to else _bound(tokens, shape, known)
            if found is not None:
                given = {"shape": shape, **found}
                broken = (each for each in self.conditions if not eval(_code(each), given))
                lacking = next(broken, "")
                if not lacking:
                    return found
        if not self.shapes:
            return known
        what = " or ".join(_shape(tokens, known) for tokens in self.shapes)
        what = f"broadcast to {what}" if to else f"be {what}"
        what += f" with {_filled(lacking, known)}" if lacking else ""
        raise ValueError(f"{self.name} must {what}, but its shape is {shape}")


def _bound(tokens: list[str], shape: tuple[int, ...], known: Sizes) -> Sizes | None:
    """The sizes known with an array of that shape; None if it cannot have it."""
    found = dict(known)
    if tokens and (lead := tokens[0])[0] in "*.":
        tokens, several = tokens[1:], len(shape) - len(tokens) + 1
        if several < 0 or found.setdefault(lead, shape[:several]) != shape[:several]:
            return None
        shape = shape[several:]
    if len(tokens) != len(shape):
        return None
    for token, size in zip(tokens, shape, strict=True):
        if token.isidentifier():
            found.setdefault(token, size)
        if size not in [eval(_code(each), {}, found) for each in token.split("|")]:
            return None
    found.pop("...", None)
    return found


def _broadcast(tokens: list[str], shape: tuple[int, ...], known: Sizes) -> Sizes | None:
    sizes = zip(reversed(shape), reversed(tokens), strict=False)
    fits = len(shape) <= len(tokens) and all(n in (1, known[token]) for n, token in sizes)
    return known if fits else None


def _shape(tokens: list[str], known: Sizes) -> str:
    """A shape with the numbers that are known."""
    parts: list[str] = []
    for token in tokens:
        lead = known.get(token)
        parts += map(str, lead) if isinstance(lead, tuple) else [_filled(token, known)]
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _filled(text: str, known: Sizes) -> str:
    text = re.sub(r"[A-Za-z]\w*", lambda word: str(known.get(word[0], word[0])), text)
    each = [str(eval(t)) if re.fullmatch(r"[\d ()+*/-]*\d", t) else t for t in text.split("|")]
    return " or ".join(dict.fromkeys(each))


def _either(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else str(last)


def is_finite(value: object) -> bool:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def check_packed(
    x: Any, w: Any, scales: Any, biases: Any, transpose: bool, fmt: Format, of: str = ""
) -> None:
    """Raise unless rows of ``x`` can be multiplied with a packed ``w``; ``of`` begins messages."""
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(of + problem)
    inner = fmt.dims(w) if transpose else w.shape[-2]
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
