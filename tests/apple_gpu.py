"""An Apple GPU that is not there: ``mx.fast.metal_kernel`` runs what it is given on the CPU.

It computes by the host backend's build of the text that MLX would generate, so that proofs really
prove. A fault can be put into a kernel, in this process and in those that it starts: their Python
imports ``sitecustomize.py`` in ``tests/apple``, which installs this too.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

# Which fault kernels have whose names, with their template's values behind, match at their
# beginning, as JSON: {"attention_step": "NaN", "attention_tensor .*HANDED=True": "wrong"}.
FAULTS = "MLX_QLAYERS_TEST_FAULTS"
# A file that gets a line for each launch: where it ran, and what.
LAUNCHES = "MLX_QLAYERS_TEST_LAUNCHES"
# A file that a launch leaves which hangs.
HANGS = "MLX_QLAYERS_TEST_HANGS"
# Set, it is an M5 with macOS 26.4, and these paths are fastest, of attention and of a product.
FASTEST = "MLX_QLAYERS_TEST_FASTEST"
FOLDER = Path(__file__).with_name("apple")
KINDS = ("does not compile", "NaN", "wrong", "raises", "hangs")
IN_VIEWS = "wrong where an array begins inside of its buffer"


def install() -> None:
    """Let MLX have a Metal device from here on."""
    mx.metal.is_available = lambda: True
    mx.fast.metal_kernel = metal_kernel
    mx.disable_compile()  # a graph has no values, which the host build needs
    if os.environ.get(FASTEST):
        facts = {
            "device_name": "Apple M5",
            "architecture": "applegpu_g17s",
            "memory_size": 24 << 30,
        }
        mx.device_info = lambda *_: facts
        here = os.uname()
        os.uname = lambda: os.uname_result((*here[:2], "25.4.0", *here[3:]))


def launch_of(made: dict[str, Any], call: dict[str, Any]) -> Any:
    """A launch of the package, as ``mx.fast.metal_kernel`` and its kernel were given it."""
    from mlx_qlayers.runtime.launch import Launch
    from mlx_qlayers.runtime.program import Program

    return Launch(Program(**made), **call | {"init_value": call.get("init_value")})


def on_host(**made: Any) -> Callable[..., list[mx.array]]:
    """In the place of ``mx.fast.metal_kernel``: what it is given runs on the host backend."""

    def launch(**call: Any) -> list[mx.array]:
        from mlx_qlayers.runtime import host

        if made["name"].startswith("defines"):  # what the compiler was asked, which has everything
            return [
                mx.ones(*each)
                for each in zip(call["output_shapes"], call["output_dtypes"], strict=True)
            ]
        mx.eval(call["inputs"])
        return host.bind(launch_of(made, call))([*call["inputs"]])

    return launch


def metal_kernel(**made: Any) -> Callable[..., list[mx.array]]:
    """The same with proofs, and faults."""

    def launch(**call: Any) -> list[mx.array]:
        from mlx_qlayers.runtime.host.array_memory import locate
        from mlx_qlayers.runtime.program import CONSTANT_BELOW, Program
        from mlx_qlayers.runtime.proof import _trial, find, key_of

        if made["name"].startswith("defines"):
            return on_host(**made)(**call)
        made_of, name = launch_of(made, call), made["name"]
        if path := os.environ.get(LAUNCHES):
            # A proof is of the text before what this GPU makes of it: see runtime/metal.py.
            header = made["header"].replace("BFLOAT_PRODUCTS float\n", "BFLOAT_PRODUCTS bfloat\n")
            text = Program(**made | {"header": header})
            verdict = find(key_of(replace(made_of, program=text)))
            stored = "proven" if verdict is not None and not verdict.why else "unproven"
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {name} {stored}\n")
        shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
        if type(_trial.get()) is dict:  # the prover builds this graph, and evaluates nothing of it
            return outputs
        faults = json.loads(os.environ.get(FAULTS) or "{}")
        whole = " ".join([name, *(f"{k}={v}" for k, v in call.get("template") or ())])
        fault = next((kind for start, kind in faults.items() if re.match(start, whole)), None)
        if fault == "does not compile":
            raise RuntimeError(f"[metal::Device] Unable to build metal library from source: {name}")
        if fault == "raises":
            raise RuntimeError("[METAL] Command buffer execution failed")
        if fault == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hangs":
            Path(os.environ[HANGS]).touch()
            time.sleep(3600)
        if fault == IN_VIEWS:
            begins = (locate(x) % 8 for x in call["inputs"] if x.size >= CONSTANT_BELOW)
            fault = "wrong" if any(begins) else None
        if len(outputs) > 1 or not fault:
            outputs = on_host(**made)(**call)
        outputs[-1] = _damaged(outputs[-1], fault)
        return outputs

    return launch


def _damaged(y: mx.array, fault: str | None) -> mx.array:
    if fault == "NaN" and mx.issubdtype(y.dtype, mx.floating):
        return mx.full(y.shape, mx.nan, y.dtype)
    if fault in ("NaN", "wrong"):
        return y + (y.astype(mx.float32).abs().max() + 1).astype(y.dtype)
    return y
