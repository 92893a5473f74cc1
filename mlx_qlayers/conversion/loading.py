"""Models from a directory or from the Hugging Face Hub, with their stock layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..formats import Format
from ..runtime.ranks import check_same, raising_on_all_ranks
from ..runtime.staging import expanded
from .checkpoint import PATTERNS, check_adapter, check_directory, digests
from .config import QuantizationConfig
from .gguf_file import read_header
from .plan import modules
from .report import printable
from .shares import PARALLEL, Tensor, take_share, tensors_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


class Loaded(NamedTuple):
    """A model with its stock layers, and what came with it."""

    model: nn.Module  # what mlx-lm built
    tokenizer: TokenizerWrapper  # with mlx-lm's detokenizer
    config: dict[str, Any]  # the contents of `config.json`, as mlx-lm completed them
    quantization: QuantizationConfig  # as in `config.json`, to be compared with the arrays


def load_stock(
    path_or_hf_repo: str | os.PathLike[str],
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    group: mx.distributed.Group | None = None,
    parallel: str = "tensor",
) -> Loaded:
    """The model with its stock layers, after its files were checked; else as ``mlx_lm.load``.

    With a group all of its ranks make this call and have a share of the model each, see
    :func:`.shares.take_share`, or the whole one where ``parallel`` is ``"data"``. They stop
    together where their files differ or one has an error.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    given = tokenizer_config, model_config, adapter_path, lazy, trust_remote_code
    if group is None or group.size() == 1:
        return _load(find_model(path_or_hf_repo, **options), *given)
    if parallel not in (*PARALLEL, "data"):
        raise ValueError(f"parallel must be one of {', '.join(PARALLEL)}, not {parallel!r}")
    if adapter_path is not None and parallel != "data":
        raise ValueError(f"{adapter_path}: adapters are not sharded; fuse them into the model")
    with raising_on_all_ranks(group):
        path = find_model(path_or_hf_repo, **options)
        check_model(path, trust_remote_code=trust_remote_code)
        facts = digests(path)
    check_same(group, facts)
    share = (group, parallel) if parallel != "data" else None
    with raising_on_all_ranks(group):
        return _load(path, *given, share)


def _load(
    path: Path,
    tokenizer_config: dict[str, Any] | None,
    model_config: dict[str, Any] | None,
    adapter_path: str | None,
    lazy: bool,
    trust_remote_code: bool,
    share: tuple[mx.distributed.Group, str] | None = None,
) -> Loaded:
    from mlx_lm.utils import load_adapters, load_model

    read: dict[str, mx.array] = {}
    sources: dict[str, Tensor] = {}
    options = {"trust_remote_code": trust_remote_code} | (tokenizer_config or {})
    if adapter_path is not None:
        check_adapter(Path(adapter_path))
    # Lazily: no weight is read before everything else is in order.
    if path.suffix == ".gguf":
        from .gguf import read_gguf

        with TemporaryDirectory() as folder:
            model, config = read_gguf(path, Path(folder))
            quantization = QuantizationConfig.parse(config, str(path))
            tokenizer = _tokenizer(Path(folder), config, options)
    else:
        config = check_directory(path) | (model_config or {})
        quantization = QuantizationConfig.parse(config, str(path / "config.json"))
        with _blame(path, f"mlx-lm builds no {config['model_type']} from config.json and weights"):
            model, config = load_model(
                path,
                lazy=True,
                model_config=model_config,
                get_model_classes=partial(_checked_classes, quantization, read),
                trust_remote_code=trust_remote_code,
            )
        tokenizer = _tokenizer(path, config, options)
        if share is not None:
            names = {id(array): name for name, array in read.items()}
            found = tensors_of(path)
            held: Any = tree_flatten(model.parameters())
            sources = {at: found[names[id(a)]] for at, a in held if id(a) in names}
    read.clear()
    if share is not None:
        with _blame(path, "its share cannot be read"):
            take_share(model, *share, sources)
    if adapter_path is not None:
        with _blame(adapter_path, "the adapters cannot be applied"):
            model = load_adapters(model, adapter_path)
            model.eval()
    if not lazy:
        with _blame(path, "the weights cannot be read"):
            mx.eval(model.parameters())
    return Loaded(model, tokenizer, config, quantization)


def _tokenizer(path: Path, config: dict[str, Any], options: dict[str, Any]) -> TokenizerWrapper:
    from mlx_lm.utils import load_tokenizer

    with _blame(path, "the tokenizer cannot be read"):
        return load_tokenizer(path, options, eos_token_ids=config.get("eos_token_id"))


def check_model(
    path_or_hf_repo: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> None:
    """Check the files of a model without building it; raises what :func:`load_stock` would."""
    path = find_model(path_or_hf_repo, trust_remote_code=trust_remote_code)
    if path.suffix == ".gguf":
        read_header(path)
    else:
        check_directory(path)


def find_model(
    path_or_hf_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    patterns: Sequence[str] = (),
) -> Path:
    """The directory of a model, downloaded first if it names a repository of the Hub.

    ``"OWNER/REPO/FILE.gguf"`` names a GGUF file of a repository, of which there are often many.
    Files of other ``patterns`` than those of a model are downloaded where there are some.
    """
    name = os.fspath(path_or_hf_repo)
    if not name:
        raise FileNotFoundError("the name of the model is empty")
    path = expanded(name)
    if path.exists():
        return path

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm, validate_repo_id

    class Bar(tqdm):  # the Hub's own shows the number of files in a pipe too
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"disable": None} | options)

    repository, file = name, ""
    if name.endswith(".gguf") and name.count("/") > 1:
        owner, repository, file = name.split("/", 2)
        repository = f"{owner}/{repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise FileNotFoundError(f"{name}: no such directory") from error
    wanted = [file] if file else patterns or [*PATTERNS, *["*.py"] * trust_remote_code]
    options: Any = {"allow_patterns": wanted, "revision": revision, "tqdm_class": Bar}
    try:
        return Path(snapshot_download(repository, **options)) / file
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{name}: no such directory, and no repository of the Hugging Face Hub within reach: "
            f"{error}"
        ) from error


def _checked_classes(
    quantization: QuantizationConfig, read: dict[str, mx.array], config: dict[str, Any]
) -> tuple[Any, Any]:
    """mlx-lm's classes of a model that checks the weights it loads, and puts them into ``read``."""
    from mlx_lm.utils import _get_classes

    cls, arguments = _get_classes(config)

    def build(args: Any) -> nn.Module:
        model = cls(args)
        sanitize = getattr(model, "sanitize", lambda weights: weights)

        def checked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            del model.sanitize
            read.update(weights)
            weights = sanitize(weights)
            for path, module in modules(model):
                if "weight" in module and f"{path}.scales" in weights:
                    _check_packed(path, module, weights, quantization)
            return weights

        model.sanitize = checked
        return model

    return build, arguments


def _check_packed(
    path: str, module: nn.Module, weights: dict[str, mx.array], quantization: QuantizationConfig
) -> None:
    """Compare quantized weights with the layer that is to have them: for groups of 0 MLX exits."""
    from mlx_lm.utils import infer_quant_config

    packed, scales = weights.get(f"{path}.weight"), weights[f"{path}.scales"]
    shape = module["weight"].shape
    if packed is None or packed.dtype != mx.uint32:  # of another tool
        return
    if not scales.size or scales.shape[:-1] != shape[:-1] or shape[-1] % scales.shape[-1]:
        raise ValueError(
            f"{path}: config.json gives it a weight of shape {shape}, and the file has scales of "
            f"shape {scales.shape}"
        )
    if path in quantization.layers:
        live = Format.from_entry(infer_quant_config(path, module, weights))
        quantization.check(path, *quantization.entry(path), live)


@contextmanager
def _blame(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Name the model in an error of mlx-lm, which may be of any type and speak of none."""
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt, GeneratorExit):
        raise
    # olmo's file exits where its package is missing; a panic of a tokenizer is no Exception.
    except BaseException as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(printable(f"{path}: {what}: {kind}{error}")) from error
