"""The reference in the trainer (REF_SERVER = None): the server's numbers, without a server."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from fakes import NAMES, a_recipe, tiny_policy
from helpers import InProcess

import grpo_ref_split as trainer
from grpo.forward import CompletionModel
from grpo.serving.policies import Policies
from grpo.serving.scoring import Reference, score_groups
from grpo.serving.store import Store
from grpo.training.checkpoint import Progress
from grpo.training.exchange import Inbox, ReferenceLogps
from grpo.training.local_reference import LocalReference, on_device, tensors_of
from grpo.training.metrics import Clock
from grpo.weights import adapters_off
from ref_server import make_app

PROMPTS = [(i, {"question": "?"}, [5 + i % 7, 6, 7, 8][: 2 + i % 3]) for i in range(99)]
TASK = SimpleNamespace(rewards=lambda _, text: {"correctness": len(text) % 5 - 2.0, "format": 1.0})


class Plain:
    """DeepSpeed's place."""

    device = "cpu"

    def __init__(self, policy):
        self.module = CompletionModel(policy.model, share_prompts=True, gradient_checkpointing=True)
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def __call__(self, prompts, completions):
        return self.module(prompts, completions)

    def backward(self, loss):
        loss.backward()

    def set_gradient_accumulation_boundary(self, _):
        pass

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def a_server(tiny, folder):
    """-> a client of a server with the reference model; what is uploaded is scored at once."""
    store = Store(folder / "store.sqlite", 10**6)
    settings = {"model": str(tiny), "dtype": "float32", "temperature": 1.0, "budget": 500}
    reference = Reference(store, folder, **settings, share_prompts=True)
    settings = {"token": None, "max_body_bytes": 10**6, "lease_seconds": 60, "lease_wait": 0}
    app = make_app(store, Policies(store, folder / "policies", 10**6), reference, **settings)

    def score():
        score_groups(store, store.waiting(99, 0), reference.score, **reference.limits)

    return InProcess(app, after=score)


def trained(tiny, lora_rank, folder):
    """-> (metrics of each update, the policy) after two rollouts of two updates; by a server with
    its store in `folder`, or without one."""
    torch.manual_seed(0)  # adapters begin with random numbers
    policy, clock = tiny_policy(tiny, lora_rank=lora_rank), Clock()
    c = SimpleNamespace(LORA_RANK=lora_rank, TEMPERATURE=1.0, SHARE_PROMPTS=True)
    c.MICRO_BATCH_TOKENS, c.REFERENCE_ON_CPU = 24, False
    server = a_server(tiny, folder) if folder else None
    inbox = Inbox(server, "run", 5) if server else None
    reference = ReferenceLogps(inbox, clock) if server else LocalReference(c, policy, clock)
    run = SimpleNamespace(
        policy=policy,
        engine=Plain(policy),
        recipe=a_recipe(task=TASK),
        stream=iter(PROMPTS),
        server=server,
        clock=clock,
        progress=Progress("run"),
        inbox=inbox,
        reference=reference,
        constants=c,
    )
    flags = [p.requires_grad for p in policy.model.parameters()]
    modes = [m.training for m in policy.model.modules()]
    metrics = []
    for run.progress.step in (0, 2):
        groups, *_ = trainer.sample_and_exchange(run)
        sequences = trainer.make_sequences(groups, NAMES, old_from_sampler=False)
        for _ in range(2):
            metrics.append(trainer.accumulate(run, sequences))
            run.engine.step()
    assert [p.requires_grad for p in policy.model.parameters()] == flags
    assert [m.training for m in policy.model.modules()] == modes
    return metrics, policy


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_metrics_and_weights_are_those_of_a_run_with_a_server(
    lora_rank, tiny, alone, monkeypatch, tmp_path
):
    """Measured: metrics 2e-6 apart at most, weights 2e-7."""
    monkeypatch.setattr(trainer, "SKIP_FLAT_GROUPS", False)
    monkeypatch.setattr(trainer, "MASK_TRUNCATED", False)
    (expected, there), (found, here) = (
        trained(tiny, lora_rank, folder) for folder in (tmp_path, None)
    )
    assert abs(found[0]["kl"]) < 1e-9 and found[3]["kl"] > 1e-3  # it is MODEL, and stays that
    for one, other in zip(found, expected, strict=True):
        print(max(abs(one[k] - other[k]) for k in one))
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    other = dict(there.model.named_parameters())
    for name, weight in here.model.named_parameters():
        assert (weight - other[name]).abs().max() < 1e-5, name


def test_a_copy_that_waits_elsewhere_comes_and_goes_whole(tiny):
    model, there = tiny_policy(tiny).model, torch.device("meta")
    before = tensors_of(model)
    with on_device(model, there):
        assert model.device == there and {t.device for *_, t in tensors_of(model)} == {there}
        assert model.lm_head.weight is model.model.embed_tokens.weight  # moved once
    assert all(a is b for a, b in zip(chain(*before), chain(*tensors_of(model)), strict=True))


def test_without_its_adapters_a_model_is_the_one_under_them(tiny):
    policy, plain = tiny_policy(tiny, lora_rank=4, drift=0.1), tiny_policy(tiny)
    names = [name for name, _ in policy.model.named_modules()]
    expected = plain.logps([5, 6], [7, 8, 9])
    assert policy.logps([5, 6], [7, 8, 9]) != pytest.approx(expected, abs=1e-2)
    with adapters_off(policy.model):
        assert policy.logps([5, 6], [7, 8, 9]) == pytest.approx(expected, abs=1e-6)
    assert [name for name, _ in policy.model.named_modules()] == names
