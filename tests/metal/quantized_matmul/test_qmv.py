"""The kernels of the quantized product against float64, and what they read."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from runtime.host import mlx_kernels as mk

from mlx_qlayers import quantized_matmul
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul import qmv_config as configs
from mlx_qlayers.options import PackedMatrix
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.backend import current, within
from mlx_qlayers.runtime.host import checks
from tests.examples.fused import fused64
from tests.gpus import on_gpus
from tests.launchers import matrix, persistent, qmv
from tests.numerics import assert_accurate, random, round_to, to64
from tests.packed import EACH_WIDTH, FORMATS, FORMATS_IN_TURN, check_product, random_packed
from tests.pairwise import in_turn, pairwise

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
AFFINE = Format(64, 4)
# One column, fewer and more than a tile, no whole tiles; one group, three, and many.
SHAPES = [(1, 1), (8, 3), (41, 1), (520, 3), (41, 256)]
ROWS = (1, 3, 7, 16)
DEVICES = ("host", "metal", "cuda")


def sample(rng, rows, n, groups, fmt, dtype):
    k = max(groups * fmt.group_size, 32) if groups < 256 else 256
    return random(rng, (rows, k), dtype), random_packed(rng, n, k, fmt, dtype)


def by_kernel(x, packed, fmt, bias=None, device="host", config=None, **changes):
    config = replace(config or config_for(device, x, packed, fmt), **changes)
    with use_backend("host"):
        return qmv(x, [PackedMatrix(*packed, bias)], fmt, config)[0]


def config_for(device, x, packed, fmt):
    return configs.qmv_config(device, *x.shape[:1], packed[0].shape[0], x.shape[1], x.dtype, fmt)


def check_all(fmt, dtype, rows, shapes=SHAPES, **options):
    rng = np.random.default_rng(fmt.bits * 1000 + fmt.group_size + 7 * rows)
    for n, groups in shapes:
        x, packed = sample(rng, rows, n, groups, fmt, dtype)
        check_product(by_kernel(x, packed, fmt, **options), x, packed, fmt)


@pytest.mark.parametrize(("fmt", "dtype", "rows"), in_turn(FORMATS_IN_TURN, ROWS), ids=str)
def test_every_format_and_dtype(fmt, dtype, rows):
    check_all(fmt, dtype, rows)


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


@on_gpus
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_on_gpus(gpu, fmt, dtype):
    rng = np.random.default_rng(fmt.bits)
    with use_backend(gpu):
        for rows in (1, 7, 16):
            x, packed = sample(rng, rows, 41, 3, fmt, dtype)
            check_product(quantized_matmul(x, *packed, **fmt._asdict()), x, packed, fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype", "rows"), in_turn(pairwise(EACH_WIDTH), DTYPES[1:], ROWS), ids=str
)
def test_matrix_units(fmt, dtype, rows):
    check_all(fmt, dtype, rows, device="cuda")


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


# For Apple's GPUs: runs of 16 to 80 bits, and bytes in one operand.
SHORT_RUNS = [(32, 2), (32, 3), (64, 3), (32, 5), (64, 5), (32, 6), (64, 8)]


@pytest.mark.parametrize("fmt", [Format(*fmt) for fmt in SHORT_RUNS], ids=str)
def test_matrix_units_with_runs_within_words(fmt):
    with checks():
        check_all(fmt, mx.bfloat16, 8, [(41, 1), (9, 3)], device="metal")


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


@pytest.mark.parametrize(("fmt", "device"), in_turn(pairwise(FORMATS[::4]), DEVICES), ids=str)
def test_clean_with_checks(fmt, device):
    """Nothing out of bounds, unset, misaligned or raced for; with the configuration of GPUs too."""
    with checks():
        check_all(fmt, mx.float16, 5, [(41, 1), (8, 3)], device=device)


@pytest.mark.parametrize(
    "fmt", [Format(32, 4, "mxfp4"), Format(32, 8, "mxfp8"), Format(16, 4, "nvfp4")], ids=str
)
def test_codes_are_no_subnormal_operands(fmt):
    rng = np.random.default_rng(3)
    x, packed = sample(rng, 8, 24, 4, fmt, mx.float16)
    with checks(flush_subnormals=True):
        check_product(by_kernel(x, packed, fmt, device="cuda"), x, packed, fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype", "rows"),
    [
        *((fmt, mx.float32, (1, 3, 16)) for fmt in (AFFINE, Format(32, 3), FORMATS[-1])),
        # Of one row codes come in pairs.
        *((Format(64, 8), dtype, (1,)) for dtype in DTYPES[1:]),
        (Format(32, 4, "mxfp4"), mx.float16, (1,)),
        *((Format(32, 8, "mxfp8"), dtype, (1,)) for dtype in (mx.bfloat16, mx.float32)),
    ],
    ids=str,
)
def test_configuration_of_gpus(fmt, dtype, rows):
    """The threads of a SIMD group share the columns; some have nothing to do."""
    for m in rows:
        check_all(fmt, dtype, m, SHAPES if len(rows) > 1 else [(41, 3)], device="metal")


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


def fused(rng, device, dtype, rows, sizes, k, fmt, **options):
    """Fused products with checks, with the configuration of a device."""
    x = random(rng, (rows, k), dtype)
    if "gate" in options:  # of large numbers GELU gives these, or zero
        x /= 16
    matrices = packed_matrices(rng, sizes, k, dtype, fmt)
    if options.pop("residual", False):
        options["residual"] = random(rng, (rows, sizes[0]), dtype)
    if "norm" in options:
        options["norm"] = (random(rng, (k,), dtype) if options["norm"] else None, 1e-3)
    config = configs.qmv_config(device, rows, sum(sizes), k, dtype, fmt)
    with use_backend("host"), checks():
        found = qmv(x, matrices, fmt, config, **options)
    check_fused(found, x, matrices, fmt, **options)


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


# Sizes of matrices that share an input, as queries, keys and values do, and what else is fused.
FUSED = [
    (AFFINE, [41], {}),
    (Format(16, 4, "nvfp4"), [24, 8], {"norm": True}),
    (AFFINE, [41, 41], {"gate": "gelu"}),
    (Format(32, 3), [24, 24], {"norm": True, "gate": "silu"}),
    (AFFINE, [41, 41], {"gate": "gelu_approx"}),
    (AFFINE, [24, 8], {}),
    (AFFINE, [24, 8], {"norm": False}),
    (AFFINE, [33, 8, 41], {}),
    (Format(16, 4, "nvfp4"), [24, 24], {"norm": False, "gate": "silu"}),
    (Format(32, 8, "mxfp8"), [41], {"residual": True}),
]


@pytest.mark.parametrize(
    ("device", "case", "dtype", "rows"),
    in_turn(pairwise(DEVICES, FUSED), DTYPES, (1, 5, 16)),
    ids=str,
)
def test_fused(device, case, dtype, rows):
    fmt, sizes, options = case
    fused(np.random.default_rng(rows), device, dtype, rows, sizes, 192, fmt, **options)


def test_one_launch_for_all():
    """On a GPU all matrices, a norm and a gate are one launch."""
    rng = np.random.default_rng(9)
    with trace() as launches:
        for device in DEVICES:
            fused(rng, device, mx.bfloat16, 2, [16, 16], 64, AFFINE, norm=True, gate="silu")
    # On a processor whose threads share nothing a norm is one of its own, by MLX.
    assert len(launches) == 3
    assert ["matrix_" in launch.kernel for launch in launches] == [False, False, True]


@pytest.mark.parametrize(("device", "dtype"), [("host", mx.float32), ("cuda", mx.bfloat16)])
def test_nan_and_infinity_stay_in_their_row(device, dtype):
    rng = np.random.default_rng(5)
    x, packed = sample(rng, 7, 41, 3, AFFINE, dtype)
    values = to64(x).astype(np.float32)
    values[2, 5], values[4, 7] = np.nan, np.inf
    y = by_kernel(round_to(values, dtype), packed, AFFINE, device=device)
    y = np.isfinite(to64(y))
    good = np.isfinite(values).all(1)
    assert y[good].all() and not y[~good].any()


def test_rows_do_not_depend_on_their_number():
    """A row has one result in any batch, so that speculation changes no token."""
    rng = np.random.default_rng(6)
    x, packed = sample(rng, 16, 41, 256, AFFINE, mx.bfloat16)
    whole = by_kernel(x, packed, AFFINE)
    for rows in (1, 2, 9):
        assert mx.array_equal(by_kernel(x[:rows], packed, AFFINE), whole[:rows])


@pytest.mark.parametrize(
    ("rows", "fmt", "groups"), [(17, AFFINE, 20), (70, Format(16, 4, "nvfp4"), 3)]
)
@pytest.mark.parametrize("checked", [False, True])
def test_many_rows_on_a_cpu(rows, fmt, groups, checked):
    """Long rows and odd ones; a processor that multiplies pairs of bfloat rounds weights to it."""
    x, packed = sample(np.random.default_rng(rows), rows, 41, groups, fmt, mx.bfloat16)
    with checks(checked), trace() as launches:
        y = by_kernel(x, packed, fmt)
    check_product(y, x, packed, fmt)
    assert [each.kernel.rpartition("_")[0] for each in launches] == ["qmv_serial"]
