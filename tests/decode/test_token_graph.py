"""The work of a GPU for a token: kernels, copies and bytes of the graph that MLX records."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest
from converted import pair
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from step_models import on_a_gpu

from mlx_qlayers import convert_model
from mlx_qlayers.decode import append_buffers, engine
from mlx_qlayers.metal.attention.step_record import AttentionStepRecord
from mlx_qlayers.runtime import metal as metal_backend
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.spec import Spec
from tests.decode.test_append_caches import TOKENS, begun


@pytest.fixture
def metal(monkeypatch):
    """Where Metal is available, as far as MLX records graphs; also what is launched."""
    launches, bind = [], metal_backend.bind

    def counted(launch):
        run = bind(launch)
        return lambda arrays: launches.append(launch) or run(arrays)

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(metal_backend, "bind", counted)
    monkeypatch.setattr(engine, "is_traced", lambda tokens: False)  # as they are in the export
    with on_a_gpu(), use_backend("metal"):
        yield launches


def test_the_graph_that_metal_gets(metal, tmp_path):
    """MLX's record there: the kernels that the host build runs, and no copy of a cache."""
    with use_backend("reference"):
        _, model = pair()
        cache = begun(model)
        mx.eval([c.state for c in cache])
    path = tmp_path / "token.mlxfn"
    mx.export_function(str(path), lambda token: model(token, cache=cache), TOKENS[:1, 6:7])
    data = path.read_bytes()
    launched = re.findall(rb"CustomKernel.{8}custom_kernel_([a-z_]*)", data, re.DOTALL)
    assert launched == [b"qmv_", b"attention_step__float_float_", *[b"qmv_"] * 3] * 2 + [b"qmv_"]
    assert b"SliceUpdate" not in data


def test_bytes_of_a_token_of_a_layer_as_wide_as_7b(metal, tmp_path):
    """Of all launches: the weights once, the cache once, and one percent."""
    config = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
    config |= {"num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    model = qwen2.Model(qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, **config))
    model.update(tree_map(lambda x: mx.zeros(x.shape, mx.bfloat16), model.parameters()))
    nn.quantize(model)
    model.eval()
    with use_backend("reference"):
        convert_model(model, verify=False)
    for rows, bits in ((4352, 0), (33024, 0), (4352, 4), (33024, 8)):
        (cache,) = caches = make_prompt_cache(model)
        cache.keys, cache.values = (mx.zeros((1, 4, rows, 128), mx.bfloat16) for _ in "kv")
        cache.offset = rows - 100
        caches = [cache.to_quantized(64, bits)] if bits else caches
        token = TOKENS[:1, :1]
        metal.clear()
        mx.export_function(str(tmp_path / "token"), lambda x, c=caches: model(x, cache=c), token)
        # Nobody needs the rotation, see above: attention does it.
        launches = [launch for launch in metal if launch.program.name != "rotary_at"]
        # Traced by mx.compile, and once more into the file.
        names = [launch.program.name for launch in launches]
        assert len(names) in (7, 14) and names[:7] == names[-7:]
        step = "attention_step" + "_packed" * (bits > 0)
        assert names[1:3] == [step, "attention_combine"]
        moved = 0
        for launch in launches[:7]:
            outputs = map(Spec, launch.output_shapes, launch.output_dtypes)
            moved += sum(s.size * s.dtype.size for s in (*launch.inputs, *outputs))
        # Rows of the append buffer are not read in the buffers. A merge reads and writes these.
        (last,) = engine._steps[id(model)].progress.values()
        (beside,) = last.state.append_buffers
        parts = [a for buffer in beside.buffers for a in append_buffers.arrays_of(buffer)]
        held, whole = (sum(a.nbytes for a in given) for given in (beside.arrays, parts))
        necessary = sum(a.nbytes for _, a in tree_flatten(model.parameters())) + whole
        extra = moved - held + 2 * whole / beside.arrays[0].shape[2] - necessary
        assert 0 < extra <= 0.01 * necessary
        # In one launch, as on CUDA, splits write and read half precision and two floats a row.
        parts = launches[1].output_shapes[0]
        problem = AttentionStepRecord(mx.bfloat16, 1, 28, 4, rows, 128, 128)
        splits = problem.heuristic("cuda").splits + 1
        extra += 2 * 28 * (splits * (2 * 128 + 8) - 4 * parts[3] * parts[4])
        assert 0 < extra <= 0.01 * necessary
