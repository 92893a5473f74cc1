"""Apps that are bundled without the metadata of packages."""

import subprocess
import sys

CODE = """
import importlib.metadata as metadata

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.Distribution.from_name = missing

import mlx.core as mx
from mlx_qlayers import use_backend
from mlx_qlayers.ops.exp import exp
from mlx_qlayers.runtime import cuda_ahead, proof

proof.stored()
cuda_ahead._folder()
with use_backend("host"):
    print(exp(mx.zeros(3)).sum().item())
"""


def test_kernels_and_their_proofs_need_no_metadata():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "3.0\n", done.stderr
