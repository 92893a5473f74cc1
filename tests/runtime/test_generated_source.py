"""The generated source is, byte for byte, what MLX generates."""

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_qlayers.runtime import generated_source as generated
from mlx_qlayers.runtime import metal
from mlx_qlayers.runtime.program import Program

from .mlx_text import record

DTYPES = list(generated.TYPES)
# From eight elements on an array lies in device memory.
SHAPES = [(), (7,), (8,), (9,), (1, 7), (1, 1, 1, 1, 9)]
SIZES = {"grid": (5, 3, 2), "threadgroup": (4, 1, 2)}


def agrees(program, inputs, template, output_dtypes):
    """Compare with MLX's record of the same call, and return that record."""

    def call(*arrays):
        return metal._kernel(mx.fast.metal_kernel, program)(
            inputs=list(arrays),
            template=list(template),
            output_shapes=[(3,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
            **SIZES,
        )

    recorded = record(call, inputs)
    function, text = generated.generate(program, inputs, tuple(template), tuple(output_dtypes))
    assert text == recorded.text
    assert function == recorded.function
    words = [
        [word.split()[1] for word in generated.shape_words(program.source, n)]
        for n in program.input_names
    ]
    assert recorded.shape_words == [
        tuple(name + suffix in found for suffix, _ in generated.SHAPE_WORDS)
        for name, found in zip(program.input_names, words, strict=True)
    ]
    return recorded


def program(source="o[thread_position_in_grid.x] = 1;", inputs=("x",), outputs=("o",), **fields):
    return Program("k", fields.pop("header", ""), source, tuple(inputs), tuple(outputs), **fields)


def test_words_are_found_inside_longer_words():
    source = "max_shape; dispatch_threads_per_threadgroup; my_thread_index_in_simdgroup_2;"
    recorded = agrees(program(source, ("x",)), [mx.zeros(20)], [], [mx.float32])
    assert recorded.shape_words == [(True, False, False)]


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_is_not_in_the_text(contiguous):
    made = program(ensure_row_contiguous=contiguous)
    recorded = agrees(made, [mx.zeros((4, 4)).T], [], [mx.float32])
    assert recorded.ensure_row_contiguous is contiguous
    assert (recorded.grid, recorded.threadgroup) == (SIZES["grid"], SIZES["threadgroup"])


def test_launches_of_other_sizes_share_a_text():
    """Which a server, to whom every prompt is of another length, else holds once for each."""
    made = program(inputs=("x",))
    one, other, numbers = (
        generated.generate(made, [mx.zeros((n, 64))], [("n", value)], [mx.float32])
        for n, value in ((20, 1), (30, 1), (30, True))
    )
    assert one[1] is other[1] and "int n" in one[1] and "bool n" in numbers[1]


names = st.sampled_from(["x", "w", "max", "x_shape", "scales", "A1"])
arrays = st.builds(
    mx.zeros,
    st.lists(st.integers(0, 4), max_size=4).map(tuple) | st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
)
values = st.one_of(st.integers(0, 2**31 - 1), st.booleans(), st.sampled_from(DTYPES))
fragments = st.lists(
    st.one_of(
        st.sampled_from(list(generated.ATTRIBUTES)),
        st.builds(str.__add__, names, st.sampled_from(["_shape", "_strides", "_ndim", "", "_"])),
        st.sampled_from(["\n", "/* no */", "#pragma unroll\n", "a < b"]),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_kernel(data):
    inputs = data.draw(st.dictionaries(names, arrays, max_size=4))
    template = data.draw(st.dictionaries(st.sampled_from(["T", "N", "B", "U2"]), values))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    made = program(
        ";".join(data.draw(fragments)),
        tuple(inputs),
        tuple(f"out{i}" for i in range(len(dtypes))),
        header=data.draw(st.sampled_from(["", "struct S { int x_ndim; };\n", "// no newline"])),
        atomic_outputs=data.draw(st.booleans()),
    )
    agrees(made, list(inputs.values()), list(template.items()), dtypes)
