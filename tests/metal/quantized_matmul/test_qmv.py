"""The kernels of the quantized product against float64, and what they read."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from runtime.host import mlx_kernels as mk

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul import qmv_config as configs
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import use_backend
from mlx_qlayers.runtime.backend import current, within
from mlx_qlayers.runtime.host import checks
from tests.examples import RANDOM
from tests.examples.fused import fused64
from tests.gpus import STAND_INS
from tests.launchers import matrix, persistent, qmv
from tests.numerics import assert_accurate, random, round_to, to64
from tests.packed import check_product, random_packed
from tests.pairwise import in_turn, pairwise

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
AFFINE = Format(64, 4)


def sample(rng, rows, n, groups, fmt, dtype):
    k = max(groups * fmt.group_size, 32) if groups < 256 else 256
    return random(rng, (rows, k), dtype), random_packed(rng, n, k, fmt, dtype)


def by_kernel(x, packed, fmt, bias=None, device="host", config=None, **changes):
    config = replace(config or config_for(device, x, packed, fmt), **changes)
    with use_backend("host"):
        return qmv(x, [PackedMatrix(*packed, bias)], fmt, config)[0]


def config_for(device, x, packed, fmt):
    return configs.qmv_config(device, *x.shape[:1], packed[0].shape[0], x.shape[1], x.dtype, fmt)


def check_all(fmt, dtype, rows, shapes, **options):
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size + 7 * rows)
    for n, groups in shapes:
        x, packed = sample(rng, rows, n, groups, fmt, dtype)
        check_product(by_kernel(x, packed, fmt, **options), x, packed, fmt)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    ("fmt", "dtype", "rows"),
    [
        (Format(32, 4), mx.bfloat16, 1),
        (Format(64, 8), mx.float16, 3),
        (Format(128, 4), mx.float32, 8),
        (Format(32, 8), mx.bfloat16, 6),
    ],
    ids=str,
)
def test_rows_in_blocks_of_integers(fmt, dtype, rows, checked):
    rng = np.random.default_rng(fmt.bits + rows)
    k = 384 if rows == 3 else 1152
    x = to64(random(rng, (rows, k), dtype)).astype(np.float32).reshape(rows, -1, 32)
    x[0, 3], x[-1, 7, 5] = 0, 100
    steps = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    inverse = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
    rounded = mx.array(np.rint(x * inverse) * steps).reshape(rows, -1)
    packed = random_packed(rng, 37, k, fmt, dtype)
    given = mx.array(x).reshape(rows, -1).astype(dtype)
    with within(current, current.get()._replace(integers=True)):
        config = config_for("host", given, packed, fmt)
    assert config.integers
    with checks(checked):
        y = by_kernel(given, packed, fmt, config=config)
    check_product(y, rounded, packed, fmt)


@pytest.mark.parametrize(
    "config",
    [
        matrix(fragments=1, run=16, tiles=2, simds_k=3),
        matrix(fragments=2, run=32, tiles=4, simds_k=1),
        matrix(fragments=4, run=64, tiles=1, simds_k=2, simds_n=2),
        matrix(fragments=2, run=32, tiles=1, simds_k=8),
        persistent(fragments=4, run=64, tiles=2, simds_k=2, ahead=2),
        persistent(fragments=1, run=16, tiles=3, simds_k=4),
    ],
    ids=str,
)
def test_matrix_units_in_other_configurations(config):
    """SIMD groups without work, more tiles than there are, tails of K."""
    with checks():
        check_all(AFFINE, mx.bfloat16, 7, [(41, 3), (8, 256)], config=config)


@pytest.mark.parametrize(
    ("fmt", "dtype", "rows"),
    [
        (Format(32, 3), mx.float16, 1),
        (Format(64, 8), mx.bfloat16, 16),
        (Format(32, 4, "mxfp4"), mx.bfloat16, 1),
        (Format(16, 4, "nvfp4"), mx.float16, 3),
    ],
    ids=str,
)
def test_threadgroups_that_stay(fmt, dtype, rows):
    """Several formats, in more tiles than are under way at once."""
    like = configs.qmv_config("cuda", rows, 41, 256, dtype, fmt)
    config = persistent(like.run, fragments=like.fragments, tiles=3, simds_k=8, ahead=2)
    with checks():
        check_all(fmt, dtype, rows, [(41, 4), (100, 256)], config=config)


def test_a_configuration_must_go_with_the_rows():
    x, packed = sample(np.random.default_rng(0), 1, 8, 3, AFFINE, mx.bfloat16)
    with pytest.raises(ValueError, match="does not take rows of 192 elements"):
        by_kernel(x, packed, AFFINE, device="cuda", run=128)
    with pytest.raises(ValueError, match="does not take rows of 192 elements"):
        by_kernel(x, packed, AFFINE, config=persistent(16, fragments=1, tiles=2, simds_k=2))


def test_matrix_units_with_runs_within_words_of_two_groups():
    config = matrix(fragments=1, run=16, tiles=1, simds_k=2)
    with checks():
        check_all(Format(32, 3), mx.float16, 4, [(9, 3)], config=config)


@pytest.mark.parametrize("ahead", [2, 4])
@pytest.mark.parametrize(("run", "fragments"), [(16, 1), (32, 2)])
def test_matrix_units_with_runs_ahead(run, fragments, ahead):
    """SIMD groups with whole blocks of runs, with a part of one, or with none."""
    config = matrix(run, fragments=fragments, tiles=2, simds_k=3, ahead=ahead)
    for k in (192, 4 * run * ahead * 4):
        rng = np.random.default_rng(k)
        x, packed = random(rng, (7, k), mx.bfloat16), random_packed(rng, 41, k, AFFINE, mx.bfloat16)
        with checks():
            check_product(by_kernel(x, packed, AFFINE, config=config), x, packed, AFFINE)


@pytest.mark.parametrize(
    "fmt", [Format(32, 4, "mxfp4"), Format(32, 8, "mxfp8"), Format(16, 4, "nvfp4")], ids=str
)
def test_codes_are_no_subnormal_operands(fmt):
    x, packed = sample(np.random.default_rng(3), 8, 24, 4, fmt, mx.float16)
    with checks(flush_subnormals=True):
        check_product(by_kernel(x, packed, fmt, device="cuda"), x, packed, fmt)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("device", ["host", "metal"])
def test_reads_the_matrix_once(rows, device):
    rng = np.random.default_rng(rows)
    dtype = mx.float16 if device == "host" else mx.float32
    x, packed = sample(rng, rows, 24, 256, AFFINE, dtype)
    with checks() as report:
        y = by_kernel(x, packed, AFFINE, device=device)
    w, scales, biases = packed
    config = config_for(device, x, packed, AFFINE)
    tiles = -(-24 // config.outputs)
    # A scale is read by each thread that has a part of its group, all in one SIMD group at once.
    each = AFFINE.group_size // config.run
    of_matrix = w.nbytes + each * (scales.nbytes + biases.nbytes)
    # On a CPU sums of at most five rows stay in registers: those of four outputs at a time.
    passes = config.outputs // 4 if device == "host" and rows <= 5 else 1
    assert report.total("bytes_read") == of_matrix + passes * tiles * x.nbytes
    assert report.total("bytes_written") == y.nbytes
    if device == "host":
        assert each == 1


@pytest.mark.parametrize(
    ("rows", "fmt"),
    in_turn(pairwise((1, 2, 4, 8, 16)), (AFFINE, Format(32, 3), Format(32, 8, "mxfp8"))),
    ids=str,
)
def test_matrix_units_read_the_matrix_once(rows, fmt):
    rng = np.random.default_rng(rows)
    x, packed = sample(rng, rows, 64, 256, fmt, mx.bfloat16)
    config = config_for("cuda", x, packed, fmt)
    with checks() as report:
        y = by_kernel(x, packed, fmt, device="cuda")
    w, *scales = [a.nbytes for a in packed if a is not None]
    tiles = 64 // 16 // config.tiles
    assert report.total("bytes_read") == w + sum(scales) + tiles * x.nbytes
    assert report.total("bytes_written") == y.nbytes


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_reads_no_more_than_mlx(rows):
    """Beside MLX's own qmv, in the same checked build."""
    n, k, dtype = 64, 512, mx.float16
    x, packed = sample(np.random.default_rng(rows), rows, n, k // 64, AFFINE, dtype)
    name, groups = ("fast", rows) if rows == 1 else ("wide", -(-rows // 4))
    tail = "false" if rows == 1 else f"{min(rows, 4)}, 8, false"
    launch = tail, (groups, n // 8, 1), (32, 2, 1)
    _, theirs = mk.affine_product(f"qmv_{name}", x, packed, n, (64, 4), *launch)
    for device in ("cuda", "metal"):
        with checks() as report:
            by_kernel(x, packed, AFFINE, device=device)
        ours = report.total("bytes_read") + report.total("bytes_written")
        assert ours <= theirs.bytes_read + theirs.bytes_written, device


def check_fused(found, x, matrices, fmt, **options):
    """Hold fused products against float64 and one rounding from float32."""
    (exact, terms), (once, _) = (
        fused64(to64(x).astype(kind), matrices, fmt, **options) for kind in (np.float64, np.float32)
    )
    for y, true, rounded, large in zip(found, exact, once, terms, strict=True):
        assert_accurate(y, true, round_to(rounded, x.dtype), terms=large.max())


def packed_matrices(rng, sizes, k, dtype, fmt=AFFINE):
    """Of which all but the first have a bias."""
    return [
        PackedMatrix(*random_packed(rng, n, k, fmt, dtype), random(rng, (n,), dtype) if i else None)
        for i, n in enumerate(sizes)
    ]


def test_one_launch_for_all():
    """On a GPU all matrices, a norm and a gate are one launch."""
    given = {"rows": (2,), "gate": "silu", "norm": "weighted", "dtype": "bfloat16"}
    for path in ("checked", *STAND_INS):
        # On a processor whose threads share nothing a norm is one of its own, by MLX.
        (kernel,) = RANDOM["fused_products"].call(path, **given).check(path)[1]
        assert ("matrix_" in kernel) == (path == "as cuda")


def test_rows_do_not_depend_on_their_number():
    """A row has one result in any batch, so that speculation changes no token."""
    rng = np.random.default_rng(6)
    x, packed = sample(rng, 16, 41, 256, AFFINE, mx.bfloat16)
    whole = by_kernel(x, packed, AFFINE)
    for rows in (1, 2, 9):
        assert mx.array_equal(by_kernel(x[:rows], packed, AFFINE), whole[:rows])
