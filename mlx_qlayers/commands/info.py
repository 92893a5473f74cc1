"""Show versions, device and backend, and what a conversion would do to a model."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path

from ..runtime.macos import macos_build, macos_version
from ..runtime.versions import version_of
from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model", required=False)


def run(args: argparse.Namespace) -> None:
    from ..runtime.explain import aligned

    print(*aligned([*(versions() | device() | backends()).items()]), sep="\n")
    if args.model is not None:
        from ..conversion.loading import load_stock
        from ..convert import convert_model

        loaded = load_stock(args.model, lazy=True, trust_remote_code=args.trust_remote_code)
        print(f"\n{args.model}: {loaded.config['model_type']}\n")
        report = convert_model(loaded.model, config=loaded.quantization, dry_run=True)
        print(report.summary())


def versions() -> dict[str, str]:
    """The versions that a bug report should name."""
    rows = {"python": platform.python_version(), "platform": platform.platform()}
    packages = ("mlx-qlayers", "mlx", "mlx-lm", "huggingface-hub", "safetensors")
    return rows | {package: version_of(package) for package in packages}


def device() -> dict[str, str]:
    """MLX's default device, the memory that it can use, and its driver."""
    import mlx.core as mx

    facts = mx.device_info()
    memory = facts.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = facts.get("device_name") or facts.get("architecture") or platform.machine()
    rows = {
        "device": f"{mx.default_device()}, {name}",
        "memory": f"{int(memory) / 2**30:.1f} GiB",
    }
    return rows | ({"driver": found} if (found := driver()) else {})


def driver() -> str | None:
    """The version of the GPU's driver: NVIDIA's, or on a Mac that of the system."""
    if platform.system() == "Darwin":
        return "macOS {}.{}".format(*macos_version()) + f", {macos_build()}"
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return f"NVIDIA {found[0]}" if (found := re.search(r"\d+\.\d+[.\d]*", text)) else None


def backends() -> dict[str, str]:
    """The backend that runs kernels now, and for each of the others why it cannot."""
    from ..runtime.backend import BACKENDS, BackendError, backend, requested, use_backend

    rows = {"backend": f"{backend()} ({'auto' if requested() == 'auto' else 'asked for'})"}
    for name in BACKENDS[1:]:
        try:
            with use_backend(name):
                rows[f"  {name}"] = "can run"
        except BackendError as error:
            rows[f"  {name}"] = str(error).rpartition(" cannot run: ")[2]
    return rows
