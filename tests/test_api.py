"""The public names, and what importing them costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import mlx_qlayers

NAMES = [
    "QLinear", "GridSample", "DeformConv2d", "DeformableAttention", "FusedAttention",
    "convert_model", "revert_model", "load", "register_counterpart", "ConversionReport",
    "quantize_model", "quantized_matmul", "grid_sample", "affine_grid", "deform_conv2d",
    "deformable_attention", "attention", "use_backend", "set_backend", "backend", "explain",
    "linear_cross_entropy", "log_probabilities", "fused_loss", "speculate", "speculate_batch",
    "load_heads",
    "recompute_activations",
]  # fmt: skip


def test_these_names_and_no_others():
    assert sorted(mlx_qlayers.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    text = getattr(mlx_qlayers, name).__doc__
    assert text and text[0].strip() and ">>> " in text


_IMPORT = """
import signal, sys
signal.signal(2, signal.default_int_handler)  # what a shell starts in the background has another
def there(*names):
    return [name for name in names if name in sys.modules]
import mlx_qlayers
assert signal.getsignal(2) is signal.default_int_handler
assert not there("mlx_lm", "transformers", "huggingface_hub", "ziglang", "numpy")
from mlx_qlayers.cli import main
main(["--help"])
assert not there("mlx_lm", "transformers", "tqdm")
import mlx.nn as nn
mlx_qlayers.convert_model(nn.QuantizedLinear(64, 64))
assert not there("mlx_lm.models.switch_layers")
"""


def test_importing_is_light_and_changes_nothing():
    """And so are help, and a conversion of a model that is not mlx-lm's."""
    subprocess.run([sys.executable, "-c", _IMPORT], check=True, stdout=subprocess.DEVNULL)


_CHANGES = """
import gc, importlib, inspect, os, pkgutil, signal, sys, warnings
import mlx.core as mx, mlx.optimizers, mlx_lm.generate, mlx_lm.server, mlx_lm.tuner.trainer, numpy
import mlx_lm.models.gated_delta, mlx_lm.models.switch_layers
from mlx_lm.models.cache import make_prompt_cache
from small_qwen import qwen

def names(modules):
    found = {}
    for module in [m for n, m in modules.items() if n.split(".")[0] in ("mlx", "mlx_lm", "numpy")]:
        for name, value in vars(module).items():
            found |= {f"{module.__name__}.{name}": value} if not inspect.ismodule(value) else {}
            if inspect.isclass(value) and not value.__module__.startswith("mlx_qlayers."):
                own = {k: v for k, v in vars(value).items() if k != "__slotnames__"}  # pickle's
                found |= {f"{module.__name__}.{name}.{k}": v for k, v in own.items()}
    return found

def process():
    python = gc.get_threshold(), gc.isenabled(), sys.getswitchinterval(), sys.getrecursionlimit()
    return *python, sys.excepthook, signal.getsignal(2), {**os.environ}, [*warnings.filters]

modules, state = {**sys.modules}, process()
before = names(modules)

def changed(*allowed):
    now = names(modules)
    found = {n for n in now | before if now.get(n, before) is not before.get(n, before)}
    assert found == {*allowed}, found
    assert process() == state

import mlx_qlayers
changed("mlx.core.vmap")
model = qwen()
mlx_qlayers.convert_model(model)
cache = make_prompt_cache(model)
mx.eval([model(mx.ones((1, n), mx.int32), cache=cache) for n in (3, 1, 1, 1)])
changed("mlx.core.vmap")
for module in pkgutil.walk_packages(mlx_qlayers.__path__, "mlx_qlayers."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
packed = "Packed", "RotatingQuantized", "BatchQuantized", "BatchRotatingQuantized"
changed("mlx.core.vmap", *(f"mlx_lm.models.cache.{name}KVCache" for name in packed))
"""


def test_what_changes_in_a_process():
    """By an import, by a model that decodes, and by all modules: what docs/design.md declares."""
    command, folder = [sys.executable, "-c", _CHANGES], Path(__file__).parent
    subprocess.run(command, check=True, cwd=folder)
