"""Models from a directory or from the Hugging Face Hub, with their stock layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .checkpoint import check_directory
from .config import QuantizationConfig
from .plan import Planner

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# What mlx-lm downloads; Python files only where they may be run.
_PATTERNS = ("*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")


class Loaded(NamedTuple):
    """A model with its stock layers, and what came with it.

    Attributes:
        model: what mlx-lm built.
        tokenizer: with mlx-lm's detokenizer.
        config: the contents of ``config.json``, as mlx-lm completed them.
        quantization: what ``config.json`` says about it, to be compared with the arrays.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    quantization: QuantizationConfig


def load_stock(
    path_or_hf_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    lazy: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """The model with its stock layers, after its files were checked; else as ``load``."""
    path = find_model(path_or_hf_repo, revision=revision, trust_remote_code=trust_remote_code)
    config = check_directory(path) | (model_config or {})
    quantization = QuantizationConfig.parse(config, str(path / "config.json"))
    if not trust_remote_code and (code := config.get("model_file")) is not None:
        raise ValueError(
            f"{path / 'config.json'}: 'model_file' asks to run the model's own code ({code!r}); "
            "pass trust_remote_code=True (--trust-remote-code) if you trust it"
        )

    from mlx_lm.utils import load_adapters, load_tokenizer

    # Lazily: no weight is read before everything else is in order.
    model, config = _build(path, config, model_config or {}, quantization, trust_remote_code)
    with _blame(path, "the tokenizer cannot be read"):
        tokenizer = load_tokenizer(
            path,
            {"trust_remote_code": trust_remote_code} | (tokenizer_config or {}),
            eos_token_ids=config.get("eos_token_id"),
        )
    if adapter_path is not None:
        with _blame(Path(adapter_path), "the adapters cannot be applied"):
            model = load_adapters(model, adapter_path)
            model.eval()
    if not lazy:
        with _blame(path, "the weights cannot be read"):
            mx.eval(model.parameters())
    return Loaded(model, tokenizer, config, quantization)


def find_model(
    path_or_hf_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The directory of a model, downloaded first where it names a repository of the Hub.

    Raises:
        FileNotFoundError: there is neither such a directory nor such a repository within reach.
    """
    name = os.fspath(path_or_hf_repo)
    if not name:
        raise FileNotFoundError("the name of the model is empty")
    path = Path(name).expanduser()
    if path.exists():
        return path

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm, validate_repo_id

    class Bar(tqdm):  # the Hub's own shows the number of files in a pipe too
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"disable": None} | options)

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise FileNotFoundError(f"{name}: no such directory") from error
    options: Any = {"allow_patterns": [*_PATTERNS, *["*.py"] * trust_remote_code]}
    try:
        return Path(snapshot_download(name, revision=revision, tqdm_class=Bar, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{name}: no such directory, and no repository of the Hugging Face Hub within reach: "
            f"{error}"
        ) from error


def _build(
    path: Path,
    config: dict[str, Any],
    changes: dict[str, Any],
    quantization: QuantizationConfig,
    trusted: bool,
) -> tuple[nn.Module, dict[str, Any]]:
    from mlx_lm.utils import load_model

    def build(changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        with _blame(path, f"mlx-lm builds no {config['model_type']} from config.json and weights"):
            return load_model(path, lazy=True, model_config=changes, trust_remote_code=trusted)

    try:
        return build(changes)
    except ValueError:
        if quantization.layers and (entry := config.get("quantization")):
            # Without the layers' entries mlx-lm takes the formats from the arrays.
            general = {key: entry[key] for key in ("group_size", "bits", "mode") if key in entry}
            try:
                model, _ = build(changes | {"quantization": general})
            except ValueError:
                pass
            else:
                Planner(model, quantization).steps()  # names the contradiction
        raise


@contextmanager
def _blame(path: Path, what: str) -> Iterator[None]:
    """Name the model in an error of mlx-lm, which may be of any type and speak of none."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # olmo's file exits where its package is missing
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path}: {what}: {kind}{error}") from error
