"""Results of measurements, kept as if they were made on a GPU."""

from dataclasses import asdict, replace
from importlib.metadata import version

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.entries import Entry
from mlx_qlayers.measurements.store import save
from mlx_qlayers.metal.records import RECORDS

FMT = Format(64, 4)
TIMES = "kernel 41.0 us, stock 63.0 us"
KEY = (1, 3584, 3584, mx.bfloat16, FMT)


def heuristic(device="cuda"):
    return RECORDS["qmv"](*KEY).heuristic(device)


def keep(family="qmv", key=KEY, config=None, device="some_gpu", **changes):
    problem = RECORDS[family](*key)
    config = config or problem.heuristic("cuda")
    entry = Entry(
        config if isinstance(config, dict) else asdict(config),
        "kernel",
        4.1e-5,
        5e-5,
        9,
        problem.source,
        version("mlx"),
        {"kernel": 4.1e-5, "stock": 6.3e-5},
    )
    save(device, {problem.key: replace(entry, **changes)})
    return config


OTHER = replace(heuristic(), simds_k=4)
