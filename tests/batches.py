"""Random batches of a batch-invariant model, bit by bit: ``make invariance``.

    python tests/batches.py                            1,000 batches on this machine's kernels
    python tests/batches.py --rules metal --checked    a GPU's kernels, run by the checked build

A text is computed alone, token by token behind a prompt. Then it stands at any place in batches of
up to 64 others, was read in any chunks, and 1 to 16 of its tokens are computed at a time.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from devices import MEMORY_OF_HOST, has_device
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.devices import device_of
from mlx_qlayers.runtime.host import checks

MOST, TOKENS, STEP = 64, 90, 16
# Of more keys than a split has on a GPU.
PROMPT = 300


@contextmanager
def rules_of(device: str, **other: Any) -> Iterator[None]:
    """Let a CPU choose kernels as a GPU does, which may have other properties, and run them."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = vars(device_of(device)) | {"backend": "host", "needs_proof": False}
        # It still is a CPU, with what was measured on CPUs.
        cpu = {"launches_at_once": True, "others": ("cpu", *gpu["others"])}
        has_device(patch, "host", **gpu | cpu)
        has_device(patch, device, **MEMORY_OF_HOST | other)
        advance_epoch()
        yield
    advance_epoch()


def converted(name: str, dtype: mx.Dtype = mx.float32, **options: Any) -> nn.Module:
    model = build(name, ARCHITECTURES[name])
    model.set_dtype(dtype)
    convert_model(model, batch_invariant=True, calibrate=False, **options)
    return model


class Batches:
    """Texts of a model alone, and as many random batches of them as are asked for.

    Args:
        make: the caches of a text, by default the model's own.
        texts: how many different ones.
        tokens: of the longest text with a prompt of one.
        prompt: how many are computed at once, also alone.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int = 0,
        *,
        make: Callable[[Any], Any] = make_prompt_cache,
        texts: int = 24,
        tokens: int = TOKENS,
        prompt: int = 1,
    ) -> None:
        self.model, self.make, self.draw = model, make, random.Random(seed)
        sizes = [prompt + self.draw.randint(STEP + 1, tokens - 1) for _ in range(texts)]
        self.texts = [[self.draw.randrange(VOCABULARY) for _ in range(size)] for size in sizes]
        self.alone = [self._by(x, [prompt, *[1] * (len(x) - prompt)])[0] for x in self.texts]
        self.compared = self.differing = 0  # logits
        # Each begun at a random length, its prompt in random chunks.
        self.begun = [self._begun(i % texts) for i in range(2 * texts)]

    def _by(self, text: list[int], sizes: list[int]) -> tuple[mx.array, Any]:
        caches, parts, at = self.make(self.model), [], 0
        for size in sizes:
            run: Any = self.model
            parts.append(run(mx.array([text[at : at + size]]), cache=caches)[0])
            at += size
        return mx.concatenate(parts), caches

    def _begun(self, i: int) -> tuple[int, int, Any]:
        length = left = self.draw.randint(1, len(self.texts[i]) - STEP)
        sizes = []
        while left:
            sizes.append(self.draw.randint(1, left))
            left -= sizes[-1]
        found, caches = self._by(self.texts[i], sizes)
        self._compare(found, self.alone[i][:length])
        return i, length, caches

    def _compare(self, found: mx.array, wanted: mx.array) -> None:
        self.compared += found.size
        self.differing += int((found != wanted).sum().item())

    def one(self, most: int = MOST, steps: int = 1) -> None:
        """A batch of random texts, which goes on by steps of so many tokens each.

        Behind a step two of three texts leave.
        """
        some = self.draw.choices(self.begun, k=self.draw.randint(1, most))
        caches = [
            deepcopy(each[0]).merge([*each]) for each in zip(*(c for *_, c in some), strict=True)
        ]
        size = self.draw.choice([1, 1, 1, self.draw.randint(2, STEP // steps)])
        for at in range(0, steps * size, size):
            parts = [(i, slice(length + at, length + at + size)) for i, length, _ in some]
            run: Any = self.model
            found = run(mx.array([self.texts[i][part] for i, part in parts]), cache=caches)
            self._compare(found, mx.stack([self.alone[i][part] for i, part in parts]))
            keep = sorted(self.draw.sample(range(len(some)), max(1, len(some) // 3)))
            some = [some[i] for i in keep]
            for each in caches:
                each.filter(keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--most", type=int, default=MOST, help="texts in a batch")
    parser.add_argument("--model", default="phi3")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rules", choices=("metal", "cuda"), help="choose kernels as a GPU does")
    parser.add_argument("--checked", action="store_true", help="run them by the checked build")
    args = parser.parse_args()
    with ExitStack() as stack:
        if args.rules:
            stack.enter_context(rules_of(args.rules))
        if args.checked:
            stack.enter_context(use_backend("host"))
            stack.enter_context(checks())
        model = converted(args.model, getattr(mx, args.dtype))
        batches = Batches(model, prompt=PROMPT)
        for _ in range(args.count):
            batches.one(args.most)
    print(f"{args.count} batches: {batches.differing} of {batches.compared} logits differ")
    sys.exit(bool(batches.differing))


if __name__ == "__main__":
    main()
