"""Properties of each example of the table, whatever the operation is."""

from contextlib import suppress
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from recorded_gpu import primitives, recorded_gpu

from mlx_qlayers import use_backend
from mlx_qlayers.runtime.backend import BackendError, Mode, mode
from mlx_qlayers.runtime.host import checks
from tests.examples import CALLS, RANDOM, in_float32, is_float
from tests.examples.arrays import LAID_OUT, laid_out
from tests.examples.calls import BACKENDS
from tests.examples.invalid import INVALID, OPERATIONS
from tests.gpus import GPUS, HERE, STAND_INS
from tests.numerics import assert_gradient, assert_same_sums
from tests.threads import in_threads

AWKWARD = [(name, i) for name, each in RANDOM.items() for i in range(len(each.awkward))]


@pytest.mark.parametrize("path", ["reference", "auto", "checked", *STAND_INS, *GPUS])
@pytest.mark.parametrize(("name", "number"), AWKWARD)
def test_awkward_calls_against_float64(name, number, path):
    """Results and gradients, by kernels where there are any; else as ``auto`` alone."""
    changes = RANDOM[name].awkward[number]
    call = RANDOM[name].call(path, number, **changes)
    if call.by_kernel or path not in BACKENDS:
        call.check(path, f"{name} {changes}")


@pytest.mark.parametrize("gpu", ["sm_90", "applegpu_g13g", "applegpu_g17s"])
@pytest.mark.parametrize("name", RANDOM)
def test_a_plan_outlives_its_thread(name, gpu):
    """Inside of graphs on a GPU it serves all threads, so that its constants have values."""
    device = "cuda" if gpu == "sm_90" else "metal"
    for number, changes in enumerate(RANDOM[name].awkward):
        call = RANDOM[name].call("reference", number, **changes)
        mx.eval(call.arrays, call.options)
        run = partial(call.function, **call.arrays, **call.options)
        with recorded_gpu(device, gpu), mode(Mode.INFERENCE), suppress(BackendError):
            in_threads(lambda _, run=run: run(), 1, same_context=True)
            mx.eval(run())


# MLX's functions that have no case for arrays without elements on a GPU.
WITH_ELEMENTS = {mx.fast: ("rms_norm", "layer_norm"), mx: ("quantized_matmul", "gather_qmm")}


@pytest.mark.parametrize("name", RANDOM)
def test_functions_of_mlx_are_given_elements(name, monkeypatch):
    """Those that it compiled divide by their number on CUDA, and end the process."""

    def refuses(run, x, *others, **more):
        assert x.size
        return run(x, *others, **more)

    for module, names in WITH_ELEMENTS.items():
        for each in names:
            monkeypatch.setattr(module, each, partial(refuses, getattr(module, each)))
    for number, changes in enumerate(RANDOM[name].awkward):
        call = RANDOM[name].call("reference", number, **changes)
        if any(x is not None and not x.size for x in call.arrays.values()):
            with use_backend("reference"):
                found = call.function(**call.arrays, **call.options)
            used = primitives(*[found] if isinstance(found, mx.array) else found)
            assert not [each for each in used if each.startswith("Compiled")]


DIFFERENTIATED = (
    "exp",
    "swiglu",
    "rotary",
    "quantized_matmul",
    "gather_qmm",
    "attention",
    "grid_sample",
    "int8_matmul",
)
DIFFERENTIATED += "experts_products", "experts_combined", "solve_triangular", "quantized_rows"
WRONG = [(name, "results") for name in RANDOM] + [(name, "gradients") for name in DIFFERENTIATED]


@pytest.mark.parametrize(("name", "of"), WRONG)
def test_wrong_numbers_are_seen(name, of):
    """One result, or one gradient, that is off by a hundredth."""
    fields = RANDOM[name].fields
    call = RANDOM[name].call("host", **{"gradient": True} if "gradient" in fields else {})

    @mx.custom_function
    def off(y):
        return y if of == "gradients" else 1.01 * y

    off.vjp(lambda y, up, _: 1.01 * up)

    def wrong(**given):
        found = call.function(**given)
        return off(found) if isinstance(found, mx.array) else [off(found[0]), *found[1:]]

    call.check("host")
    with pytest.raises(AssertionError, match="error"):
        call._replace(function=wrong).check("host")


CHANGES = ("broadcast", "broadcast last")
LAYOUTS = [layout for layout in LAID_OUT if layout != "dense"]
# A matrix that a view changes is not positive definite any more.
DEFINITE = ("linalg", "gptq")


@pytest.mark.parametrize("path", ["host", *GPUS])
@pytest.mark.parametrize("name", CALLS)
def test_views_give_the_same_bits(name, path):
    """Each array in each layout, all at once: sliced, transposed, broadcast, behind an element.

    The checked build sees that a third of them are read where they are. It exponentiates otherwise.
    """
    example = CALLS[name]
    for turn in range(len(LAYOUTS)):
        seen = []
        for i, array in enumerate(example.arrays):
            layout = LAYOUTS[(turn + i) % len(LAYOUTS)]
            keeps = not is_float(array) or name.startswith(DEFINITE)
            seen.append(array if keeps and layout in CHANGES else laid_out(array, layout))
        with use_backend(path):
            found, wanted = example.run(*seen), example.run(*map(mx.contiguous, seen))
        for one, other in zip(found, wanted, strict=True):
            # Pixels that are read in packs are added up in another order.
            if example.gradients and name.startswith("grid_sample"):
                assert_same_sums(one, other)
            else:
                assert mx.array_equal(one, other, equal_nan=True), LAYOUTS[turn]
        if path == "host" and turn % 3 == 0:
            with use_backend(path), checks():
                mx.eval(example.run(*seen))


# The reference differentiates one of two equal halves; codes are steps; MLX has none of scales.
WITHOUT = ("linalg, cholesky", "cholesky 0", "gptq", "int8_matmul", "subtract_product")
# Random points lie beside kinks; neither frequencies nor packed append buffers have a gradient.
WITHOUT += ("grid_sample 0", "grid_sample 1", "deform_conv2d 0", "attention_step 1")
WITHOUT += ("attention_step 2",)
STOCK_HAS_NONE = ("gather_qmm, a token, not transposed", "gather_qmm 1")
# Steps beside which activations of large products are straight.
STEPS = {"fused_products": 1e-3}


@pytest.mark.parametrize("path", ["reference", HERE])
@pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith(WITHOUT)])
def test_gradients_by_finite_differences(name, path):
    """Of all floating-point arrays at once."""
    example = CALLS[name]
    arrays = in_float32(example.arrays)
    places = [i for i, array in enumerate(arrays) if is_float(array)]
    if path == "reference" and name in STOCK_HAS_NONE:
        places = places[:1]

    def run(*floats):
        given = [*arrays]
        for place, array in zip(places, floats, strict=True):
            given[place] = array
        return mx.concatenate([y.flatten() for y in example.results(*given)])

    step = STEPS.get(name.partition(",")[0], 1e-2)
    with use_backend(path):
        assert_gradient(run, [arrays[i] for i in places], np.random.default_rng(0), step=step)


@pytest.mark.parametrize("number", range(len(INVALID)), ids=lambda i: f"{INVALID[i][0]}-{i}")
def test_invalid_calls_say_what_is_wrong(number):
    name, change, message = INVALID[number]
    with pytest.raises(ValueError, match=message):
        OPERATIONS[name].function(**OPERATIONS[name].sound() | change)
