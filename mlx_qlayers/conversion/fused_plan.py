"""Decides which modules of a model compute with fused launches, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import mlx.nn as nn

from ..formats import Format
from ..layers.qlinear import QLinear
from ..metal.quantized_matmul.qmv import MAX_MATRICES
from .compiled_blocks import rotation_of, split_rope
from .fused_blocks import GROUPED, STACK, fused_class, groups_of, is_fused, unfused_class
from .matcher import Known, recognise
from .operands import BLOCK_PARTS, GATES, known_of
from .plan import Predicate, Step
from .report import ALREADY, FUSED, LEFT, FusionReport

Change = tuple[str, nn.Module, type[nn.Module]]


class FusionPlanner:
    """Decides for each module whether its products share launches; changes nothing.

    Args:
        modules: the model's modules with their paths.
        steps: what becomes of its layers.
        predicate: that of ``convert_model``.

    Attributes:
        rows: a row for each module that was considered.
        changes: path, module and new class of those that are to be changed.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        steps: Iterable[Step],
        predicate: Predicate | None,
    ) -> None:
        self.steps = {id(step.module): step for step in steps if step.cls is not None}
        self.predicate = predicate or (lambda path, module: True)
        self.changes: list[Change] = []
        self.fused: set[int] = set()
        self.stackable: set[int] = set()
        rows: dict[str, FusionReport | None] = dict.fromkeys(path for path, _ in modules)
        known = {path: _known(module) for path, module in modules}
        # A module is considered when it is known what becomes of its parts.
        for path, module in sorted(modules, key=lambda item: _rank(known[item[0]])):
            rows[path] = self._row(path, module, known[path])
        self.rows = tuple(row for row in rows.values() if row is not None)

    def _row(self, path: str, module: nn.Module, known: Known | None) -> FusionReport | None:
        if is_fused(module):
            self._remember(module, known)
            kind = STACK if known_of(type(module)) == Known(STACK, {}) else _kind(known)
            return FusionReport(path, kind, ALREADY, "")
        layers = [name for name, child in module.items() if self._is_packed(child)]
        if known is None and len(layers) < 2:
            return self._stack(path, module)
        if not any(map(self._is_packed, module.modules())):
            return None
        cls = fused_class(self._class(module), frozenset() if known else frozenset(layers))
        if cls is None:
            alone = f"no two of {', '.join(layers)} are seen to have the same input"
            return FusionReport(path, _kind(known), LEFT, alone)
        reason = self._obstacle(module, known) if known else None
        if reason is None and not self.predicate(path, module):
            reason = "the predicate says so"
        if reason is not None:
            return FusionReport(path, _kind(known), LEFT, reason)
        self.changes.append((path, module, cls))
        self._remember(module, known)
        return FusionReport(path, _kind(known), FUSED, self._launches(module, cls))

    def _stack(self, path: str, module: nn.Module) -> FusionReport | None:
        """A module that runs decoder layers in a loop, if it is one."""
        count = sum(id(part) in self.stackable for part in module.modules())
        cls = fused_class(self._class(module), frozenset()) if count else None
        if cls is None or id(module) in self.stackable:
            return None
        if not self.predicate(path, module):
            return FusionReport(path, STACK, LEFT, "the predicate says so")
        self.changes.append((path, module, cls))
        what = f"{count} layers in one trace where a GPU decodes a token of each sequence"
        return FusionReport(path, STACK, FUSED, what)

    def _remember(self, module: nn.Module, known: Known | None) -> None:
        """Keep that a block can fold its norm into ``module``, or that it can be stacked."""
        if known is None:
            return
        self.fused.add(id(module))
        if _is_block(known) and self._can_stack(module, known):
            self.stackable.add(id(module))

    def _can_stack(self, block: nn.Module, known: Known) -> bool:
        """Whether a decoder layer will be one of those that run together."""
        attention, mlp, *norms = (block[known.names[key]] for key in BLOCK_PARTS)
        inner = _known(attention)
        return (
            inner is not None
            and {id(attention), id(mlp)} <= self.fused
            and all(type(norm) is nn.RMSNorm for norm in norms)
            and self._is_packed(attention[inner.names["o"]])
            and rotation_of(split_rope(attention[inner.names["rope"]])[0]) is not None
            and "_routes" in self._class(attention).__dict__
        )

    def _obstacle(self, module: nn.Module, known: Known) -> str | None:
        """Why the module stays as it is, if it does."""
        names = known.names
        if _is_block(known):
            parts = [names["attention"], names["mlp"]]
            alone = not any(id(module[name]) in self.fused for name in parts)
            return f"neither {' nor '.join(parts)} is fused" if alone else None
        products = ("gate", "up", "down") if known.form in GATES else ("q", "k", "v")
        for name in (names[key] for key in products):
            if not self._is_packed(module[name]):
                return f"{name} is a {self._class(module[name]).__name__}"
        if known.form in GATES and self._format(module, names["gate"]) != self._format(
            module, names["up"]
        ):
            return f"{names['gate']} and {names['up']} have different formats"
        for key in ("q_norm", "k_norm"):
            if key in names and type(module[names[key]]) is not nn.RMSNorm:
                return f"{names[key]} is a {type(module[names[key]]).__name__}"
        return None

    def _launches(self, module: nn.Module, cls: type[nn.Module]) -> str:
        """What one launch does in a fused module."""
        known = known_of(cls)
        assert known is not None
        names = known.names
        if known.form == GROUPED:
            return "; ".join(self._group(module, group) for group in groups_of(cls))
        if known.form in GATES:
            return f"{names['gate']}, {names['up']} and {GATES[known.form]} in one launch"
        if not _is_block(known):
            return self._group(module, [names[key] for key in "qkv"])
        pairs = (("first_norm", "attention"), ("second_norm", "mlp"))
        parts = [
            names[part]
            if type(module[names[norm]]) is not nn.RMSNorm
            else f"{names[norm]} and {names[part]}"
            for norm, part in pairs
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
        return isinstance(child, nn.Module) and self._class(child) is QLinear


def _rank(known: Known | None) -> int:
    """Blocks come after their parts, and what may run blocks comes last."""
    return 2 if known is None else 1 if _is_block(known) else 0


def _is_block(known: Known | None) -> bool:
    return known is not None and known.form.startswith("block")


def _kind(known: Known | None) -> str:
    if known is None:
        return "group"
    return "mlp" if known.form in GATES else known.form.partition("_")[0]


def _known(module: nn.Module) -> Known | None:
    cls = unfused_class(module) if is_fused(module) else type(module)
    return recognise(cls.__dict__.get("_routes", cls))
