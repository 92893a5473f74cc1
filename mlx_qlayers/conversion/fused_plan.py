"""Decides which modules of a model compute with fused launches, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.nn as nn

from ..formats import Format
from ..layers.sharded import LINEARS
from ..metal.quantized_matmul.qmv import MAX_MATRICES
from .attention_patch import stock_class
from .compiled_step import STEP, step_class, why_not
from .experts import EXPERTS, experts_class, holds_experts, how_chosen, is_experts, layers_of
from .fused_blocks import GROUPED, fused_class, groups_of, is_fused, unfused_class
from .matcher import Match, Mismatch, recognise
from .module_graph import graph_class
from .operands import GATES, match_of
from .plan import Predicate, Step, is_stage
from .report import ALREADY, FUSED, LEFT, FusionReport

_REFUSED = "the predicate says so"


class FusionPlanner:
    """Decides for each module whether its products share launches; changes nothing.

    Args:
        modules: the model's modules with their paths.
        steps: what becomes of its layers.
        predicate: that of ``convert_model``.

    Attributes:
        rows: a row for each module that was considered.
        changes: a step for each of those that are to be changed, after those of its parts.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        steps: Iterable[Step],
        predicate: Predicate | None,
    ) -> None:
        self.steps = {id(step.module): step for step in steps if step.cls is not None}
        self.predicate = predicate or (lambda path, module: True)
        self.changes: list[Step] = []
        self.fused: set[int] = set()
        found: dict[str, Step | None] = dict.fromkeys(path for path, _ in modules)
        matches = {path: _match(module) for path, module in modules}
        # A block is considered after its parts.
        for path, module in sorted(modules, key=lambda item: matches[item[0]].kind == "block"):
            found[path] = step = self._step(path, module, matches[path])
            if step is not None and step.row.action != LEFT:
                self.fused |= {id(module)} if matches[path] else set()
                self.changes += [step] if step.cls else []
        for path, module in modules:
            if not path:
                found[path] = step = self._whole(module) or found[path]
                self.changes += [step] if step is not None and step.cls else []
                if step is not None and step.row.kind == STEP and step.row.action == LEFT:
                    self._parts(found, modules)
        self.rows = tuple(step.row for step in found.values() if step is not None)

    def _step(self, path: str, module: nn.Module, match: Match | Mismatch) -> Step | None:
        kind, code = match.kind, "" if match else str(match)
        if is_fused(module):
            made = match_of(type(module))
            kind = "step" if made and made.pattern == STEP else kind
            return Step(module, FusionReport(path, kind, ALREADY, ""))
        if is_experts(type(module)):
            return self._experts(path, module)
        layers = [name for name, child in module.items() if self._is_packed(child)]
        has_experts = not match and holds_experts(module)
        if not match and len(layers) < 2 and not has_experts:
            return None
        swapped = any(self._class(part) is not type(part) for part in module.modules())
        if not (has_experts and swapped) and not any(map(self._is_packed, module.modules())):
            return None
        cls = fused_class(
            self._class(module), frozenset() if match else frozenset(layers), has_experts
        )
        row = FusionReport(path, kind, FUSED, how_chosen(module) if has_experts else "", code)
        if not isinstance(cls, type) and len(layers) < 2:
            return None
        if not isinstance(cls, type):
            row = replace(row, reason="")
            why = f"no two of {', '.join(layers)} are seen to have the same input"
            return Step(module, row).left(why)
        reason = self._obstacle(module, match) if isinstance(match, Match) else None
        if reason is None and not self.predicate(path, module):
            reason = _REFUSED
        if reason is not None:
            return Step(module, row).left(reason)
        what = "; ".join(filter(None, (self._launches(module, cls), row.reason)))
        return Step(module, replace(row, reason=what), cls)

    def _experts(self, path: str, module: nn.Module) -> Step | None:
        """Of a mixture's experts, whose products go together inside a step's graph."""
        if any(self._class(each) is type(each) for each in layers_of(module)):
            return None
        first = "gate and up" if len(layers_of(module)) > 2 else "the first product"
        what = f"{first} in one launch, down and the sum of a row in another, in a step's graph"
        row = FusionReport(path, EXPERTS, FUSED, what)
        step = Step(module, row, experts_class(self._class(module)))
        return step if self.predicate(path, module) else step.left(_REFUSED)

    def _whole(self, model: nn.Module) -> Step | None:
        """Of a model that is called with tokens and caches."""
        if is_fused(model):
            return None
        cls = step_class(self._class(model))
        # A model without a layer of this package stays as it is.
        ours = self.steps or any(map(self._is_packed, model.modules()))
        if not isinstance(cls, type) or not ours:
            return None
        what = "all of it in one graph where a GPU decodes a token of each sequence"
        step = Step(model, FusionReport("", "step", FUSED, what), cls)
        if reason := "other ranks have the other layers" if is_stage(model) else why_not(model):
            return step.left(reason)
        return step if self.predicate("", model) else step.left(_REFUSED)

    def _parts(
        self, found: dict[str, Step | None], modules: Iterable[tuple[str, nn.Module]]
    ) -> None:
        """Of a model whose step is left to it: what is in it that is a graph by itself."""
        for path, module in modules:
            if found[path] or module.children() or not module or id(module) in self.steps:
                continue
            cls = graph_class(type(module))
            if isinstance(cls, type) and not is_fused(module) and self.predicate(path, module):
                what = "in one graph where a GPU decodes"
                found[path] = step = Step(module, FusionReport(path, "graph", FUSED, what), cls)
                self.changes.append(step)

    def _obstacle(self, module: nn.Module, match: Match) -> str | None:
        """Why the module stays as it is, if it does."""
        names, is_mlp = match.names, match.kind == "mlp"
        if match.kind == "block":
            parts = [names["attention"], names["mlp"]]
            if not any(id(module[name]) in self.fused for name in parts):
                return f"neither {' nor '.join(parts)} is fused"
            return None
        for name in (names[key] for key in (("gate", "up", "down") if is_mlp else "qkv")):
            if not self._is_packed(module[name]):
                return f"{name} is a {self._class(module[name]).__name__}"
        if is_mlp and len({self._format(module, names[key]) for key in ("gate", "up")}) > 1:
            return f"{names['gate']} and {names['up']} have different formats"
        for name in (names[key] for key in ("q_norm", "k_norm") if key in names):
            if type(module[name]) is not nn.RMSNorm:
                return f"{name} is a {type(module[name]).__name__}"
        return None

    def _launches(self, module: nn.Module, cls: type[nn.Module]) -> str:
        """What one launch does in a fused module."""
        match = match_of(cls)
        assert match is not None
        names = match.names
        if match.pattern == GROUPED:
            return "; ".join(self._group(module, group) for group in groups_of(cls))
        if match.kind == "mlp":
            return f"{names['gate']}, {names['up']} and {GATES[match.pattern]} in one launch"
        if match.kind == "attention":
            return self._group(module, [names[key] for key in "qkv"])
        parts = [
            f"{names[norm]} and {names[part]}"
            if type(module[names[norm]]) is nn.RMSNorm
            else names[part]
            for norm, part in (("first_norm", "attention"), ("second_norm", "mlp"))
            if id(module[names[part]]) in self.fused
        ]
        return f"{', '.join(parts)}, each with its residual"

    def _group(self, module: nn.Module, layers: Sequence[str]) -> str:
        count = Counter(self._format(module, name) for name in layers)
        launches = sum(-(-n // MAX_MATRICES) for n in count.values())
        what = "one launch" if launches == 1 else f"{launches} launches"
        return f"{', '.join(layers)} in {what}"

    def _format(self, module: nn.Module, name: str) -> Format:
        step = self.steps.get(id(module[name]))
        layer = module[name] if step is None or step.packed is None else step.packed
        return Format(layer.group_size, layer.bits, layer.mode)

    def _class(self, module: nn.Module) -> type[nn.Module]:
        step = self.steps.get(id(module))
        return type(module) if step is None or step.cls is None else step.cls

    def _is_packed(self, child: object) -> bool:
        return isinstance(child, nn.Module) and self._class(child) in LINEARS


def _match(module: nn.Module) -> Match | Mismatch:
    return recognise(stock_class(unfused_class(type(module))))
