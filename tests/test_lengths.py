"""A worker's groups: what is trained is as long as what is sampled."""

from helpers import FakeReference, InProcess
from lengths import check_lengths, save_model
from transformers import AutoTokenizer

from grpo.sampling.policy import load_policy
from grpo.serving.policies import Policies
from grpo.serving.store import Store
from ref_server import make_app


def test_a_worker_does_not_favour_short_completions(alone, tmp_path):
    """Groups that end first must not crowd out those that take longer, and grow too old."""
    folder = save_model(tmp_path / "model")
    store = Store(tmp_path / "store.sqlite", 10**8)
    reference = FakeReference()
    reference.limits = {"vocab_size": 1024, "max_tokens": 512}
    settings = {"token": None, "max_body_bytes": 1 << 24, "lease_seconds": 60, "lease_wait": 1}
    policies = Policies(store, tmp_path / "policies", 10**8)
    app = make_app(store, policies, reference, **settings)
    policy = load_policy(folder, AutoTokenizer.from_pretrained(folder), "float32")
    check_lengths(policy, InProcess(app, limit=60), folder, rows=64)
    store.db.close()
