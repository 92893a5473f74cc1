"""Models whose steps of decoding are graphs, as the tests of these graphs have them."""

from tests.decode.conftest import gpu_path, graphs  # noqa: F401
