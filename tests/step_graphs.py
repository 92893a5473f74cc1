"""Writes into docs/design.md a layer's nodes before and after the rules, as a command prints them.

python tests/step_graphs.py
"""

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from tiny_model import save_tiny_model

from mlx_qlayers.cli import main

ROOT = Path(__file__).parents[1]
PAGE, SHIPPED = ROOT / "docs" / "design.md", ROOT / "models" / "tales-qwen2"
MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


def printed(model: Path) -> str:
    """The lists of a layer between others."""
    with redirect_stdout(io.StringIO()) as out, mx.stream(mx.cpu):
        assert main(["explain", "--graph", str(model), "--layer", "1", "--brief"]) == 0
    return out.getvalue().strip()


def parts() -> Iterator[tuple[str, str]]:
    """The generated parts of the page, by the name of their place."""
    with TemporaryDirectory() as folder:
        save_tiny_model(moe := Path(folder) / "moe", **MOE)
        for name, model in ("Qwen2", SHIPPED), ("Qwen3 MoE", moe):
            yield name, f"```\n{printed(model)}\n```"


if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))
    from readme import filled

    PAGE.write_text(filled(PAGE.read_text(), dict(parts())))
