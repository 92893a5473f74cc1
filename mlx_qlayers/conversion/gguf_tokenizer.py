"""The tokenizer that the metadata of a GGUF file describes, as files that mlx-lm reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _SPLIT % "{1,3}", _SPLIT % ""
# How text is cut before merging, by tokenizer.ggml.pre; None is GPT-2's own way.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None, "phi-2": None, "smollm": None,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "gpt-4o": _GPT4O,
}  # fmt: skip


def save_tokenizer(folder: Path, metadata: Mapping[str, Any], vocabulary: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` from ``tokenizer.*`` of a file.

    ``vocabulary`` is the number of rows of the embedding. A ValueError says that the tokenizer is
    missing, of an unknown kind, or contradicts itself.
    """
    about = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.")
    }
    tokens = _list(about, "tokens", str)
    if not 0 < len(tokens) <= vocabulary:
        raise ValueError(f"{len(tokens)} tokens, and {vocabulary} rows of the embedding")
    kinds = about.get("token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries, not {len(tokens)}")
    if about.get("model") == "llama":  # Gemma's tokens of spaces alone are spelled with spaces
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    special = {
        f"{name}_token": _token(about, tokens, f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    if (model := about.get("model")) == "gpt2":
        tokenizer = _byte_level(about, tokens)
    elif model == "llama":
        scores = _list(about, "scores", float)
        if len(scores) != len(tokens):
            raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries, not {len(tokens)}")
        if str(metadata.get("general.architecture")).startswith("gemma"):
            scores = [-i for i in range(len(tokens))]  # Gemma merges in the order of its tokens
        tokenizer = _sentencepiece(about, tokens, kinds, scores, special["unk_token"])
    else:
        raise ValueError(f"tokenizer.ggml.model is {model!r}; what can be read is gpt2, llama")
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        named = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
        add([AddedToken(token, normalized=False, special=is_special) for token in named])
    begins = about.get("add_bos_token", model == "llama" or about.get("pre") == "llama-bpe")
    if begins and (bos := special["bos_token"]) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _byte_level(about: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _list(about, "merges", str)]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges: {wrong[0]} are no two tokens")
    if (name := about.get("pre", "gpt-2")) not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; what can be read is {list(_SPLITS)}")
    split = _SPLITS[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=split == _LLAMA3))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    elif name == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    about: Mapping[str, Any],
    tokens: list[str],
    kinds: list[int],
    scores: list[float],
    unknown: str | None,
) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = [
        (-score, i, token[:i], token[i:])
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    merges = [(left, right) for _, _, left, right in sorted(ranked)]
    tokenizer = Tokenizer(
        _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    prefix = about.get("add_space_prefix", True)
    first = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*steps, *last])
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # of the library's own type, which it does not export
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error


def _list(about: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = about.get(name)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ValueError(f"tokenizer.ggml.{name} is missing, or no list of {kind.__name__}")
    return value


def _token(about: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    if (number := about.get(key)) is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ValueError(f"tokenizer.ggml.{key} is {number!r}; there are {len(tokens)} tokens")
    return tokens[number]
