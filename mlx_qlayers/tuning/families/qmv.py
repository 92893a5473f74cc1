"""The product of few rows with a quantized matrix, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from inspect import unwrap

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul import qmv as quantized_matmul
from ...metal.quantized_matmul.qmv import QmvConfig, QmvMatrixConfig, qmv_config
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Problem
from ..moves import Axis, Buffer, Group, Local, Unroll, Upcast
from .fused import Fused
from .packed import Packed, Path

Config = QmvConfig | QmvMatrixConfig
# Beyond these a thread's sums and weights cannot stay in registers.
_MOST_SUMS, _MOST_PRODUCTS = 32, 128


class FewRowsFamily(Family[Config]):
    """y (M, N) = x (M, K) with a packed matrix, M of 1 to 16; its form is ``affine-64-4-t``.

    What else the launch does follows in the form: ``-norm``, ``-gate``, ``-residual``, and the
    number of matrices, which share N. A configuration belongs to one of two kernels. Which is
    faster depends on what the matrix units of a GPU are worth, so the search starts from both.
    """

    name = "qmv"
    configs = (QmvMatrixConfig, QmvConfig)
    kernels = (quantized_matmul._kernel(True, ()), quantized_matmul._kernel(False, ()))
    axes = (
        Axis(Group, "simds", (1, 2, 4, 8, 16)),
        Axis(Upcast, "tiles", (1, 2, 4)),
        Axis(Upcast, "outputs", (1, 2, 4, 8)),
        Axis(Unroll, "run", (8, 16, 32, 64)),
        Axis(Buffer, "ahead", (1, 2, 4)),
        Axis(Local, "stacks", (1, 2)),
        Axis(Local, "threads", (32, 64, 128, 256)),
    )

    def heuristic(self, problem: Problem, device: str) -> Config:
        m, n, k, fmt, _ = Packed.of(problem)
        return self.completed(unwrap(qmv_config)(device, m, n, k, problem.dtype, fmt), problem)

    def others(self, problem: Problem, device: str) -> tuple[Config, ...]:
        m, n, k, fmt, _ = Packed.of(problem)
        if device == "cuda":  # where matrix units are worth ten times the other ones
            return ()
        choose = unwrap(qmv_config)
        units = choose("cuda", m, n, k, mx.bfloat16, fmt)
        threads = choose("metal", m, n, k, mx.float32, fmt)
        return (threads,) if problem.dtype == mx.float32 else (units, threads)

    def completed(self, config: Config, problem: Problem) -> Config:
        if isinstance(config, QmvConfig):
            return config
        rows, gate = problem.shape[0], Fused.of(problem).gate
        fragments = -(-rows * _slots(config, Packed.of(problem)) // 8)
        # A gate joins tiles in pairs.
        return replace(config, fragments=fragments, tiles=config.tiles + config.tiles % 2 * gate)

    def why_not(self, config: Config, problem: Problem) -> str | None:
        packed = Packed.of(problem)
        if config.threads > 1024:
            return f"{config.threads} threads"
        if isinstance(config, QmvConfig):
            if Fused.of(problem).gate and config.outputs % 2:
                return "a gate joins outputs in pairs"
            return _why_not_threads(config, packed)
        return _why_not_units(config, packed)

    def inputs(self, problem: Problem) -> list[mx.array]:
        x, *packed = Packed.of(problem).inputs(problem.dtype)
        return Fused.of(problem).inputs(x, packed)

    def run(self, inputs: list[mx.array], problem: Problem, config: Config) -> mx.array:
        return Fused.of(problem).launch(inputs, Packed.of(problem).fmt, config)

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        single = [a if a.dtype in (mx.uint32, mx.uint8) else a.astype(mx.float32) for a in inputs]
        return Fused.of(problem).composed(single, Packed.of(problem).fmt)

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        if Fused.of(problem) == Fused(1, False, False, False):
            return Packed.of(problem).paths()
        fmt = Packed.of(problem).fmt
        return {"stock": lambda inputs: Fused.of(problem).composed(inputs, fmt)}

    def registers(self, config: Config, problem: Problem) -> int:
        bits = Packed.of(problem).fmt.bits
        if isinstance(config, QmvConfig):
            return 24 + config.rows * config.outputs * config.ways + 2 * config.run
        words = config.tiles * config.ahead * 2 * config.run * bits // 32
        scales = config.tiles * (4 * config.ahead + 4)
        rows = config.fragments * config.run // 4
        return 32 + words + scales + rows + 8 * config.tiles * config.fragments

    def part(self, problem: Problem) -> tuple[Problem, float]:
        part, times = Packed.of(problem).part(problem.dtype, 1536)
        return replace(part, form=problem.form), times

    def tolerance(self, problem: Problem) -> float:
        # Rounded rows make an error of each product, and a gate multiplies two of those.
        return super().tolerance(problem) * (2 if Fused.of(problem).norm else 1)

    def asked(
        self, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, kind: str = ""
    ) -> Problem:
        plain = Packed(rows, n, k, fmt, True).problem(dtype)
        return replace(plain, form=f"{plain.form}-{kind}") if kind else plain


def _slots(config: QmvMatrixConfig, packed: Packed) -> int:
    return 1 if packed.fmt.mode == "nvfp4" else 4 * config.run // packed.fmt.group_size


def _why_not_threads(config: QmvConfig, packed: Packed) -> str | None:
    group, bits, _ = packed.fmt
    if config.run % (32 if bits % 2 else 16) or group % config.run:
        return f"runs of {config.run} in groups of {group}"
    products = config.run * max(config.rows, config.outputs)
    sums = config.rows * config.outputs
    return None if max(products / 2, sums) <= _MOST_PRODUCTS else f"{sums} sums, {products} numbers"


def _why_not_units(config: QmvMatrixConfig, packed: Packed) -> str | None:
    group, bits, mode = packed.fmt
    if mode == "nvfp4":
        if config.run != (16 if packed.k % 32 else 32) or config.ahead > 1:
            return f"{config} in nvfp4"
    else:
        least = max(group // 4, {2: 16, 4: 8, 6: 16, 8: 4}.get(bits, 32))
        if not least <= config.run <= group or _slots(config, packed) > 8:
            return f"runs of {config.run} in groups of {group}"
    if not config.takes(packed.k):
        return f"rows of {packed.k}"
    memory = quantized_matmul._threadgroup_memory(**asdict(config))
    if memory > MAX_THREADGROUP_MEMORY:
        return f"{memory} bytes of threadgroup memory"
    sums = config.tiles * config.fragments
    words = config.tiles * config.ahead * config.run * bits // 16
    if sums > _MOST_SUMS or words > _MOST_PRODUCTS:
        return f"{sums} fragments and {words} words under way"
    return None


FEW_ROWS = FewRowsFamily()
