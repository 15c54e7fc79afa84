"""What tests of sampling and training share: a group, a recipe, a fake policy."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import safetensors.torch
import torch
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo.sampling.policy import load_policy
from grpo.sampling.recipe import Recipe
from grpo.sampling.rollout import sampled_and_rewarded
from grpo.sampling.sampler import Completion
from grpo.training import exchange as exchange_module
from grpo.training import liveness as watch
from grpo.training import metrics as report
from grpo.training.exchange import Inbox, ReferenceLogps
from grpo.wire import Group, pack_group


def a_group(rewards, *, lengths=(3, 1), truncated=(False, False), **changes):
    """-> a wire Group with these rewards (G, 2)."""
    tokens = sum(lengths)
    fields = dict(  # noqa: C408
        id="000000-0000-0000",
        run="test",
        policy_version=0,
        item=0,
        sampler="trainer",
        outcome="correctness",
        skipped={},
        reward_names=["correctness", "format"],
        prompt_ids=torch.tensor([5, 6], dtype=torch.int32),
        completion_ids=torch.arange(10, 10 + tokens, dtype=torch.int32),
        completion_lengths=torch.tensor(lengths, dtype=torch.int32),
        sampler_logps=-torch.arange(1, tokens + 1, dtype=torch.float32),
        truncated=torch.tensor(truncated),
        rewards=torch.tensor(rewards),
        ref_logps=-torch.ones(tokens),
    )
    return Group(**fields | changes)


NAMES = {"correctness": 2.0, "format": 1.0}
NAMED = {"id": "a", "run": "r", "version": 0, "sampler": "trainer"}  # of make_group
NAMED |= {"outcome": "correctness", "skipped": {}}
GSIZE = 2  # of the groups of a FakeEngine
MIXED = [(1.0, -1.0), (-1.0, -1.0)]
ALL_WRONG = [(-1.0, 1.25), (-1.0, -1.0)]  # differs in format alone
ALL_RIGHT = [(1.0, 1.25), (1.0, -1.0)]


def a_recipe(prompts=(), **changes):
    """-> a Recipe whose task rewards a FakeEngine's completions as the prompt's item says."""
    task = SimpleNamespace(rewards=lambda item, text: dict(zip(NAMES, item[text], strict=True)))
    fields = dict(  # noqa: C408
        task_name="fake",
        task=task,
        prompts=list(prompts),
        group_size=GSIZE,
        sample_batch=64,
        max_prompt_tokens=20,
        max_completion_tokens=8,
        temperature=1.0,
        reward_weights=NAMES,
        outcome="correctness",
        skip_flat_groups="outcome",
        seed=0,
        stop_tokens=[],
        stop_strings=[],
        reward_timeout_seconds=60,
    )
    return Recipe(**fields | changes)


def prompts_of(outcomes):
    """-> prompts whose groups come out as told: (correctness, format) for each completion."""
    items = [{"first": one, "second": two, "question": "?"} for one, two in outcomes]
    return [(i, item, [5, 6]) for i, item in enumerate(items)]


class FakeEngine:
    """In place of sampling: two completions for each prompt, one of which is cut."""

    def __init__(self):
        self.asked, self.settings, self.most = [], None, 0

    def stream(self, take, *, group_size, max_rows, **settings):
        self.settings, running = settings | {"max_rows": max_rows}, []
        while True:
            room = max_rows // group_size - len(running)
            new = take(room) if room else []
            self.asked.append(len(new))
            running += new
            self.most = max(self.most, len(running))
            if not running:
                return
            whole, cut = Completion([7, 2], [-1.0, -2.0], False), Completion([7], [-1.0], True)
            yield running.pop(0)[0], [whole, cut][:group_size]

    def text(self, completion):
        return "second" if completion.truncated else "first"


PROMPT = 0, {"question": "Why?"}, [5, 6]


def sampled(engine, recipe, prompts, **changes):
    waiting = list(prompts)[::-1]

    def take(number):
        return [waiting.pop() for _ in range(min(number, len(waiting)))]

    return list(sampled_and_rewarded(engine, recipe, take, **{"seed": 0} | changes))


class Ranks:
    """Ranks as threads. Where they do not call the same, all end with an error."""

    def __init__(self, monkeypatch, number=2):
        self.local, self.barrier = threading.local(), threading.Barrier(number)
        self.called, self.values = [None] * number, [None] * number
        monkeypatch.setattr(trainer.dist, "get_rank", lambda: self.local.rank)
        monkeypatch.setattr(trainer.dist, "get_world_size", lambda: number)
        monkeypatch.setattr(trainer.dist, "broadcast_object_list", self.broadcast)
        monkeypatch.setattr(trainer.dist, "all_gather_object", self.gather)
        monkeypatch.setattr(exchange_module, "meet", self.meet)
        monkeypatch.setattr(watch, "meet", self.meet)

    def meet(self, what):
        """All ranks must call the same; so a backward pass does under ZeRO-2."""
        self.called[self.local.rank] = what
        self.barrier.wait(60)
        assert len(set(self.called)) == 1, self.called
        self.barrier.wait(60)

    def broadcast(self, box, src):
        if self.local.rank == src:
            self.value = pickle.dumps(box[0])
        self.meet("broadcast")
        box[0] = pickle.loads(self.value)
        self.meet("broadcast's end")

    def gather(self, everyone, mine):
        self.values[self.local.rank] = mine
        self.meet("gather")
        everyone[:] = self.values
        self.meet("gather's end")

    def run(self, function):
        """-> what function(rank) returns on each."""

        def of_rank(rank):
            self.local.rank = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()  # the others need not wait
                raise

        with ThreadPoolExecutor(len(self.called)) as pool:
            return list(pool.map(of_rank, range(len(self.called))))


class Leases:
    """A server that hands out groups with these ids, a list of them for each lease."""

    url = "http://leases"

    def __init__(self, *leases):
        self.leases, self.dropped, self.asked = list(leases), 0, []

    def lease(self, run, limit, *, oldest, patience):
        self.asked.append((limit, oldest, patience))
        ids = self.leases.pop(0) if self.leases else []
        assert len(ids) <= limit
        return {id: pack_group(a_group([[1.0, -1.0], [-1.0, -1.0]], id=id)) for id in ids}

    def stats(self):
        return {"waiting": 9}


def an_inbox(*leases):
    return Inbox(Leases(*leases), "run", 0.3)


def references(*leases):
    """-> the ReferenceLogps of two ranks; only that of rank 0 may call the server."""
    return [ReferenceLogps(inbox, report.Clock()) for inbox in (an_inbox(*leases), None)]


PROMPTS = [(0, {}, [5, 6, 7, 8]), (1, {}, [40, 41, 42, 43, 44, 45])]


def tiny_policy(tiny, dtype="float32", drift=0.0, **changes):
    """-> the tiny Policy, its weights moved by `drift`."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), dtype, **changes)
    move(policy.model, drift)
    return policy


@torch.no_grad()
def move(model, drift):
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(drift * torch.randn_like(parameter))


class Post:
    """A server that takes policies when `ready` is set, or fails with `error`."""

    def __init__(self):
        self.ready, self.error, self.got = threading.Event(), None, []
        self.ready.set()

    def publish(self, path, record):
        assert self.ready.wait(10)
        if self.error:
            raise self.error
        self.got.append((safetensors.torch.load_file(path), record))


W = {version: torch.arange(3.0) - 5 - version for version in range(9)}


def record_of(settings, *, version=0, logps=None, **changes):
    proof = {"prompt": [1, 2], "completion": [3, 4, 5], "dtype": "float32"}
    proof["logps"] = (W[version] if logps is None else logps).tolist()
    record = {"run": "run", "version": version, "bytes": 99, "sha256": "", "settings": settings}
    return record | {"proof": proof, "capacity": 9, "oldest": 0, "scored": True} | changes
