"""The proof that a worker has the trainer's policy: noise passes, other weights do not."""

import json

import pytest
import torch
from fakes import PROMPTS, a_recipe, move, tiny_policy

from grpo.options.worker_weights import load_weights, trained_weights
from grpo.options.workers.policy_proof import check_proof, proof_of, sample_proof
from grpo.policy import NOISE


def text_of(policy):
    return sample_proof(policy, a_recipe(PROMPTS, MAX_PROMPT_TOKENS=20, MAX_COMPLETION_TOKENS=64))


def record_by(policy, version=0):
    """-> a policy's version and proof, as they arrive over the wire."""
    return json.loads(json.dumps({"version": version, "proof": proof_of(policy, *text_of(policy))}))


def test_the_same_weights_prove_it_and_others_do_not(tiny):
    """simple_GRPO hides a load that failed behind a bare except: its old weights sample on."""
    trainer, mine = tiny_policy(tiny, drift=0.02), tiny_policy(tiny)
    record = record_by(trainer, version=7)
    assert len(record["proof"]["logps"]) == 20 + 64 - 4  # as many as may be
    with pytest.raises(RuntimeError, match="policy 7"):
        check_proof(mine, record)
    load_weights(mine.model, trained_weights(trainer.model))
    assert check_proof(mine, record) < 1e-6
    with torch.no_grad():
        mine.model.model.norm.weight[0] = torch.nan
    with pytest.raises(RuntimeError, match="policy 7.* nan"):
        check_proof(mine, record)


def test_another_dtype_is_no_other_policy_and_one_stale_layer_is(tiny):
    """Measured: 1e-4 in bfloat16, and 0.04 with one layer off by as much as the drift."""
    trainer, coarse = tiny_policy(tiny), tiny_policy(tiny, "bfloat16")
    record = record_by(trainer)
    gap = check_proof(coarse, record)
    assert NOISE["float32"] < gap < NOISE["bfloat16"] / 2
    move(coarse.model.model.layers[1], 0.1)
    with pytest.raises(RuntimeError, match="0.01"):
        check_proof(coarse, record)
