"""Which kernels a token of small models takes, in turn, and a file that keeps them.

Run ``python tests/step_launches.py`` to write the file anew: it says what fusion has come to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import use_backend
from mlx_qlayers.conversion import cache_slots, compiled
from mlx_qlayers.ops import attention_step
from mlx_qlayers.runtime.backend import Mode, current
from mlx_qlayers.runtime.tracing import trace

PATH = Path(__file__).parent / "data" / "step_launches.json"
NAMES = (
    "qwen2",
    "llama",
    "phi3",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Steps are graphs whose launches run one by one, by kernels of the host build."""
    covers = attention_step._covers

    def context() -> tuple[str, int] | None:
        return ("host", 0) if current.get().mode is Mode.EAGER else None

    own = lambda *args: None if covers(*args) else "no kernel"  # noqa: E731
    mx.disable_compile()
    try:
        with (
            patch.object(compiled, "context", context),
            patch.object(cache_slots, "why_not", own),
            use_backend("host"),
        ):
            yield
    finally:
        mx.enable_compile()


def launches(model: nn.Module) -> list[str]:
    """The kernels of the third token behind a prompt, by name."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 17, 3, 60, 2, 9, 44]]), cache=cache))
    for token in (7, 11):
        mx.eval(model(mx.array([[token]]), cache=cache))
    with trace() as records:
        mx.eval(model(mx.array([[13]]), cache=cache))
    return [each.kernel for each in records]


def recorded() -> dict[str, list[str]]:
    """What the file holds: the kernels of each model."""
    found: dict[str, list[str]] = json.loads(PATH.read_text())
    return found


def main() -> None:
    """Write the file."""
    from step_models import pair

    found = {}
    with like_a_gpu():
        for name in NAMES:
            found[name] = launches(pair(name)[1])
            print(name, len(found[name]), file=sys.stderr)
    PATH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
