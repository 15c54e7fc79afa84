"""A worker's groups: what is trained is as long as what is sampled."""

import pytest
from lengths import check_lengths, save_model
from transformers import AutoTokenizer

from grpo.sampling.policy import load_policy


@pytest.mark.long
def test_a_worker_does_not_favour_short_completions(tmp_path):
    """Groups that end first must not crowd out those that take longer, and grow too old."""
    folder = save_model(tmp_path / "model")
    policy = load_policy(folder, AutoTokenizer.from_pretrained(folder), "float32")
    check_lengths(policy, folder, rows=64)
