"""Matches two pictures with ALIKED and LightGlue: ``python examples/match_images/match_images.py``.

The weights are downloaded once (see weights.py). Without pictures of its own it takes a sample
picture and the same one turned by a known homography, to say how many matches are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import aliked
import lightglue
import mlx.core as mx
import numpy as np
import pictures
import products
import weights

from mlx_qlayers import backend

# The distance in pixels within which a match is right.
NEAR = 3.0


class Matcher:
    """Both models with their weights.

    Args:
        folder: with the ``.pth`` files, where they shall not be downloaded.
        most: keypoints of a picture at most.
    """

    def __init__(self, folder: Path | None = None, most: int = 1024) -> None:
        found = weights.load(folder)
        self.extract = aliked.ALIKED(most)
        # A GPU waits for the number of points that are left longer than it computes with them.
        self.match = lightglue.LightGlue(None if _on_gpu() else 0)
        for model, name in ((self.extract, "aliked"), (self.match, "lightglue")):
            model.load_weights(list(found[name].items()))
            model.eval()

    def __call__(
        self, first: np.ndarray, second: np.ndarray
    ) -> tuple[list[aliked.Keypoints], lightglue.Matches]:
        """The keypoints of two pictures of one size, (H, W, 3) of bytes, and their matches."""
        images = mx.array(np.stack([first, second])).astype(mx.float32) / 255
        found = self.extract(images)
        size = first.shape[1], first.shape[0]
        points, descriptors = [k.points for k in found], [k.descriptors for k in found]
        return found, self.match(points, descriptors, size)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


def right(
    found: list[aliked.Keypoints],
    matches: lightglue.Matches,
    homography: np.ndarray = pictures.HOMOGRAPHY,
) -> float:
    """The share of the matches within 3 pixels of where the homography puts them."""
    first, second = (np.array(k.points)[matches.pairs[:, i]] for i, k in enumerate(found))
    distance = np.linalg.norm(pictures.moved(first, homography) - second, axis=1)
    return float((distance <= NEAR).mean())


def draw(
    path: Path,
    shown: tuple[np.ndarray, np.ndarray],
    found: list[aliked.Keypoints],
    matches: lightglue.Matches,
) -> None:
    """Write both pictures side by side, with a line for every match."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(12.8, 4.8))
    axes.imshow(np.concatenate(shown, axis=1))
    axes.axis("off")
    ends = [np.array(k.points)[matches.pairs[:, i]] for i, k in enumerate(found)]
    ends[1] = ends[1] + [shown[0].shape[1], 0]
    colours = plt.get_cmap("viridis")(matches.scores)
    for start, end, colour in zip(*ends, colours, strict=True):
        axes.plot(*zip(start, end, strict=True), color=colour, linewidth=0.4)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pictures", nargs="*", type=Path, help="two pictures of one size")
    parser.add_argument("--out", type=Path, default=Path("matches.png"))
    parser.add_argument("--weights", type=Path, help="a folder with the .pth files")
    parser.add_argument("--bench", action="store_true", help="time it, beside the original if here")
    args = parser.parse_args()
    if len(args.pictures) not in (0, 2):
        parser.error("give two pictures, or none for the sample")
    shown = tuple(map(_read, args.pictures)) if args.pictures else pictures.pair()
    products.keep_memory()
    try:
        matcher = Matcher(args.weights)
    except (ConnectionError, FileNotFoundError) as error:
        parser.exit(1, f"{error}\n")
    found, matches = matcher(*shown)
    counts = " and ".join(str(len(k.points)) for k in found)
    print(f"{counts} keypoints, {len(matches.pairs)} matches after {matches.layers} layers")
    if not args.pictures:
        print(f"{right(found, matches):.1%} of the matches within {NEAR:g} pixels")
    if args.bench:
        from bench import compare

        compare(matcher, shown, args.weights)
        return
    draw(args.out, shown, found, matches)
    print(f"wrote {args.out} (backend {backend()})")


def _read(path: Path) -> np.ndarray:
    from PIL import Image

    return np.array(Image.open(path).convert("RGB"))


if __name__ == "__main__":
    main()
