"""Times the matching of two pictures, beside the authors' PyTorch where that can run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from original import Original

REPEATS = 7


def compare(matcher: Any, shown: tuple[np.ndarray, np.ndarray], folder: Path | None) -> None:
    """Print milliseconds from pictures to matches, of both parts, and the original's.

    Args:
        matcher: of match_images.py.
        shown: the pictures.
        folder: ``pretrained_weights`` of the package, where it is not installed.
    """
    images = mx.array(np.stack(shown)).astype(mx.float32) / 255
    found, _ = matcher(*shown)
    points, descriptors = [k.points for k in found], [k.descriptors for k in found]
    size = shown[0].shape[1], shown[0].shape[0]
    runs: dict[str, Callable[[], Any]] = {
        "mlx-qlayers": lambda: matcher(*shown),
        "  keypoints": lambda: mx.eval(matcher.extract(images)),
        "  matches": lambda: matcher.match(points, descriptors, size),
    }
    try:
        import torch

        device = "cuda" if torch.cuda.is_available() and _on_gpu() else "cpu"
        original = Original(folder and folder.parent, device)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        theirs = original.keypoints(*shown)
        runs[f"PyTorch {torch.__version__}, {device}"] = lambda: (original(*shown), wait())
        runs["  its keypoints"] = lambda: (original.keypoints(*shown), wait())
        runs["  its matches"] = lambda: (original.matches(theirs), wait())
    except ImportError as error:
        print(f"without the original: {error}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    for name, each in times.items():
        print(f"{name:<24} {median(each):8.1f} ms  ({min(each):.1f} to {max(each):.1f})")


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.gpu)
