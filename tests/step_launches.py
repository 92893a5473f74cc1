"""Which kernels a token of small models takes, in turn, and a file that keeps them.

Run ``python tests/step_launches.py`` to write the file anew: it says what fusion has come to.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from step_models import pair

from mlx_qlayers import use_backend
from mlx_qlayers.runtime.tracing import trace

PATH = Path(__file__).parent / "data" / "step_launches.json"
NAMES = (
    "qwen2", "llama", "phi3", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip


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
    """The contents of the file: the kernels of each model."""
    found: dict[str, list[str]] = json.loads(PATH.read_text())
    return found


def main() -> None:
    """Write the file."""
    found = {}
    with use_backend("host"):
        for name in NAMES:
            found[name] = launches(pair(name)[1])
            print(name, len(found[name]), file=sys.stderr)
    PATH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
