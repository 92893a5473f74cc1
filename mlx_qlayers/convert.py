"""Puts this package's layers into a model, and takes them out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from .config import QuantizationConfig
from .formats import Format
from .layers.qlinear import QEmbedding, QLinear
from .layers.routing import is_routed, routed_class, stock_class
from .report import ALREADY, LEFT, QUANTIZED, REVERTED, SWAPPED, ConversionReport, ModuleReport
from .verify import Verifier

Predicate = Callable[[str, nn.Module], bool]
_COUNTERPARTS: dict[type, tuple[str, type[nn.Module]]] = {
    nn.QuantizedLinear: ("linear", QLinear),
    nn.QuantizedEmbedding: ("embedding", QEmbedding),
}


@dataclass(frozen=True)
class _Step:
    """A module of the model, its row in the report, and what it becomes."""

    module: nn.Module
    row: ModuleReport
    cls: type[nn.Module] | None = None
    packed: nn.Module | None = None  # the quantized twin of an nn.Linear

    def left(self, reason: str) -> _Step:
        return _Step(self.module, replace(self.row, action=LEFT, reason=reason))


def convert_model(
    model: nn.Module,
    *,
    config: object = None,
    linear: bool = True,
    attention: bool = True,
    predicate: Predicate | None = None,
    dry_run: bool = False,
    verify: bool = True,
) -> ConversionReport:
    """Swap this package's layers into a model, in place.

    ``nn.QuantizedLinear`` becomes :class:`QLinear`, the product of a tied
    ``nn.QuantizedEmbedding`` goes the same way, and modules that compute attention with mlx-lm's
    shared function become :class:`FusedAttention`. Module paths, parameter names and arrays stay.
    Everything is checked before the first swap: an error leaves the model as it was.

    Args:
        model: any ``nn.Module``, such as a model loaded with mlx-lm.
        config: the contents of the model's ``config.json``, or a path to it. Its
            ``quantization`` entry is held against the arrays. It also quantizes ``nn.Linear``
            layers: those it names, and, in a model where nothing is quantized yet, all whose
            width the group size divides (and the model's own ``quant_predicate`` allows).
        linear: convert linear and embedding layers.
        attention: convert attention.
        predicate: called with path and module; false leaves the module alone.
        dry_run: report what would be done, and do nothing.
        verify: run each kind of layer once on random input, and compare with the stock layer.

    Returns:
        The report: a row for each module with what happened to it and why. Print it.

    Raises:
        ValueError: ``model`` is no module, nothing in it is quantized and ``config`` asks for
            nothing, ``config`` contradicts the arrays, or a layer fails the verification.
        FileNotFoundError: ``config`` is a path that does not exist.

    Example:
        >>> from mlx_lm import load
        >>> model, tokenizer = load("Qwen/Qwen2-7B-Instruct-MLX")
        >>> print(convert_model(model))
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an mlx.nn.Module, not {type(model).__name__}: {model!r}")
    wanted = QuantizationConfig() if config is None else QuantizationConfig.read(config)
    planner = _Planner(model, wanted, linear, attention, predicate)
    steps = planner.steps()
    report = ConversionReport(tuple(s.row for s in steps), planner.unmatched(), dry_run)
    if linear and not planner.has_quantized and QUANTIZED not in report.counts:
        raise ValueError(
            "the model has no quantized layer: pass a config with a 'quantization' entry to "
            "quantize its nn.Linear layers, or linear=False to convert its attention alone"
        )
    if dry_run:
        return report
    changes = [step for step in steps if step.cls is not None]
    mx.eval([step.packed.parameters() for step in changes if step.packed is not None])
    if verify:
        verifier = Verifier(model)
        for step in changes:
            assert step.cls is not None
            verifier.check(step.row.path, step.packed or step.module, step.cls)
    _apply(changes)
    return report


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
        >>> revert_model(model).counts
        {'reverted': 33}
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an mlx.nn.Module, not {type(model).__name__}: {model!r}")
    stock = {
        QLinear: ("linear", nn.QuantizedLinear),
        QEmbedding: ("embedding", nn.QuantizedEmbedding),
    }
    changes = []
    for path, module in _modules(model):
        if type(module) in stock:
            kind, cls = stock[type(module)]
            changes.append(_Step(module, _row(path, kind, module, REVERTED), cls))
        elif is_routed(module):
            row = _row(path, "attention", module, REVERTED)
            changes.append(_Step(module, row, stock_class(module)))
    _apply(changes)
    return ConversionReport(tuple(step.row for step in changes))


def _apply(changes: list[_Step]) -> None:
    """Make all changes, or none if anything interrupts them."""
    before = [
        (s.module, s.module.__class__, dict(s.module), vars(s.module).copy()) for s in changes
    ]
    try:
        for step in changes:
            if step.packed is not None:
                _replace(step.module, dict(step.packed), vars(step.packed))
            assert step.cls is not None
            step.module.__class__ = step.cls
    except BaseException:
        for module, cls, items, attributes in before:
            module.__class__ = cls
            _replace(module, items, attributes)
        raise


def _replace(module: nn.Module, items: dict, attributes: dict) -> None:
    """Make ``module`` hold what another does, so that all references to it see the change."""
    module.clear()
    dict.update(module, items)  # Module.update takes parameters
    vars(module).clear()
    vars(module).update(attributes)


class _Planner:
    """Decides for each module what becomes of it; changes nothing."""

    def __init__(
        self,
        model: nn.Module,
        config: QuantizationConfig,
        linear: bool,
        attention: bool,
        predicate: Predicate | None,
    ) -> None:
        self.modules = list(_modules(model))
        self.config = config
        self.linear = linear
        self.attention = attention
        self.predicate = predicate or (lambda path, module: True)
        self.quant_predicate = getattr(model, "quant_predicate", None)
        self.has_quantized = any("scales" in module for _, module in self.modules)
        self.keys: set[str] = set()

    def steps(self) -> list[_Step]:
        """A step for every module that a conversion concerns."""
        return [step for path, m in self.modules if (step := self._step(path, m)) is not None]

    def unmatched(self) -> tuple[str, ...]:
        """Per-layer keys of the configuration that no module has asked for."""
        return tuple(key for key in self.config.layers if key not in self.keys)

    def _step(self, path: str, module: nn.Module) -> _Step | None:
        kind = _kind(module)
        if kind is None:
            return None
        step = _Step(module, _row(path, kind, module, SWAPPED))
        if kind == "attention":
            plan, switch = self._attention, self.attention
        else:
            key, said = self._entry(path)
            if "scales" in module:
                self._check(path, module, key, said)
            plan, switch = self._linear, self.linear
        if is_routed(module) or isinstance(module, (QLinear, QEmbedding)):
            return _Step(module, replace(step.row, action=ALREADY))
        if not switch:
            return step.left(f"{'attention' if kind == 'attention' else 'linear'}=False")
        if not self.predicate(path, module):
            return step.left("the predicate says so")
        return plan(path, step)

    def _attention(self, path: str, step: _Step) -> _Step:
        cls = routed_class(type(step.module))
        if cls is None:
            return step.left("does not use mlx-lm's shared attention function")
        return replace(step, cls=cls)

    def _linear(self, path: str, step: _Step) -> _Step:
        module = step.module
        if type(module) is nn.Linear:
            return self._quantize(path, step)
        if type(module) in _COUNTERPARTS:
            try:
                Format.checked(module.group_size, module.bits, module.mode)
            except ValueError as error:
                return step.left(str(error))
            return replace(step, cls=_COUNTERPARTS[type(module)][1])
        if "scales" not in module:
            return step.left("is not quantized")
        return step.left(f"no counterpart of {type(module).__name__}")

    def _quantize(self, path: str, step: _Step) -> _Step:
        module, (key, said) = step.module, self._entry(path)
        if not isinstance(said, Format):
            return step.left("config says false" if said is False else "is not quantized")
        if not key:
            if self.has_quantized:
                return step.left("is not quantized, as others are, and config does not name it")
            allowed = True if self.quant_predicate is None else self.quant_predicate(path, module)
            if not allowed:
                return step.left("the model's quant_predicate says so")
            if isinstance(allowed, dict):
                said = Format.checked(**{**said._asdict(), **allowed})
        if module.weight.shape[-1] % said.group_size:
            reason = f"its width {module.weight.shape[-1]} is no multiple of {said.group_size}"
            if key:
                raise ValueError(
                    f"{path}: {self.config.describe(key)} asks for {said}, but {reason}"
                )
            return step.left(reason)
        packed = nn.QuantizedLinear.from_linear(module, *said)
        packed.train(module.training)
        row = _row(path, "linear", packed, QUANTIZED)
        return _Step(
            module, replace(row, reason=f"{self.config.describe(key)} asks for it"), QLinear, packed
        )

    def _entry(self, path: str) -> tuple[str, Format | bool | None]:
        key, said = self.config.entry(path)
        owner, _, name = path.rpartition(".")
        if not key and name in ("linear", "embedding"):  # inside an adapter of mlx-lm
            key, said = self.config.entry(owner)
        self.keys.add(key)
        return key, said

    def _check(self, path: str, module: nn.Module, key: str, said: Format | bool | None) -> None:
        """Hold a quantized module against its own arrays and against the configuration."""
        live = Format(module.group_size, module.bits, getattr(module, "mode", "affine"))
        if type(module) in _COUNTERPARTS or isinstance(module, (QLinear, QEmbedding)):
            problem = live.mismatch(module["weight"], module["scales"], module.get("biases"))
            if problem:
                raise ValueError(f"{path}: {problem}")
        if said is False or isinstance(said, Format) and said != live:
            says = "it is not quantized" if said is False else str(said)
            raise ValueError(
                f"{path}: {self.config.describe(key)} says {says}, but the arrays hold {live}; "
                "without a config the arrays are trusted"
            )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path, in the order of the model."""
    seen: set[int] = set()
    for path, module in reversed(model.named_modules()):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.QuantizedEmbedding | nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or "scales" in module and "weight" in module:
        return "experts" if module["weight"].ndim > 2 else "linear"
    cls = type(module)
    if is_routed(module) or routed_class(cls) or "attention" in cls.__name__.lower():
        return "attention"
    return None


def _row(path: str, kind: str, module: nn.Module, action: str) -> ModuleReport:
    if kind == "attention":
        return ModuleReport(path, kind, None, None, None, None, action)
    shape = module["weight"].shape
    if "scales" not in module:
        return ModuleReport(path, kind, shape, None, None, None, action)
    mode = getattr(module, "mode", "affine")
    shape = (*shape[:-1], shape[-1] * 32 // module.bits)
    return ModuleReport(path, kind, shape, module.group_size, module.bits, mode, action)
