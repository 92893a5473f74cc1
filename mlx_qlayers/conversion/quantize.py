"""Quantizing a checkpoint on disk, with mlx-lm's own machinery."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..formats import Format
from ..runtime.staging import check_free, expanded, remove_tree, staged_directory
from .checkpoint import check_directory
from .loading import find_model, load_stock


@dataclass(frozen=True)
class Written:
    """The result of :func:`quantize_checkpoint` and its like."""

    path: Path
    layers: int
    bits_per_weight: float
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.layers} quantized layers, {self.bits_per_weight:.2f} bits per "
            f"weight, {self.nbytes / 1e6:.1f} MB"
        )


def quantize_checkpoint(
    path_or_hf_repo: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    recipe: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Written:
    """Quantize a checkpoint into a directory that mlx-lm loads.

    The directory is written under another name, read back and then renamed: whenever this is
    stopped, ``target`` is either absent or whole.

    Args:
        path_or_hf_repo: an unquantized model: a directory, or a repository of the Hub.
        target: the directory to write. There must be nothing, or an empty directory.
        group_size: weights that share a scale; by default the mode's usual one.
        bits: bits of a weight; by default the mode's usual number.
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.
        recipe: one of mlx-lm's mixtures in place of ``bits``: ``"mixed_2_6"``, ``"mixed_3_4"``,
            ``"mixed_3_6"`` or ``"mixed_4_6"``. The head, and in some layers the values and the
            projection down, get the larger number of bits.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``, of what is not quantized; by
            default what the checkpoint's configuration names, else what it holds.
        revision: a branch, tag or commit of the repository.
        trust_remote_code: run Python code that the model brings along.

    Raises:
        FileExistsError: there is something at ``target``.
        FileNotFoundError: the model, or a file of it, is missing.
        OSError: the disk has not enough room.
        ValueError: the arguments do not fit together or the model, or a file is damaged.

    Example:
        >>> print(quantize_checkpoint("Qwen/Qwen2-0.5B-Instruct", "qwen2-4bit"))
        qwen2-4bit: ... quantized layers, ... bits per weight, ... MB
    """
    if recipe is not None and (bits is not None or mode != "affine"):
        raise ValueError(f"recipe {recipe!r} says bits and is affine; mode={mode!r}, bits={bits!r}")
    group_size, bits, mode = Format.checked(group_size, bits, mode)
    target, source = _find(path_or_hf_repo, target, revision, trust_remote_code)
    if (quantized := check_directory(source).get("quantization")) is not None:
        raise ValueError(f"{source}: already quantized: {quantized}")
    model, tokenizer, config, _ = load_stock(source, lazy=True, trust_remote_code=trust_remote_code)
    if config.get("quantization") is None:  # mlx-lm takes a null for a partly quantized model
        config.pop("quantization", None)
    _cast(model, dtype or config.get("torch_dtype") or config.get("dtype"))

    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model

    mixture: Any = None
    if recipe is not None:
        mixture = mixed_quant_predicate_builder(recipe, model, group_size)
    with redirect_stdout(io.StringIO()):  # it reports to standard output
        model, config = quantize_model(
            model, config, group_size, bits, mode=mode, quant_predicate=mixture
        )
    if not any(hasattr(module, "scales") for module in model.modules()):
        raise ValueError(f"{source}: no layer has a width that is a multiple of {group_size}")
    return _write(target, source, model, tokenizer, config, path_or_hf_repo)


def dequantize_checkpoint(
    path_or_hf_repo: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Written:
    """Write a quantized checkpoint without its quantization, as for tools that have none.

    Arguments and errors are those of :func:`quantize_checkpoint`; by default ``dtype`` is that of
    the scales, and bfloat16 where they are no numbers.

    Example:
        >>> print(dequantize_checkpoint("Qwen/Qwen2-7B-Instruct-MLX", "qwen2-7b"))
        qwen2-7b: 0 quantized layers, ... bits per weight, ... MB
    """
    from mlx_lm.utils import dequantize_model

    target, source = _find(path_or_hf_repo, target, revision, trust_remote_code)
    if check_directory(source).get("quantization") is None:
        raise ValueError(f"{source}: not quantized")
    model, tokenizer, config, _ = load_stock(source, lazy=True, trust_remote_code=trust_remote_code)
    model = dequantize_model(model)
    _cast(model, dtype)
    config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    return _write(target, source, model, tokenizer, config, path_or_hf_repo)


def quantize_calibrated(
    path_or_hf_repo: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Written:
    """Quantize a checkpoint with :func:`~mlx_qlayers.conversion.gptq.quantize_model`.

    Finished layers are kept beside ``target`` until it is written: whenever this is stopped, the
    same call goes on where it was. ``text`` is a file in UTF-8 to calibrate with, and ``options``
    are those of ``quantize_model``; else as :func:`quantize_checkpoint`.

    Example:
        >>> print(quantize_calibrated("Qwen/Qwen2-0.5B-Instruct", "qwen2-rtn", method="rtn"))
        qwen2-rtn: ... quantized layers, ... bits per weight, ... MB
    """
    from .gptq import quantize_model

    target, source = _find(path_or_hf_repo, target, None, trust_remote_code)
    words = None if text is None else expanded(text).read_text(encoding="utf-8")
    model, tokenizer, config, _ = load_stock(source, lazy=True, trust_remote_code=trust_remote_code)
    if any(hasattr(module, "scales") for module in model.modules()):
        raise ValueError(f"{source}: already quantized; `convert --dequantize` undoes that")
    files = sorted(source.glob("*.safetensors"))
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    name = sha256(json.dumps([str(source.resolve()), facts]).encode()).hexdigest()[:12]
    folder = target.with_name(f".{target.name}.gptq-{name}")
    config["quantization"] = quantize_model(model, tokenizer, text=words, folder=folder, **options)
    written = _write(target, source, model, tokenizer, config, path_or_hf_repo)
    remove_tree(folder, ignore_errors=True)
    return written


def convert_gguf(
    file: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: str | None = None
) -> Written:
    """Write the model of a GGUF file into a directory that mlx-lm loads, its codes as they are.

    ``file`` is as for :func:`mlx_qlayers.conversion.gguf.read_gguf`, or ``"OWNER/REPO/FILE.gguf"``,
    a file of a repository of the Hub; ``dtype`` is that of what is not packed, by default float16,
    and bfloat16 for Gemma. Else as :func:`quantize_checkpoint`.

    Example:
        >>> print(convert_gguf("qwen2.5-0.5b-instruct-q4_0.gguf", "qwen2.5"))
        qwen2.5: ... quantized layers, ... bits per weight, ... MB
    """
    from mlx_lm.utils import load_tokenizer

    from .gguf import read_gguf

    target, source = _find(file, target, None, False)
    with TemporaryDirectory() as name:
        folder = Path(name)
        kind = None if dtype is None else getattr(mx, dtype)
        model, config = read_gguf(source, folder, dtype=kind)
        tokenizer = load_tokenizer(folder, eos_token_ids=config["eos_token_id"])
        return _write(target, folder, model, tokenizer, config)


def _find(
    path_or_hf_repo: str | os.PathLike[str],
    target: str | os.PathLike[str],
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[Path, Path]:
    """The directory to write, where there is nothing yet, and that of the model."""
    target = expanded(target)
    check_free(target)
    return target, find_model(
        path_or_hf_repo, revision=revision, trust_remote_code=trust_remote_code
    )


def _write(
    target: Path,
    source: Path,
    model: nn.Module,
    tokenizer: Any,
    config: dict[str, Any],
    origin: str | os.PathLike[str] = "",
) -> Written:
    """Write a model; where ``origin`` is a repository, its card names that."""
    from huggingface_hub import ModelCard
    from mlx_lm.utils import compute_bits_per_weight, save
    from tqdm import tqdm

    layers = sum(hasattr(module, "scales") for module in model.modules())
    weights = dict(tree_flatten(model.parameters())).values()
    nbytes = sum(weight.nbytes for weight in weights)
    written = Written(target, layers, compute_bits_per_weight(model), nbytes)
    with staged_directory(target) as staging:
        if (free := shutil.disk_usage(staging).free) < nbytes:
            needs = f"the model takes {nbytes / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
            raise OSError(f"{staging.parent}: {needs}")
        # One weight after the other: the bar moves, and no two unquantized ones are held.
        for weight in tqdm(weights, desc="converting", unit="tensor", disable=None):
            mx.eval(weight)
        try:
            save(staging, source, model, tokenizer, config)
        except RuntimeError as error:  # how MLX reports a failed write
            raise OSError(f"{staging}: the model cannot be written: {error}") from error
        if origin and not os.path.exists(origin):
            card = ModelCard.load(staging / "README.md")
            card.data.base_model = os.fspath(origin)
            card.save(staging / "README.md")
        check_directory(staging)
    return written


def _cast(model: nn.Module, dtype: Any) -> None:
    """Cast the floating weights as mlx-lm's converter does, but those that the model exempts."""
    if dtype in ("float16", "bfloat16", "float32"):
        wanted = getattr(model, "cast_predicate", lambda _: True)
        parameters = dict(tree_flatten(model.parameters()))
        model.set_dtype(getattr(mx, dtype))
        model.update(tree_unflatten([p for p in parameters.items() if not wanted(p[0])]))
