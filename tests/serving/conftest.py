"""What the tests of serving share."""

import pytest
from helpers import MAX_POLICY, FakeReference

from grpo.serving.policies import Policies
from ref_server import make_app


@pytest.fixture
def policies(store, tmp_path):
    return Policies(store, tmp_path / "policies", MAX_POLICY)


@pytest.fixture
def app(store, policies):
    settings = {"token": None, "max_body_bytes": 5000}
    return make_app(store, policies, FakeReference(), lease_seconds=60, lease_wait=0, **settings)
