"""The declarations of the kernels in ``kernels.metal``."""

from pathlib import Path

from mlx_qlayers.runtime.kernel import Kernel, Multiple

FILE = Path(__file__).parent / "kernels.metal"

AFFINE = Kernel("affine", FILE, ("x", "a", "b"), ("y",), template=("T", "N", "NEGATE"))
ROW_SUMS = Kernel("row_sums", FILE, ("x",), ("sums",), multiples=(Multiple("x", -1, 32),))
HISTOGRAM = Kernel("histogram", FILE, ("x",), ("counts",), atomic_outputs=True)
ROOTS = Kernel(
    "roots", FILE, ("x",), ("root", "exact"), errors=("negative radicand", "radicand too large")
)
GATHER = Kernel("gather", FILE, ("x",), ("y",), template=("T",), ensure_row_contiguous=False)
SPIN = Kernel("spin", FILE, ("x",), ("y",))
