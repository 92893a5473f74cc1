"""Which layer of this package stands in for a stock one."""

from __future__ import annotations

import mlx.nn as nn

from ..layers.qlinear import COUNTERPARTS, Counterpart


def counterpart_of(cls: type[nn.Module]) -> type[Counterpart] | None:
    """The layer that stands in for a stock class; None if there is none."""
    # mlx-lm takes long to import: where its layer is at hand, that has been done.
    if cls.__module__ == "mlx_lm.models.switch_layers":
        from ..layers.switch_linear import QSwitchLinear

        return QSwitchLinear if cls is QSwitchLinear.stock else None
    return COUNTERPARTS.get(cls)


def stock_of(module: nn.Module) -> type[nn.Module] | None:
    """The stock class that the class of ``module`` stands in for; None if it does not."""
    if isinstance(module, Counterpart) and counterpart_of(module.stock) is type(module):
        return module.stock
    return None
