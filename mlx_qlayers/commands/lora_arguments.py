"""Arguments of a training, also those of a file, checked before a model is loaded."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..conversion.checkpoint import check_adapter
from .arguments import check_arguments
from .ranges import RANGES, shown

_OPTIMIZERS = ("Adam", "AdamW", "Muon", "SGD", "Adafactor")


def read_yaml(file: Any, loader: Any) -> dict[str, Any]:
    """``yaml.load`` of a file of arguments; its errors are a ``ValueError`` that names the file."""
    try:
        values = yaml.load(file, loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"{file.name}: not YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{file.name}: it must have a value for each name, not {shown(values)}")
    return values


def check_lora(module: Any, args: Any) -> None:
    """Check the arguments of ``mlx_lm.lora``, which is ``module``, complete with its defaults."""
    for name, default in module.CONFIG_DEFAULTS.items():
        kind = dict if name == "lr_schedule" else str if default is None else type(default)
        value = getattr(args, name)
        if name not in RANGES and not isinstance(value, kind | None):
            raise ValueError(f"{name}: must be of type {kind.__name__}, not {shown(value)}")
    check_arguments(vars(args) | (args.lora_parameters or {}))
    if not (args.train or args.test):
        raise ValueError("lora needs --train or --test")
    if args.fine_tune_type not in ("lora", "dora", "full"):
        raise ValueError(f"fine_tune_type: must be lora, dora or full, not {args.fine_tune_type}")
    _check_optimizer(module, args)
    local = Path(args.adapter_path)
    if args.train and (not args.adapter_path or (local.exists() and not local.is_dir())):
        raise ValueError(f"adapter_path: {args.adapter_path!r} is not a directory")
    if args.test and not args.train and args.adapter_path:
        check_adapter(local)
    _check_data(args)


def plan_of(
    model: Any, optimizer: Any, data: Any, args: Any, gigabytes: int | None, loss: Any = None
) -> str:
    """The text of a training's plan, for the longest batch of its data."""
    import mlx.core as mx
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint

    from ..training.plan import memory, plan

    if args.grad_checkpoint:
        grad_checkpoint(model.layers[0])
    longest = max(data.itemlen(i) for i in range(len(data)))
    # As mlx-lm pads them; the last token is nothing but a target.
    length = min(1 + 32 * -(-longest // 32), args.max_seq_length) - 1
    batch = args.batch_size // mx.distributed.init().size()
    found = plan(model, optimizer, loss or default_loss, batch, max(8, length))
    return found.table(gigabytes * 1e9 if gigabytes else memory())


def _check_optimizer(module: Any, args: Any) -> None:
    """Make the schedule and the optimizer, as the training will."""
    kinds = {name.lower(): getattr(module.optim, name) for name in _OPTIMIZERS}
    try:
        rate: Any = args.learning_rate
        if args.lr_schedule:
            rate = module.build_schedule(args.lr_schedule)
            if not math.isfinite(first := float(rate(0))) or first < 0:
                raise ValueError(f"it begins with {first}")
        options = args.optimizer_config.get(args.optimizer.lower(), {})
        kinds[args.optimizer.lower()](learning_rate=rate, **options)
    except Exception as error:
        raise ValueError(f"optimizer, lr_schedule: {type(error).__name__}: {error}") from error


def _check_data(args: Any) -> None:
    if getattr(args, "hf_dataset", None):
        return
    parts = [name for name in ("train", "test") if getattr(args, name)]
    if (folder := Path(args.data)).exists():
        if missing := [p for p in parts if not (folder / f"{p}.jsonl").is_file()]:
            raise FileNotFoundError(f"{folder / missing[0]}.jsonl: no such file")
    elif find_spec("datasets") is None:
        raise FileNotFoundError(
            f"--data {args.data}: no such directory; a data set of the Hugging Face Hub needs "
            "the package datasets (pip install datasets)"
        )
