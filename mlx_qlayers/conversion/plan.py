"""Decides what becomes of each module of a model, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..layers.fused_attention import FusedAttention
from ..layers.qlinear import Counterpart, QLinear
from ..layers.sharded import COUNTERPARTS, QAllToShardedLinear, QShardedToAllLinear
from .attention_patch import is_patched, patched_class
from .config import QuantizationConfig
from .registry import registered_as, registered_for
from .report import ALREADY, LEFT, QUANTIZED, SWAPPED, ModuleReport

Predicate = Callable[[str, nn.Module], bool]
# Kinds of modules whose code stays, with functions of this package in the place of mlx-lm's.
PATCHED = "attention", "gate"


@dataclass(frozen=True)
class Change:
    """A module of the model, its row in the report, and what it becomes."""

    module: nn.Module
    row: Any  # of ModuleReport or FusionReport
    cls: type[nn.Module] | None = None
    packed: nn.Module | None = None  # the quantized twin of an nn.Linear

    def left(self, reason: str) -> Change:
        return Change(self.module, replace(self.row, action=LEFT, reason=reason))

    def make(self) -> None:
        """Let the module become it; all references to the module see the change."""
        if self.packed is not None:
            hold(self.module, dict(self.packed), vars(self.packed))
        if self.cls is not None:
            self.module.__class__ = self.cls


def hold(module: nn.Module, items: dict, attributes: dict) -> None:
    """Make ``module`` hold what another does; another thread may use it meanwhile."""
    for held, wanted in ((module, items), (vars(module), attributes)):
        dict.update(held, wanted)  # Module.update takes parameters
        for name in held.keys() - wanted.keys():
            del held[name]


class Planner:
    """Decides for each module what becomes of it; changes nothing."""

    def __init__(
        self,
        model: nn.Module,
        config: QuantizationConfig,
        linear: bool = True,
        attention: bool = True,
        predicate: Predicate | None = None,
    ) -> None:
        self.modules = list(modules(model))
        self.config = config
        self.linear = linear
        self.attention = attention
        self.predicate = predicate or (lambda path, module: True)
        self.quant_predicate = getattr(model, "quant_predicate", None)
        self.has_registered = any(kind_of(module) == "module" for _, module in self.modules)
        self.has_quantized = any(_is_packed(module) for _, module in self.modules)
        self.keys: set[str] = set()
        self.shares = dict(_shares(self.modules))

    def steps(self) -> list[Change]:
        """A step for every module that a conversion concerns."""
        return [step for path, m in self.modules if (step := self._step(path, m)) is not None]

    def unmatched(self) -> tuple[str, ...]:
        """Per-layer keys of the configuration that no module has asked for."""
        return tuple(key for key in self.config.layers if key not in self.keys)

    def _step(self, path: str, module: nn.Module) -> Change | None:
        kind = kind_of(module)
        if kind is None:
            return None
        row = row_of(path, kind, module, SWAPPED)
        step = Change(module, replace(row, reason=self.shares.get(id(module), "")))
        switch, is_done = True, is_patched(module) or isinstance(module, Counterpart)
        plan: Callable[[str, Change], Change]
        if kind == "module":
            plan, is_done = self._registered, registered_for(type(module)) is None
        elif kind in PATCHED:
            plan = self._patched
            switch = self.attention if kind == "attention" else self.linear
        else:
            key, said = self._entry(path)
            if _is_packed(module):
                self._check(path, module, key, said)
            plan, switch = self._linear, self.linear
        if is_done:
            return Change(module, replace(step.row, action=ALREADY))
        if not switch:
            return step.left(f"{'attention' if kind == 'attention' else 'linear'}=False")
        if not self.predicate(path, module):
            return step.left("the predicate says so")
        return plan(path, step)

    def _registered(self, path: str, step: Change) -> Change:
        registration = registered_for(type(step.module))
        assert registration is not None
        reason = f"{registration.counterpart.__name__} for {registration.stock.__name__}"
        reason += "" if registration.example else ", not compared: registered without an example"
        return Change(step.module, replace(step.row, reason=reason), registration.counterpart)

    def _patched(self, path: str, step: Change) -> Change:
        cls = patched_class(type(step.module))
        if cls is None:
            return step.left("does not use mlx-lm's shared attention function")
        return replace(step, cls=cls)

    def _linear(self, path: str, step: Change) -> Change:
        module = step.module
        if type(module) is nn.Linear:
            return self._quantize(path, step)
        if (cls := counterpart_of(type(module))) is not None:
            try:
                Format.checked(module.group_size, module.bits, module.mode)
            except ValueError as error:
                return step.left(str(error))
            return replace(step, cls=cls)
        if not _is_packed(module):
            return step.left("is not quantized")
        return step.left(f"no counterpart of {type(module).__name__}")

    def _quantize(self, path: str, step: Change) -> Change:
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
                said = Format.from_entry(allowed)
        if module.weight.shape[-1] % said.group_size:
            reason = f"its width {module.weight.shape[-1]} is no multiple of {said.group_size}"
            if key:
                raise ValueError(
                    f"{path}: {self.config.describe(key)} asks for {said}, but {reason}"
                )
            return step.left(reason)
        packed = nn.QuantizedLinear.from_linear(module, *said)
        packed.train(module.training)
        packed._no_grad |= module._no_grad
        row = row_of(path, "linear", packed, QUANTIZED)
        return Change(
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
        if counterpart_of(type(module)) or isinstance(module, Counterpart):
            w, bias = module["weight"], module.get("bias")
            problem = live.mismatch(w, module["scales"], module.get("biases"))
            if bias is not None and bias.shape != w.shape[:-1]:
                problem = problem or f"bias of shape {bias.shape} must be {w.shape[:-1]}"
            if problem:
                raise ValueError(f"{path}: {problem}")
        self.config.check(path, key, said, live)


def _shares(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[int, str]]:
    """Of layers by their identity what part of them this rank has, and who adds the parts."""
    for path, module in modules:
        if (group := _group(module)) is None:
            continue
        whose = f"rank {group.rank()} of {group.size()}"
        if isinstance(module, QAllToShardedLinear.stock):
            yield id(module), f"rows of {whose}"
        elif isinstance(module, QShardedToAllLinear.stock):
            yield id(module), f"columns of {whose}, added up"
        else:  # of which layers it has a part is known to mlx-lm's code alone
            parts = (part for part in module.modules() if _is_packed(part))
            yield from ((id(part), f"{whose}, added up in {path}") for part in parts)


def _group(module: nn.Module) -> mx.distributed.Group | None:
    """The ranks that share a module, if they are more than one."""
    group = getattr(module, "group", getattr(module, "sharding_group", None))
    return group if isinstance(group, mx.distributed.Group) and group.size() > 1 else None


def group_of(model: nn.Module) -> mx.distributed.Group | None:
    """The ranks that share a model; None where it is whole."""
    if is_stage(model):
        return mx.distributed.init()  # as mlx-lm's own code does
    return next(filter(None, map(_group, model.modules())), None)


def is_stage(model: nn.Module) -> bool:
    """Whether this rank has some of a model's layers."""
    return getattr(getattr(model, "model", None), "pipeline_size", 1) > 1


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its arrays, and its groups of ranks, which nothing copies."""
    inside = (value for part in module.modules() for value in vars(part).values())
    groups = [value for value in inside if isinstance(value, mx.distributed.Group)]
    twin: nn.Module = copy.deepcopy(module, {id(group): group for group in groups})
    return twin


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path, in the order of the model."""
    seen: set[int] = set()
    for path, module in reversed(model.named_modules()):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _is_packed(module: nn.Module) -> bool:
    return "scales" in module and "weight" in module and hasattr(module, "bits")


def kind_of(module: nn.Module) -> str | None:
    """Its kind: that of :class:`.report.ModuleReport`, or None."""
    if registered_for(type(module)) or registered_as(type(module)):
        return "module"
    if isinstance(module, nn.QuantizedEmbedding | nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or _is_packed(module):
        return "experts" if module["weight"].ndim > 2 else "linear"
    if (kind := _patched_kind(module)) is not None:
        return kind
    if "attention" in type(module).__name__.lower() and "attention" not in map(
        _patched_kind, module.modules()
    ):
        return "attention"  # one that computes on its own, not one that holds another
    return None


def _patched_kind(module: nn.Module) -> str | None:
    """ "attention" or "gate", by the functions of mlx-lm that a module uses; None for others.

    An empty module may be a default argument, as the activation of experts, which all models share.
    """
    cls = type(module) if is_patched(module) else patched_class(type(module))
    if cls is None or not module:
        return None
    return "attention" if issubclass(cls, FusedAttention) else "gate"


def row_of(path: str, kind: str, module: nn.Module, action: str) -> ModuleReport:
    """The report's row of a module as it is now."""
    if kind in (*PATCHED, "module"):
        return ModuleReport(path, kind, None, None, None, None, action)
    shape = module["weight"].shape
    if not _is_packed(module):
        return ModuleReport(path, kind, shape, None, None, None, action)
    mode = getattr(module, "mode", "affine")
    shape = (*shape[:-1], shape[-1] * 32 // module.bits)
    return ModuleReport(path, kind, shape, module.group_size, module.bits, mode, action)


def counterpart_of(cls: type[nn.Module]) -> type[Counterpart] | None:
    """The layer that stands in for a stock class; None if there is none."""
    # mlx-lm takes long to import: where its layer is at hand, that has been done.
    if cls.__module__ == "mlx_lm.models.switch_layers":
        from ..layers.switch_linear import QSwitchLinear

        return QSwitchLinear if cls is QSwitchLinear.stock else None
    if cls.__module__ == "mlx_lm.models.mla":
        from ..layers.multi_linear import QMultiLinear

        return QMultiLinear if cls is QMultiLinear.stock else None
    return COUNTERPARTS.get(cls)


def stock_of(module: nn.Module) -> type[nn.Module] | None:
    """The stock class that the class of ``module`` stands in for; None if it does not."""
    if (registration := registered_as(type(module))) is not None:
        return registration.stock
    if isinstance(module, Counterpart) and counterpart_of(module.stock) is type(module):
        return module.stock
    return None
