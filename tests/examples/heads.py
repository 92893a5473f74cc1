"""Random calls of attention and of steps of decoding, by float64."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.metal.attention.decode import BITS
from mlx_qlayers.metal.attention.step import Heads, covers
from mlx_qlayers.ops.attention import attention
from mlx_qlayers.ops.attention_step import Rotation, attention_step, packed_rows
from tests import oracles
from tests.attention_cases import MASKS, make_mask, units
from tests.examples.arrays import DTYPES, dtype_of, filled, laid_out, placed
from tests.examples.calls import BACKENDS, Call, Numbers, Random
from tests.examples.elements import frequencies, rotated
from tests.numerics import IN_FLOAT32, ROUNDINGS, random, round_to, to64

HEADS = [(2, 1), (1, 1), (4, 2), (3, 3), (7, 1), (8, 4)]
WIDTHS = [64, 1, 7, 8, 32, 40, 64, 72, 128, 256]


def _attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (heads, kv_heads) = dtype_of(case.dtype), case.heads
    size, *bits = case.packing if case.packing and case.batch * case.queries else (1, 0, 0)
    width, v_width = (-(-w // size) * size for w in (case.width, case.v_width))
    rows, keys = (case.batch, heads, case.queries), (case.batch, kv_heads, case.keys)
    # The queries of which NaN or infinities are part are not compared.
    others = "normal" if case.values == "special" else case.values
    q = filled(rng, (*rows, width), dtype, case.values)
    of_keys = dtype_of(case.keys_dtype or case.dtype)
    k, v = (filled(rng, (*keys, n), of_keys, others) for n in (width, v_width))
    common = mx.result_type(dtype, of_keys)
    mask = make_mask(case.mask, rng, case.batch, heads, case.queries, case.keys, dtype)
    sinks = random(rng, (heads,), dtype) if case.sinks else None
    given = placed(("q", "k", "v", "sinks"), (q, k, v, sinks), case.layouts)
    rule = mask if isinstance(mask, str) else None
    given["mask"] = laid_out(None if rule else mask, case.layouts[4])
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    dense = [given["k"], given["v"]]
    if bits[0]:
        packed = [
            tuple(laid_out(a, layout) for a in mx.quantize(each, size, n))
            for each, n, layout in zip(dense, bits, case.layouts[1:], strict=False)
        ]
        dense = [
            mx.dequantize(w, *(a.astype(mx.float32) for a in rest), size, n)
            for (w, *rest), n in zip(packed, bits, strict=True)
        ]
        options |= dict(zip("kv", packed, strict=True))
        del given["k"], given["v"]
    if rule:
        del given["mask"]
        options["mask"] = rule
    plain = {name: options[name] for name in ("scale", "softcap")}
    plain["window"] = case.window and min(case.window, 1 << 40)
    boolean = mask is not None and not rule and mask.dtype == mx.bool_

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        kind, shown = n["q"].dtype.type, n.get("mask", rule)
        numbers = [n["q"], *(to64(a) for a in dense)]
        found, terms = oracles.attention(
            *numbers,
            **plain,
            mask=shown.astype(bool) if boolean else shown,
            sinks=n.get("sinks"),
            cotangent=up[0] if up else None,
            dtype=kind,
            # Kernels of few queries multiply what is packed as it is.
            units=units(common, bits[0] > 0 and not (few and case.backend in BACKENDS)),
        )
        sure = (np.isfinite(n["q"]) & (np.abs(n["q"]) < 1e3)).all(-1, keepdims=True)
        found["0"] = np.where(sure, found.pop("out"), 0)
        if terms:
            terms["0"] = np.where(sure, terms.pop("out"), np.inf)
        return found, terms

    names = ["q", "k", "v", "sinks"] + ["mask"] * (not boolean and not rule)
    if not case.gradient or case.values != "normal" or bits[0]:
        names = []
    # Shapes that kernels take.
    widths = width, v_width
    small = all(w % 8 == 0 and w <= 256 for w in widths) and case.queries * case.batch > 0
    few = small and case.queries <= 8 and {*bits} <= {0, *BITS} and not case.gradient
    many = small and width >= 32 and case.scale > 0 and {*bits} <= {0, *BITS}
    shape = *rows, v_width
    return Call(attention, given, options, shape, expected, names, few or many, [common])


_FEW = {"heads": (6, 2), "queries": 1, "keys": 65, "width": 64, "v_width": 128}
_SOME = {"heads": (4, 4), "queries": 7, "keys": 1030, "width": 128, "v_width": 96, "mask": "causal"}
_ALONE = {"heads": (1, 1), "width": 32, "v_width": 32, "dtype": "float16", "gradient": True}
_LONG = {"heads": (3, 3), "queries": 9, "keys": 33, "width": 128, "v_width": 64, "mask": "causal"}
ATTENTION = Random(
    {
        "batch": [1, 1, 1, 2, 3, 0],
        "heads": HEADS,
        "queries": (7, st.sampled_from([1, 1, 2, 8, 9]) | st.integers(0, 70)),
        "keys": (33, st.sampled_from([1, 2, 31, 33, 64, 300]) | st.integers(1, 130)),
        "width": WIDTHS,
        "v_width": WIDTHS,
        "dtype": ("float32", DTYPES),
        "keys_dtype": (None, st.none() | st.none() | DTYPES),
        "mask": MASKS,
        "window": [None, None, 1, 2, 5, 64, 10**6, 2**31, 2**40],
        "softcap": [None, None, 1e-3, 2.0, 30.0, 1e6],
        "sinks": [False, True],
        "scale": [0.125, 0.125, 1.0, 0.0, -0.5, 1e-8, 30.0],
        "packing": (
            None,
            st.none()
            | st.none()
            | st.tuples(st.sampled_from([32, 64]), *[st.sampled_from([2, 3, 4, 8])] * 2),
        ),
        "values": ["normal", "normal", "normal", "zeros", "tiny", "special"],
        "gradient": [False, True],
    },
    _attention,
    [
        {"queries": 1, "keys": 1, "heads": (1, 1), "width": 32, "v_width": 32, "gradient": True},
        {"queries": 1, "keys": 257, "heads": (3, 1), "batch": 2, "dtype": "float16"},
        # Of a mask and a cap each has a dtype, so that they share kernels with other tests.
        *(
            {"width": 32, "v_width": 32, "gradient": True} | change
            for change in (
                {"keys": 8, "heads": (7, 7), "window": 5},
                {"queries": 33, "keys": 65, "heads": (8, 1), "mask": "padded", "sinks": True}
                | {"dtype": "bfloat16", "window": 9, "softcap": 30.0},
                {"queries": 33, "keys": 8, "mask": "additive", "batch": 2, "softcap": 2.0},
                {"queries": 12, "keys": 9, "mask": "causal", "sinks": True, "batch": 3},
                {"queries": 9, "mask": "biased", "dtype": "bfloat16"},
                # Rows that see nothing average the values, or give all to a sink.
                {"mask": "dark", "softcap": 2.0, "dtype": "float16"},
                {"mask": "dark", "sinks": True},
                {"mask": "hidden", "window": 3, "dtype": "bfloat16"},
                {"mask": "hidden", "sinks": True},
            )
        ),
        {"dtype": "float16", "keys_dtype": "float32", "sinks": True, "mask": "additive"},
        {"mask": "one key", "dtype": "float16", "width": 32, "v_width": 32, "gradient": True},
        *(
            {"scale": 1e5, "mask": "causal", "dtype": dtype, "keys": keys}
            for dtype, keys in (("float32", 33), ("float16", 33), ("float16", 290))
        ),
        # Gradients: a difference of weighted values, each rounded as an operand; zero, but for the
        # error of the weight that is made anew.
        {"queries": 1, "keys": 65, "mask": "padded", "scale": 1.0} | _ALONE,
        {"queries": 1, "keys": 1, "scale": 30.0} | _ALONE,
        # All queries of all heads of a group, the last more than fit into one threadgroup.
        *(
            {"heads": heads, "queries": n, "keys": 130, "mask": "causal", "dtype": "bfloat16"}
            for heads, n in (((8, 1), 8), ((14, 2), 7), ((24, 1), 3))
        ),
        *({"window": w, "mask": m} for w, m in ((2**31, "none"), (2**70, "boolean"))),
        *(
            plain | {"packing": packing, "dtype": dtype} | change
            for plain, (packing, dtype), change in (
                (_FEW, ((32, 4, 4), "float32"), {}),
                (_FEW, ((64, 3, 3), "bfloat16"), {}),
                (_FEW, ((64, 8, 8), "bfloat16"), {"mask": "padded", "sinks": True, "window": 7}),
                (_FEW, ((32, 8, 4), "float32"), {"keys": 257, "v_width": 96}),
                (_FEW, ((64, 4, 4), "bfloat16"), {"keys": 1, "queries": 2}),
                (_SOME, ((32, 4, 8), "float16"), {"width": 96}),
                (_SOME, ((128, 8, 8), "float16"), {"v_width": 256}),
                (_SOME, ((32, 2, 3), "float32"), {"width": 96}),
                (_SOME, ((64, 2, 4), "bfloat16"), {"v_width": 64}),
                (_LONG, ((64, 8, 4), "float32"), {"softcap": 3.0}),
                (_LONG, ((32, 2, 3), "float16"), {}),
                # So few groups MLX would pass in another address space.
                (_LONG, ((64, 4, 4), "bfloat16"), {"keys": 1, "heads": (2, 1)}),
                (_LONG, ((64, 6, 6), "bfloat16"), {}),
            )
        ),
        # The first queries see no key.
        *({"queries": n, "keys": 31, "mask": "causal"} for n in (8, 32, 70)),
        {"queries": 70, "keys": 31, "mask": "causal", "window": 5, "width": 128, "v_width": 72},
        *({"queries": n, "mask": "boolean", "values": "special"} for n in (2, 21)),
        {"batch": 0, "gradient": True},
        {"queries": 0, "gradient": True},
        {"queries": 0, "mask": "causal", "softcap": 2.0},
    ],
    examples=30,
)


def attended(
    path: str,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    kind: str = "none",
    extra: dict[str, Any] | None = None,
    gradient: bool = True,
) -> list[str]:
    """Hold a call against float64, as ``attention_cases.check``; the kernels that it launched."""
    batch, heads, kv_heads, queries, keys, width, v_width = shape
    sizes = {"batch": batch, "heads": (heads, kv_heads), "queries": queries, "keys": keys}
    sizes |= {"width": width, "v_width": v_width, "scale": width**-0.5}
    changes = {"dtype": dtype, "mask": kind, "gradient": gradient, **(extra or {})}
    what = f"{shape} {dtype} {kind} {extra}"
    return ATTENTION.call(path, **sizes, **changes).check(path, what)[1]


def normed(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Rows of heads behind an RMS norm of each, with every number in the dtype of ``x``."""
    heads = x.reshape(*x.shape[:-1], -1, weight.size)
    size = np.sqrt((heads * heads).mean(-1, keepdims=True) + x.dtype.type(epsilon))
    return (heads / size * weight).reshape(x.shape)


def _step(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (heads, kv_heads), (group, bits, v_bits) = (
        dtype_of(case.dtype),
        case.heads,
        case.packing or (1, 0, 0),
    )
    batch, (width, v_width) = case.batch, (-(-w // group) * group for w in case.widths)
    dims, tokens = 0 if bits else min(case.dims, width), min(case.tokens, case.rows)
    pairs = zip(case.filled, (case.size, case.rows - tokens), strict=True)
    before, held = (int(share * count) for share, count in pairs)
    covered = case.backend in BACKENDS and width % 8 == v_width % 8 == 0
    kind = Heads(dtype, width, v_width, max(bits, v_bits), tokens)
    covered = covered and covers(heads // kv_heads, kind, case.backend == "as metal")
    names = "q", "k", "v", "k_cache", "v_cache", "k_append", "v_append", "freqs", "sinks"
    made = [random(rng, (batch, tokens, heads * width), dtype)]
    made += [random(rng, (batch, tokens, kv_heads * n), dtype) for n in (width, v_width)]
    for count, counted in ((case.size, before), (case.rows, held)):
        for n in (width, v_width):
            made.append(random(rng, (batch, kv_heads, count, n), dtype))
            if covered and not bits:  # which a kernel does not read
                made[-1][:, :, counted:] = mx.nan
    freqs = frequencies(case, rng, dims)
    sinks = random(rng, (heads,), dtype, 3.0) if case.sinks else None
    if case.sinks and heads > 2:
        sinks[0] = -mx.inf
    given = placed(names, (*made, freqs, sinks), case.layouts)
    places = [before, held, *rng.integers(0, 3000, batch).tolist()]
    mask = None
    if case.masked:
        columns = np.arange(case.size + case.rows)
        shown = rng.random((batch, heads if case.masked == "heads" else 1, 1, columns.size)) < 0.7
        mask = mx.array(shown | ((columns >= before + held) & (columns < before + held + tokens)))
    given |= {"positions": mx.array([*places, *[-1] * 8], mx.int32), "mask": mask}
    rotation = Rotation(dims, case.traditional, case.base, case.rope_scale)
    options: dict[str, Any] = {"scale": width**-0.5, "rotation": rotation, "epsilon": 1e-3}
    if case.norms and not bits:
        options["norms"] = tuple(random(rng, (width,), dtype) for _ in range(2))
    numbers = {name: given[name] for name in names[1:7]}
    if bits:
        numbers |= _packed(given, options, (width, v_width), (group, bits, v_bits))

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        n = n | {name: to64(a).astype(n["q"].dtype) for name, a in numbers.items()}
        # MLX's own rotary embedding computes angles in float32.
        angle = ROUNDINGS[dtype] * IN_FLOAT32[dtype] + 4 * max(places[2:]) * case.rope_scale
        large = np.abs(n["k"]).max() + np.abs(n["q"]).max()
        if "norms" in options:
            weights = [to64(a).astype(n["q"].dtype) for a in options["norms"]]
            n |= {x: normed(n[x], w, 1e-3) for x, w in zip("qk", weights, strict=True)}
            large = 20.0
        moved = angle * large * (stock and (dims > 0 or "norms" in options))
        return _stepped(n, places, options, freqs=given["freqs"], dtype=dtype, moved=moved)

    dtypes = [dtype, mx.uint32 if bits else dtype]
    shape = batch, tokens, heads * v_width
    return Call(attention_step, given, options, shape, expected, (), covered, dtypes)


def _packed(
    given: dict[str, Any],
    options: dict[str, Any],
    widths: tuple[int, int],
    packing: tuple[int, int, int],
) -> dict[str, mx.array]:
    """Put caches and append buffers into a call packed; what they, and the token's rows, hold."""
    numbers = {}
    for i, name in enumerate(("k", "v", "k_cache", "v_cache", "k_append", "v_append")):
        dense = given[name]
        form = packing[0], packing[1 + i % 2]
        width = widths[i % 2]
        w, *rest = mx.quantize(dense.reshape(*dense.shape[:-1], -1, width), *form)
        held = mx.dequantize(w, *(a.astype(mx.float32) for a in rest), *form)
        numbers[name] = held.reshape(dense.shape)
        if "_" in name:
            del given[name]
            packed = [a.reshape(*dense.shape[:3], -1) for a in (w, *rest)]
            options[name] = packed if "cache" in name else packed_rows(packed)
    return numbers


def _stepped(
    n: Numbers,
    places: list[int],
    options: dict[str, Any],
    freqs: mx.array | None,
    dtype: mx.Dtype,
    moved: float,
) -> tuple[Numbers, Numbers]:
    """The results of a step; in float32 with rotated rows rounded. ``moved`` are terms of these."""
    rotation, kind = options["rotation"], n["q"].dtype.type
    batch, kv_heads, _, width = n["k_cache"].shape
    before, held, *at = places
    tokens = n["q"].shape[1]
    q, k, v = (
        n[x].reshape(batch, tokens, count, -1)
        for x, count in zip("qkv", (n["q"].shape[2] // width, kv_heads, kv_heads), strict=True)
    )
    q, k = (rotated(x, at, *rotation, freqs) for x in (q, k))
    if kind == np.float32:
        q, k = (to64(round_to(x, dtype)).astype(kind) for x in (q, k))
    appended, whole = [], []
    for name, row in (("k", k), ("v", v.swapaxes(1, 2))):
        made = np.zeros_like(n[f"{name}_append"])
        made[:, :, :held] = n[f"{name}_append"][:, :, :held]
        made[:, :, held : held + tokens] = row
        appended.append(made)
        ahead = n[f"{name}_cache"][:, :, :before]
        whole.append(np.concatenate([ahead, made[:, :, : held + tokens]], 2))
    seen = np.tri(tokens, before + held + tokens, before + held, bool)
    if "mask" in n:
        seen = seen & n["mask"].astype(bool)[..., : before + held + tokens]
    # Rotated rows are rounded, as unpacked ones are.
    found, terms = oracles.attention(
        *(q, *whole, options["scale"], seen),
        sinks=n.get("sinks"),
        dtype=kind,
        units=units(dtype, True),
    )
    results = {"0": found["out"].swapaxes(1, 2).reshape(batch, tokens, -1)}
    if "k_append" not in options:  # packed rows are words
        results |= {"1": appended[0], "2": appended[1]}
    of_out = np.max(terms.get("out", 0)) * (1 + moved)
    return results, {"0": of_out, "1": moved, "2": 0.0}


_SHARE = [0.0, 0.3, 0.7, 1.0]
ATTENTION_STEP = Random(
    {
        "batch": [1, 1, 2, 3, 9],
        "heads": HEADS,
        "size": [40, 1, 2, 7, 33, 64, 256, 1030],
        "rows": [17, 1, 2, 9, 64, 256],
        "tokens": (1, st.just(1) | st.integers(1, 16)),
        "filled": ((0.5, 0.6), st.tuples(*[st.sampled_from(_SHARE)] * 2)),
        "widths": ((64, 64), st.tuples(*[st.sampled_from([8, 32, 40, 64, 128, 256])] * 2)),
        "masked": ["", "all", "heads"],
        "dims": (64, st.integers(0, 128).map(lambda n: 2 * n)),
        "traditional": [False, True],
        "base": [10000.0, None, 1.5, 500.0, 1e6],
        "rope_scale": [1.0, 0.25, 4.0],
        "sinks": [False, True],
        "norms": [False, True],
        "packing": [None, None, None, (64, 4, 4), (32, 8, 4), (32, 4, 8), (64, 3, 3), (32, 2, 3)],
        "dtype": ("float32", DTYPES),
    },
    _step,
    [
        {"heads": (4, 2), "norms": True},
        {"heads": (7, 1), "batch": 2, "widths": (128, 128), "filled": (0, 0), "masked": "all"}
        | {"dims": 128, "traditional": True, "dtype": "float16"},
        {"heads": (3, 3), "size": 34, "rows": 5, "filled": (1, 1), "widths": (40, 72), "dims": 32}
        | {"base": None, "masked": "heads", "sinks": True},
        {"size": 2100, "rows": 256, "widths": (192, 128), "dims": 0, "dtype": "bfloat16"},
        {"size": 2100, "rows": 256, "widths": (192, 128), "norms": True, "dtype": "float16"},
        {"batch": 3, "heads": (18, 2), "size": 700, "rows": 30, "filled": (0.4, 1), "dims": 24}
        | {"widths": (32, 256), "rope_scale": 0.25, "masked": "all", "sinks": True}
        | {"dtype": "bfloat16", "norms": True},
        {"batch": 9, "heads": (5, 1), "size": 2, "rows": 1, "widths": (8, 16), "dims": 8}
        | {"base": 500.0, "dtype": "float16"},
        {"heads": (7, 1), "size": 300, "rows": 16, "filled": (0.9, 0.6), "widths": (128, 128)}
        | {"packing": (64, 4, 4)},
        {"batch": 2, "heads": (4, 2), "filled": (0.4, 0), "masked": "all", "packing": (32, 8, 4)}
        | {"widths": (64, 32), "dtype": "bfloat16"},
        {"heads": (4, 2), "size": 600, "rows": 16, "filled": (1, 1), "packing": (32, 3, 3)}
        | {"widths": (96, 64), "dtype": "float16"},
        {"heads": (18, 1), "size": 520, "rows": 8, "filled": (0.02, 0.5), "packing": (128, 2, 8)}
        | {"widths": (256, 128), "dtype": "float16"},
        {"heads": (14, 2), "tokens": 5, "norms": True, "sinks": True},
        {"batch": 3, "heads": (4, 2), "size": 700, "rows": 16, "filled": (0.4, 0), "tokens": 16}
        | {"masked": "all", "dims": 24, "traditional": True, "dtype": "bfloat16"},
        {"batch": 2, "heads": (6, 2), "size": 1030, "tokens": 3, "widths": (128, 72)}
        | {"masked": "heads", "base": None, "dtype": "float16"},
        {"heads": (7, 1), "size": 600, "tokens": 4, "widths": (128, 64), "packing": (64, 4, 4)},
        {"batch": 2, "heads": (4, 2), "tokens": 2, "masked": "all", "packing": (32, 3, 8)}
        | {"widths": (64, 96), "dtype": "bfloat16"},
    ],
)
