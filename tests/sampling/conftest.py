"""What the tests of sampling share."""

import pytest
from families import tiny_model


@pytest.fixture(scope="module")
def model_of():
    made = {}
    return lambda family: made.setdefault(family, tiny_model(family))
