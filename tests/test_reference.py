"""The reference's log-probs of a group: from none, from MODEL in the trainer, and from a server."""

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import a_group, move, own_logps, tiny_policy

from grpo import remote as remote_module
from grpo.client import Refused
from grpo.logp_checks import check_reference
from grpo.reference import NoReference
from grpo.remote import RemoteReference
from grpo.start import make_reference

MEASURED = 1e-5  # rounding of float32 over batches


def constants(**changes):
    c = SimpleNamespace(KL_BETA=0.1, LORA_RANK=0, TEMPERATURE=1.0)
    c.BASE_BITS = 16
    c.MODEL, c.MICRO_BATCH_TOKENS = "tiny", 24
    c.REFERENCE, c.DTYPE, c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS = None, "float32", 8, 8
    vars(c).update(changes)
    return c


def groups_of(*lengths):
    groups = [a_group([(1.0, -1.0)] * len(sizes), lengths=sizes) for sizes in lengths]
    for i, group in enumerate(groups):
        group.prompt[0] += i
    return groups


GROUPS = groups_of((3, 1), (2, 7), (4,))


def gap(reference, policy):
    """-> how far the reference's log-probs are from the policy's."""
    groups = copy.deepcopy(GROUPS)
    reference.fill(groups, 24)
    pairs = [(torch.tensor(ref_of(group)), own_logps(policy, group)) for group in groups]
    return max((mine - own).abs().max().item() for mine, own in pairs)


def ref_of(group):
    return [p for sample in group.samples for p in sample.ref_logps]


# --- None -------------------------------------------------------------------------------
def test_without_a_kl_penalty_there_is_no_reference():
    reference = make_reference(constants(KL_BETA=0), policy=None, server=None)
    assert isinstance(reference, NoReference) and reference.info == {"model": None}
    reference.ask(GROUPS[0])
    reference.fill(GROUPS[:1], 24)


# --- Here -------------------------------------------------------------------------------
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_here_the_reference_is_model_whatever_the_policy_becomes(lora_rank, tiny):
    policy = tiny_policy(tiny, lora_rank=lora_rank)
    reference = make_reference(constants(LORA_RANK=lora_rank), policy, server=None)
    assert reference.info.items() >= {"model": "tiny", "dtype": "float32"}.items()
    before = [p.requires_grad for p in policy.model.parameters()]
    move(policy.model, 0.1)
    assert gap(reference, tiny_policy(tiny)) < MEASURED < 0.01 < gap(reference, policy)
    assert [p.requires_grad for p in policy.model.parameters()] == before


# --- A teacher --------------------------------------------------------------------------
@pytest.fixture
def teacher(tiny, tmp_path):
    """-> the folder of another model, with the tokenizer of the policy's."""
    policy = tiny_policy(tiny, drift=0.2)
    policy.save(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_teacher_is_a_model_of_its_own_also_with_adapters(lora_rank, tiny, teacher, capsys):
    policy = tiny_policy(tiny, lora_rank=lora_rank)
    c = constants(LORA_RANK=lora_rank, REFERENCE=str(teacher))
    reference = make_reference(c, policy, server=None)
    move(policy.model, 0.1)
    there = tiny_policy(teacher)
    assert gap(reference, there) < MEASURED < 0.01 < gap(reference, policy)
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert reference.info.items() >= {"model": f"{teacher} (REFERENCE)", "dtype": "float32"}.items()
    assert f"a teacher, not MODEL: {teacher}" in capsys.readouterr().out


def test_a_teacher_that_does_not_fit_is_refused(tiny, teacher):
    policy, c = tiny_policy(tiny), constants(REFERENCE=str(teacher))
    with pytest.raises(SystemExit, match="context of REFERENCE = .*teacher.* 256 tokens"):
        make_reference(SimpleNamespace(**vars(c) | {"MAX_COMPLETION_TOKENS": 249}), policy, None)
    policy.tokenizer.add_tokens(["<new>"])
    with pytest.raises(SystemExit, match="REFERENCE = '.*teacher' does not .* tiny: it has vocab"):
        make_reference(c, policy, None)
    with pytest.raises(SystemExit, match="REFERENCE = './nowhere' can't be loaded"):
        make_reference(constants(REFERENCE="./nowhere"), policy, None)


# --- At a server ------------------------------------------------------------------------
class FakeServer:
    """A client whose answers are the ids; `gate` lets them through."""

    url, info = "http://server", {"model": "theirs"}

    def __init__(self):
        self.asked, self.gate, self.fault = [], threading.Semaphore(0), None

    def score(self, groups, temperature):
        self.temperature = temperature
        self.asked.append(len(groups))
        self.gate.acquire()
        if self.fault:
            raise self.fault
        return [torch.tensor(group.ids).float() for group in groups]


@pytest.fixture
def remote(capsys):
    """-> (server, reference, group): a group was asked for."""
    server = FakeServer()
    reference = make_reference(constants(TEMPERATURE=0.7), None, server)
    assert isinstance(reference, RemoteReference) and reference.info == server.info
    assert "a teacher, not MODEL: theirs" in capsys.readouterr().out
    reference.ask(first := copy.deepcopy(GROUPS[0]))
    until = time.monotonic() + 10
    while not server.asked and time.monotonic() < until:
        time.sleep(0.001)
    assert server.temperature == 0.7
    yield server, reference, first
    server.gate.release(99)


def test_a_server_may_have_the_model_in_another_folder(tiny, capsys):
    """At the hub and in a folder, by its last name."""
    server = FakeServer()
    server.info = {"model": "hub/tiny", "dtype": "float32"}
    reference = make_reference(constants(), tiny_policy(tiny), server)
    assert reference.info == server.info and "a teacher" not in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="reference's weights differ from those of tiny"):
        check_reference({"kl": 0.1}, "float32", reference.info, model="tiny")


def test_groups_that_are_sampled_meanwhile_go_in_one_request(remote):
    server, reference, first = remote
    groups = copy.deepcopy(GROUPS)
    for group in groups:
        reference.ask(group)
    server.gate.release(2)
    reference.fill([first, *groups], 24)
    assert all(ref_of(group) == group.ids for group in [first, *groups])
    assert server.asked == [1, 3]


def test_a_request_is_bounded(remote, monkeypatch):
    server, reference, first = remote
    tokens = len(GROUPS[0].prompt) + 4  # 2 completions
    monkeypatch.setattr(remote_module, "REQUEST_TOKENS", tokens + 2)
    for _ in range(5):
        reference.ask(first)
    server.gate.release(9)
    reference.fill([first] * 6, 24)
    assert server.asked == [1, 2, 2, 1]


def test_an_error_reaches_those_who_wait_for_it_and_the_next_are_asked_for(remote):
    server, reference, first = remote
    server.fault = Refused("another reference")  # a SystemExit, in a thread
    server.gate.release()
    with pytest.raises(Refused, match="another reference"):
        reference.fill([first], 24)
    server.fault = None
    server.gate.release()
    reference.ask(first)
    reference.fill([first], 24)
    assert ref_of(first) == first.ids
