"""Puts this package's layers into a model, loads one with them, and takes them out again."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from .conversion.attention_patch import is_patched
from .conversion.config import QuantizationConfig
from .conversion.heads import find_heads, is_converted, read_heads
from .conversion.invariance import check_can_be, check_model
from .conversion.loading import load_stock
from .conversion.plan import (
    Change,
    Planner,
    Predicate,
    group_of,
    hold,
    kind_of,
    modules,
    row_of,
    stock_of,
)
from .conversion.report import QUANTIZED, REVERTED, ConversionReport
from .conversion.sharding import sharding_class
from .conversion.stepping import planned, step_class
from .conversion.verify import verify_steps
from .decode.twin import stock_class
from .decode.weights import arrange
from .layers.int8_linear import join_int8, leave_int8
from .layers.qlinear import Counterpart
from .runtime.devices import device_of
from .speculation.heads import Heads
from .tuning.calibrate import calibrate as measure
from .tuning.model_records import compile_kernels

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def convert_model(
    model: nn.Module,
    *,
    config: object = None,
    linear: bool = True,
    attention: bool = True,
    fuse: bool = True,
    predicate: Predicate | None = None,
    dry_run: bool = False,
    verify: bool = True,
    calibrate: bool = True,
    activations: str | None = None,
    batch_invariant: bool = False,
) -> ConversionReport:
    """Swap this package's layers into a model, in place.

    ``nn.QuantizedLinear`` becomes :class:`QLinear`, the product of a tied
    ``nn.QuantizedEmbedding`` goes the same way, mlx-lm's ``QuantizedSwitchLinear`` becomes
    :class:`QSwitchLinear`, and modules that compute attention with mlx-lm's
    shared function become :class:`FusedAttention`. Gates, ``silu(gate) * x``, run by a kernel on a
    CPU. Classes of other modules can be added with
    :func:`register_counterpart`. Module paths, parameter names and arrays stay.
    Everything is checked before the first swap: an error leaves the model as it was. Another thread
    may use the model meanwhile, unless ``config`` quantizes layers of it.

    Args:
        model: any ``nn.Module``, such as a model loaded with mlx-lm.
        config: the contents of the model's ``config.json``, or a path to it. Its
            ``quantization`` entry is compared with the arrays. It also quantizes ``nn.Linear``
            layers: those it names, and, in a model where nothing is quantized yet, all whose
            width the group size divides (and the model's own ``quant_predicate`` allows).
        linear: convert linear and embedding layers, the experts of mixtures, and gates.
        attention: convert attention.
        fuse: let a model that is called with tokens and caches decode by the graph of its step,
            in few launches. The model's class changes, nothing else does.
        predicate: called with path and module; false leaves the module as it is.
        dry_run: report what would be done, and do nothing.
        verify: run each kind of layer once on random input, and compare with the stock layer.
        calibrate: where nobody has measured them on this device, spend up to 6 seconds to measure
            kernels beside stock operators at the model's shapes. The results are kept.
        activations: ``"int8"`` lets the linear layers of decoder layers multiply prompts of
            more than 128 tokens in 8-bit integers: rows are rounded as they come, and each
            matrix has a copy of a byte a weight. On a CPU it is calls of up to 8 rows, so that of
            every token: blocks of 32 are rounded, and codes of 4 and 8 bits multiplied as they are
            packed. Results are no longer those of the stock layers.
        batch_invariant: logits of a sequence are the same bits alone, in any batch, and by any
            chunks of its prompt. It costs speed. On a GPU layers that stay dense are refused.

    Returns:
        The report: a row for each module with what happened to it and why. Print it.

    Raises:
        TypeError: ``model`` is the pair that ``load`` gives.
        ValueError: ``model`` is no module, nothing in it is quantized and ``config`` asks for
            nothing, ``config`` contradicts the arrays, a layer fails the verification, or a model
            that is to be batch-invariant is not.
        FileNotFoundError: ``config`` is a path that does not exist.

    Example:
        >>> from mlx_lm import load
        >>> model, tokenizer = load("Qwen/Qwen2-7B-Instruct-MLX")
        >>> print(convert_model(model).summary())
        path                               kind       shape     group  bits  mode    action ...
        model.embed_tokens                 embedding  4096x384  64     4     affine  swapped
        ...
        55 swapped
    """
    _check_module(model)
    if activations not in (None, "int8"):
        raise ValueError(f"activations must be 'int8' or None, not {activations!r}")
    if batch_invariant:
        check_can_be(model, activations)
    wanted = QuantizationConfig() if config is None else QuantizationConfig.read(config)
    planner = Planner(model, wanted, linear, attention, predicate)
    steps = planner.steps()
    whole = planned(model, steps, predicate, batch_invariant) if fuse or batch_invariant else ()
    rows, fusions = (tuple(step.row for step in each) for each in (steps, whole))
    report = ConversionReport(rows, planner.unmatched(), dry_run, fusions)
    nothing = not planner.has_quantized and not planner.has_registered
    if linear and nothing and QUANTIZED not in report.counts:
        raise ValueError(
            "the model has no quantized layer: quantize its checkpoint (mlx-qlayers convert), "
            "pass a config with a 'quantization' entry to quantize its nn.Linear layers, or "
            "linear=False to convert its attention only"
        )
    if dry_run:
        return report
    changes = [step for step in (*steps, *whole) if step.cls is not None]
    mx.eval([step.packed.parameters() for step in changes if step.packed is not None])
    if verify:
        verify_steps(model, [step for step in steps if step.cls is not None])
    has_swapped = any(s.cls is not None and issubclass(s.cls, Counterpart) for s in changes)
    if has_swapped and hasattr(model, "shard") and "_shards" not in vars(type(model)):
        changes = [*changes, Change(model, None, sharding_class(_class_after(model, changes)))]
    _make(changes)
    if batch_invariant:
        try:
            _check_invariant(model)
        except BaseException:
            revert_model(model)
            raise
    if fuse:
        arrange(model)
    compile_kernels(model)
    if calibrate:
        report = replace(report, calibration=str(measure(model, group=group_of(model))))
    if activations == "int8":
        join_int8(model)
    return report


def load(
    path_or_hf_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    lazy: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    linear: bool = True,
    attention: bool = True,
    fuse: bool = True,
    predicate: Predicate | None = None,
    verify: bool = True,
    calibrate: bool = True,
    activations: str | None = None,
    batch_invariant: bool = False,
    group: mx.distributed.Group | None = None,
    parallel: str = "tensor",
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model with mlx-lm and convert it: ``mlx_lm.load`` followed by ``convert_model``.

    A repository is downloaded through ``huggingface_hub``, with its progress bar on a terminal;
    with ``HF_HUB_OFFLINE=1`` only its cache is used. The files are checked before they are read.

    Args:
        path_or_hf_repo: a directory, a repository of the Hugging Face Hub (``owner/name``), or a
            GGUF file of a llama, qwen2, qwen3, gemma or phi model in Q4_0, Q4_1 or Q8_0.
        revision: a branch, tag or commit of the repository.
        lazy: leave the weights on disk until they are used.
        tokenizer_config: more keywords for the tokenizer.
        model_config: values that replace those of ``config.json``.
        adapter_path: a directory with LoRA adapters to apply before converting.
        trust_remote_code: run Python code that the model brings along.
        linear: as in ``convert_model``, as are ``attention``, ``fuse``, ``predicate``,
            ``verify``, ``calibrate``, ``activations`` and ``batch_invariant``.
        group: ranks that share the model, ``mx.distributed.init()`` where ``mlx.launch`` started
            them. All of them make this call, and each reads its share alone.
        parallel: how they share it: ``"tensor"``, a part of each layer, ``"pipeline"``, some of
            the layers, ``"experts"``, as tensor but with experts whole, or ``"data"``, all of it.

    Returns:
        The converted model and its tokenizer.

    Raises:
        FileNotFoundError: no such directory or repository, or a file of the model is missing.
        ValueError: a file is damaged, the model contradicts its configuration, it wants to
            run code of its own and ``trust_remote_code`` is false, or the ranks' files or
            versions differ, which each of them says then; or they cannot share the model so.

    Example:
        >>> from mlx_lm import generate
        >>> model, tokenizer = load("Qwen/Qwen2-7B-Instruct-MLX")
        >>> text = generate(model, tokenizer, prompt="Hello", max_tokens=64)
    """
    loaded = load_stock(
        path_or_hf_repo,
        revision=revision,
        lazy=lazy,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
        group=group,
        parallel=parallel,
    )
    convert_model(
        loaded.model,
        config=loaded.quantization,
        linear=linear,
        attention=attention,
        fuse=fuse,
        predicate=predicate,
        verify=verify,
        calibrate=calibrate,
        activations=activations,
        batch_invariant=batch_invariant,
    )
    return loaded.model, loaded.tokenizer


def load_heads(
    path_or_hf_repo: str | os.PathLike[str], model: nn.Module, *, revision: str | None = None
) -> Heads:
    """The heads that a checkpoint has for multi-token prediction, for :func:`speculate`.

    mlx-lm's loaders and converters drop them. They are quantized like the model's layers, unless
    the checkpoint has them quantized, and converted where the model was. Known are those of
    DeepSeek-V3, GLM-4.5 and 4.7, Qwen3-Next, Qwen3.5, MiMo and MiMo-V2-Flash.

    Args:
        path_or_hf_repo: the checkpoint, as in :func:`load`, or one safetensors file of it. Of a
            repository only the files with heads are downloaded.
        model: whose heads they are, as :func:`load` or ``mlx_lm.load`` gives it.
        revision: a branch, tag or commit of the repository.

    Returns:
        The heads, which share embeddings and output layer with the model, for the argument
        ``heads`` of :func:`speculate`.

    Raises:
        FileNotFoundError: no such directory or repository.
        ValueError: a file is damaged, heads of such models are not known, or the checkpoint has
            none.

    Example:
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> load_heads("models/tales-qwen2", model)
        Traceback (most recent call last):
            ...
        ValueError: qwen2: heads are known of deepseek_v3, glm4_moe, ...

    Source:
        DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437, section 2.2.
    """
    _check_module(model)
    heads = read_heads(find_heads(path_or_hf_repo, model, revision), model)
    if is_converted(model):
        options: dict[str, Any] = {"fuse": False, "verify": False, "calibrate": False}
        convert_model(heads, linear=any("scales" in m for m in heads.modules()), **options)
    mx.eval(heads.parameters())
    return heads


def revert_model(model: nn.Module) -> ConversionReport:
    """Give a converted model its stock layers back, in place.

    The arrays are those the layers hold now. A layer that the conversion quantized becomes an
    ``nn.QuantizedLinear``: its unquantized weight was not kept.

    Args:
        model: a converted model; one without converted layers is left as it is.

    Returns:
        A row for each layer that was reverted.

    Raises:
        ValueError: ``model`` is no ``nn.Module``.

    Example:
        >>> model, tokenizer = load("Qwen/Qwen2-7B-Instruct-MLX")
        >>> revert_model(model).counts
        {'reverted': 55}
    """
    _check_module(model)
    leave_int8(model)
    changes = [Change(model, None, stock_class(type(model)))]
    for path, module in modules(model):
        if (stock := stock_of(module)) is not None:
            row = row_of(path, kind_of(module) or "linear", module, REVERTED)
            changes.append(Change(module, row, stock))
        elif is_patched(module):
            row = row_of(path, kind_of(module) or "attention", module, REVERTED)
            changes.append(Change(module, row, stock_class(type(module))))
    _make(changes)
    return ConversionReport(tuple(step.row for step in changes if step.row))


def _check_module(model: object) -> None:
    if isinstance(model, tuple) and any(isinstance(part, nn.Module) for part in model):
        raise TypeError(
            f"model must be an mlx.nn.Module, not a tuple of {len(model)}: "
            "model, tokenizer = load(path)"
        )
    if not isinstance(model, nn.Module):
        what = f"{type(model).__name__}: {reprlib.repr(model)}"
        raise ValueError(f"model must be an mlx.nn.Module, not {what}")


def _check_invariant(model: nn.Module) -> None:
    """Compare bits; a model whose graphs of steps have others runs its own code.

    Raises:
        ValueError: the bits of that depend on what else is computed with a sequence, too.
    """
    try:
        check_model(model)
    except ValueError:
        stock = vars(type(model)).get("_fuses")
        cls = step_class(stock, True, False) if stock else None
        if cls is None or not device_of().gpu:
            raise
        model.__class__ = cls
        check_model(model)


def _class_after(model: nn.Module, steps: Sequence[Change]) -> type[nn.Module]:
    """Of which class a model is after some steps."""
    return next((s.cls for s in steps if s.module is model and s.cls), type(model))


def _make(steps: Sequence[Change]) -> None:
    """Make all changes, or none if anything interrupts them."""
    before = [(s.module, s.module.__class__, dict(s.module), vars(s.module).copy()) for s in steps]
    try:
        for step in steps:
            step.make()
    except BaseException:
        for module, cls, items, attributes in before:
            module.__class__ = cls
            hold(module, items, attributes)
        raise
