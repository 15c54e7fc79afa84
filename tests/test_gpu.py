"""What a GPU needs and a CPU does not show: held here on a machine without one."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer

import scoring
import warm_start
from forward import CompletionModel
from policy import load_policy
from store import Store

PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9]], [[3, 4, 5], [6, 7, 8]]


# --- cuDNN's attention ---------------------------------------------------------------
@pytest.fixture
def choices(monkeypatch):
    """-> for each call of PyTorch's attention, whether it could have chosen cuDNN's."""
    seen, real = [], functional.scaled_dot_product_attention

    def recorded(*args, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch starts
    yield seen
    torch.backends.cuda.enable_cudnn_sdp(False)


def policy_of(folder):
    return load_policy(str(folder), AutoTokenizer.from_pretrained(folder), "float32")


def train(folder, _):
    for share in (True, False):
        model = CompletionModel(policy_of(folder).model, share_prompts=share)
        model(PROMPTS, COMPLETIONS)[0].sum().backward()


def sample(folder, _):
    policy, prompts = policy_of(folder), list(enumerate(PROMPTS))
    settings = {"max_rows": 4, "longest_prompt": 3, "max_new_tokens": 4, "temperature": 1.0}
    take = lambda n: [prompts.pop() for _ in range(min(n, len(prompts)))]
    assert len(list(policy.stream(take, seed=0, group_size=2, **settings))) == 2


def prove(folder, _):
    policy_of(folder).logps(PROMPTS[0], COMPLETIONS[0])


def serve(folder, scratch):
    store = Store(scratch / "store.sqlite", 10**6)
    settings = {"dtype": "float32", "temperature": 1.0, "share_prompts": True}
    reference = scoring.Reference(store, scratch, model=str(folder), **settings)
    limits = {"budget": 100, "temperature": 1.0, "vocab_size": 400}
    assert len(list(scoring.score_rows(reference.model, PROMPTS, COMPLETIONS, **limits))) == 1
    store.db.close()


def begin_the_demo(_, scratch):
    warm_start.warm_start(scratch / "warm", seed=0, steps=1)


@pytest.mark.parametrize("path", [train, sample, prove, serve, begin_the_demo])
def test_no_path_runs_a_model_by_cudnns_attention(path, choices, tiny, tmp_path):
    path(tiny, tmp_path)
    assert len(choices) >= 2 and not any(choices)
