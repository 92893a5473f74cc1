"""Where kernels run that are launched by themselves."""

import pytest

from tests.examples.arrays import running
from tests.gpus import GPUS


@pytest.fixture(params=["checked", *GPUS])
def backend(request):
    """The host backend's build with checks, or for some tests the fast one too; and GPUs."""
    with running(request.param):
        yield "host" if request.param == "checked" else request.param
