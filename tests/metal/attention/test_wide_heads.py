"""Attention of many queries with heads of more than 256, forward alone."""

import mlx.core as mx
import pytest

from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime.spec import Spec
from tests.attention_cases import check_output, make


@pytest.mark.parametrize(
    "widths, kind, dtype",
    [
        ((576, 512), "causal", mx.bfloat16),
        ((512, 512), "boolean", mx.float16),
        ((264, 320), "none", mx.bfloat16),
    ],
    ids=str,
)
def test_against_float64(backend, widths, kind, dtype):
    """As multi-head latent attention has them: many heads of one key head."""
    _, arrays, options = make(11, (1, 4, 1, 21, 37, *widths), dtype, kind)
    q, k, v = map(Spec.of, arrays)
    mask = None if isinstance(options["mask"], str) else options["mask"]
    scores, seen = Scores(options["scale"], kind == "causal"), mask is not None and Spec.of(mask)
    at = Launcher(AttentionCall(q, (k,), (v,), scores, seen or None))
    out, _ = attention_forward(at)(*arrays, mask, None)
    check_output(out, arrays, dict.fromkeys(("window", "softcap", "sinks")) | options)
