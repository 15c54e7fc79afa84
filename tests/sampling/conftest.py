"""What the tests of sampling share."""

import pytest
from families import tiny_model
from helpers import FakeReference, InProcess

from grpo.serving.policies import Policies
from grpo.serving.store import Store
from ref_server import make_app


@pytest.fixture(scope="module")
def model_of():
    made = {}
    return lambda family: made.setdefault(family, tiny_model(family))


class Noting(InProcess):
    def request(self, method, url, **named):
        self.asked.append((method, named.get("params")))
        return super().request(method, url, **named)


@pytest.fixture
def hub_server(tmp_path):
    """-> a client of the real hub, store and routes."""
    Noting.asked = []
    store = Store(tmp_path / "store.sqlite", 10**6)
    hub = Policies(store, tmp_path / "policies", 10**6)
    settings = {"token": None, "max_body_bytes": 10**6, "lease_seconds": 60, "lease_wait": 0}
    app = make_app(store, hub, FakeReference(), **settings)
    client = Noting(app, limit=0.2)
    client.store, client.hub = store, hub
    yield client
    store.db.close()
