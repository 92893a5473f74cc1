"""Tokens that models write: by mlx-lm's own loops, alone and in batches, and with guesses."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

from mlx_qlayers.speculation.depth import Depths
from mlx_qlayers.speculation.drawing import Drawer
from mlx_qlayers.speculation.loop import Speculation, batch_caches, speculative_generate_step
from mlx_qlayers.speculation.rounds import Rounds
from mlx_qlayers.speculation.sequence import Text


def plain(
    model: nn.Module, prompt: mx.array | list[int], count: int, seed: int = 5, **options: Any
) -> list[int]:
    """So many tokens by mlx-lm's own loop, with its options."""
    mx.random.seed(seed)
    steps = generate_step(mx.array(prompt), model, max_tokens=count, **options)
    return [int(token) for token, _ in steps]


def guessed(
    model: nn.Module,
    prompt: mx.array,
    count: int,
    speculation: Speculation,
    *,
    depth: int = 4,
    seed: int = 5,
    **options: Any,
) -> list[int]:
    """The same with at most ``depth`` guesses a round, and the same random numbers."""
    mx.random.seed(seed)
    steps = speculative_generate_step(
        prompt, model, speculation, num_draft_tokens=depth, max_tokens=count, **options
    )
    return [token for token, *_ in steps]


def rounds_of(
    model: Any, prompts: Sequence[list[int]], sources: list[Any], depth: int, trunk: Any = None
) -> Rounds:
    """The rounds of a batch of greedy texts, each of which has its sources of guesses."""
    pairs = zip(prompts, sources, strict=True)
    texts = [Text(prompt, Drawer(None, None), own) for prompt, own in pairs]
    caches = batch_caches(model, prompts, trunk=trunk, texts=texts)
    return Rounds(model, caches, texts, Depths(model, depth, measured=False), trunk=trunk)


def alone_and_in_a_batch(
    model: nn.Module, prompts: Sequence[list[int]], count: int, make: Callable[[], list[Any]]
) -> list[list[list[int]]]:
    """Greedy texts of each prompt alone, and those of all in a batch where some come later.

    Their caches are those that ``make`` gives.
    """
    alone = [plain(model, prompt, count, prompt_cache=make()) for prompt in prompts]
    generator = BatchGenerator(model, max_tokens=count, prefill_step_size=4)
    found: dict[int, list[int]] = {}

    def step() -> bool:
        responses = generator.next_generated()
        for response in responses:
            found[response.uid].append(response.token)
        return bool(responses)

    for some in (prompts[:2], prompts[2:]):
        uids = generator.insert(some, caches=[make() for _ in some])
        found |= {uid: [] for uid in uids}
        for _ in range(3):
            step()
    while step():
        pass
    return [alone, [*found.values()]]
