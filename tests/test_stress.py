"""The first rounds of what ``make stress`` does a thousand times."""

import pytest

from tests import stress


@pytest.mark.parametrize("function", stress.ALL, ids=lambda function: function.__name__)
def test_nothing_is_lost(function):
    function(6 if function is stress.exits else 30)
