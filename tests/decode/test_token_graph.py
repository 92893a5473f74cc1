"""The work of an Apple GPU for a token: kernels, copies and bytes of the graph that MLX gets."""

import re

import mlx.core as mx
import pytest
from converted import pair
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from recorded_gpu import primitives, recorded_gpu, used, wide_model, zeros

from mlx_qlayers.decode import append_buffers, engine
from mlx_qlayers.metal.attention.step_record import AttentionStepRecord
from mlx_qlayers.runtime import use_backend
from tests.decode.test_append_caches import TOKENS, begun


@pytest.fixture
def metal():
    """Where Metal is available, as far as MLX records graphs; also what is launched."""
    with recorded_gpu("metal", "applegpu_g13g") as launches:
        yield launches


def test_the_graph_that_metal_gets(metal):
    """The kernels that the host build runs, and no copy of a cache."""
    with use_backend("reference"):
        _, model = pair()
        cache = begun(model)
        mx.eval([c.state for c in cache])
    logits = model(TOKENS[:1, 6:7], cache=cache)
    launched = [re.sub("qmv_.*", "qmv", each.name) for each in used(metal, logits)]
    assert launched == ["qmv", "attention_step", *["qmv"] * 3] * 2 + ["qmv"]
    assert not [name for name in primitives(logits) if "SliceUpdate" in name]


def test_bytes_of_a_token_of_a_layer_as_wide_as_7b(metal):
    """Of all launches: the weights once, the cache once, and one percent."""
    model = wide_model("qwen2", num_hidden_layers=1, vocab_size=64)
    for rows, bits in ((4352, 0), (33024, 0), (4352, 4), (33024, 8)):
        (cache,) = caches = make_prompt_cache(model)
        cache.keys, cache.values = (mx.zeros((1, 4, rows, 128), mx.bfloat16) for _ in "kv")
        cache.offset = rows - 100
        caches = [cache.to_quantized(64, bits)] if bits else caches
        launches = used(metal, model(zeros((1, 1), mx.int32), cache=caches))
        step = "attention_step" + "_packed" * (bits > 0)
        names = [each.name for each in launches]
        assert len(names) == 7 and names[1:3] == [step, "attention_combine"]
        arrays = [x for each in launches for x in (*each.inputs, *each.outputs)]
        moved = sum(x.size * x.dtype.size for x in arrays)
        # Rows of the append buffer are not read in the buffers. A merge reads and writes these.
        (last,) = engine._steps[id(model)].progress.values()
        (beside,) = last.state.append_buffers
        parts = [a for buffer in beside.buffers for a in append_buffers.arrays_of(buffer)]
        held, whole = (sum(a.nbytes for a in given) for given in (beside.arrays, parts))
        necessary = sum(a.nbytes for _, a in tree_flatten(model.parameters())) + whole
        extra = moved - held + 2 * whole / beside.arrays[0].shape[2] - necessary
        assert 0 < extra <= 0.01 * necessary
        # In one launch, as on CUDA, splits write and read half precision and two floats a row.
        parts = launches[1].outputs[0].shape
        problem = AttentionStepRecord(mx.bfloat16, 1, 28, 4, rows, 128, 128)
        splits = problem.heuristic("cuda").splits + 1
        extra += 2 * 28 * (splits * (2 * 128 + 8) - 4 * parts[3] * parts[4])
        assert 0 < extra <= 0.01 * necessary
