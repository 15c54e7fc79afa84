"""Workers: they sample the prompts they are given with the newest policy, and upload the groups."""

from collections import Counter
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from fakes import (
    ALL_RIGHT,
    ALL_WRONG,
    MIXED,
    PROMPTS,
    FakeEngine,
    W,
    a_recipe,
    prompts_of,
    record_of,
    tiny_policy,
)

from grpo import stop as stop_module
from grpo.sampling import worker
from grpo.sampling.rollout import Stream, tally_of
from grpo.sampling.sampler import Completion
from grpo.training.publish import PolicySender
from grpo.wire import unpack_bodies, unpack_group


# --- The worker --------------------------------------------------------------------
class Ended(Exception):
    pass


class Engine(FakeEngine):
    """Its policy is one vector, `w`; it proves to have it by giving it away."""

    dtype = "float32"

    def __init__(self):
        super().__init__()
        self.w, self.used, self.rests = torch.zeros(3), [], 0

    def load(self, tensors):
        if tensors["w"].shape != self.w.shape:
            raise ValueError("the weights are of another model: w")
        self.w = tensors["w"]

    def logps(self, prompt, completion):
        assert (prompt, completion) == ([1, 2], [3, 4, 5])
        return self.w.tolist()

    def continuation(self, prompt, size):
        return Completion([3, 4, 5][:size], self.w.tolist(), True)

    def rest(self):
        self.rests += 1

    def stream(self, take, **settings):
        self.used.append((self.w.tolist(), settings["seed"]))
        return super().stream(take, **settings)


class Script:
    """A server whose answers to /work are written down; the last question ends the worker."""

    url, limit = "http://script", 5

    def __init__(self, *answers, policies=()):
        self.answers, self.policies = list(answers), policies
        self.asked, self.uploads, self.fetched = [], [], []

    def copy(self):
        return self

    def work(self, name, **asked):
        self.asked.append(asked)
        if not self.answers:
            raise Ended
        return {"first": 0, "count": 0} | self.answers.pop(0)

    def fetch(self, record, path):
        self.fetched.append(record["version"])
        if record["version"] not in self.policies:
            return None
        safetensors.torch.save_file({"w": self.policies[record["version"]]}, path)
        return path

    def call(self, method, path, *, data, params):
        assert (method, path) == ("POST", "/upload")
        several = params.get("several")
        bodies = unpack_bodies(data).values() if several else [data]
        self.uploads += [unpack_group(body) for body in bodies]
        answers = [{"stored": True} for _ in bodies]
        return SimpleNamespace(json=lambda: {"groups": answers} if several else answers[0])


OUTCOMES = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED]
RECIPE = a_recipe(prompts_of(OUTCOMES), sample_batch=4)


def policy(version=0, **changes):
    return {"policy": record_of(RECIPE.settings(), version=version, **changes)}


def run(server, recipe=RECIPE, expected=Ended, match=None):
    """Runs a worker until it ends with `expected`; -> its engine."""
    engine = Engine()
    with pytest.raises(expected, match=match):
        worker.run_worker(engine, server, recipe, "me")
    return engine


def in_order(*positions):
    order = Stream(RECIPE.prompts, RECIPE.seed)
    return [order[position][0] for position in positions]


def test_a_worker_fetches_what_is_newer_and_samples_what_it_is_given():
    recipe = a_recipe(RECIPE.prompts, sample_batch=4, skip_flat_groups=False)
    first, second = ({"policy": record_of(recipe.settings(), version=v)} for v in (0, 3))
    server = Script(
        first,
        first | {"first": 0, "count": 2},
        second,
        second | {"first": 9, "count": 1},
        policies=W,
    )
    engine = run(server, recipe)
    assert server.fetched == [0, 3] and [w for w, _ in engine.used] == [
        W[0].tolist(),
        W[3].tolist(),
    ]
    groups = server.uploads
    assert [g.item for g in groups] == in_order(0, 1, 9)
    assert [g.policy_version for g in groups] == [0, 0, 3]
    assert {(g.run, g.sampler, g.outcome) for g in groups} == {("run", "me", "correctness")}
    assert len({g.id for g in groups}) == 3
    assert [(a["run"], a["version"]) for a in server.asked] == [
        *[("", -1), ("run", 0), ("run", 0), ("run", 3), ("run", 3)]
    ]
    assert all((a["held"], a["want"]) == (0, 2) for a in server.asked)  # 4 rows, groups of 2
    assert [a["pulled"] for a in server.asked] == [False, True, False, True, False]


def test_no_two_rollouts_draw_alike():
    """Nor two workers, nor the same positions under another policy."""

    def seeds(name, run_name):
        server = Script(
            policy(0, run=run_name),
            policy(0, run=run_name) | {"first": 0, "count": 1},
            policy(0, run=run_name) | {"first": 1, "count": 1},
            policy(1, run=run_name),
            policy(1, run=run_name) | {"first": 1, "count": 1},
            policies=W,
        )
        engine = Engine()
        with pytest.raises(Ended):
            worker.run_worker(engine, server, RECIPE, name)
        return [seed for _, seed in engine.used]

    everyone = [*seeds("me", "run"), *seeds("you", "run"), *seeds("me", "other")]
    assert len(set(everyone)) == 9 and seeds("me", "run") == everyone[:3]
    torch.Generator().manual_seed(max(everyone))  # which takes 64 bits


def test_flat_groups_stay_at_home():
    server = Script(policy(0), policy(0) | {"first": 0, "count": 7}, policies=W)
    run(server)
    kept = [i for i, outcome in enumerate(OUTCOMES) if outcome is MIXED]
    assert sorted(group.item for group in server.uploads) == kept


def test_what_is_left_out_is_counted_with_the_next_group():
    """So the trainer's accuracy is of all that was sampled, also over two rollouts."""
    first, second = {"first": 0, "count": 4}, {"first": 4, "count": 3}
    server = Script(policy(0), policy(0) | first, policy(0) | second, policies=W)
    run(server)
    count = Counter()
    for group in server.uploads:
        count.update(tally_of(RECIPE, group))
    kept = [OUTCOMES[i] is MIXED for i in in_order(*range(7))]
    assert kept[-1] and not all(kept[:4]) and count["groups"] == 7 and count["flat"] == 2
    assert count["completions"] == 14 and count["right"] == 5 + 2
    assert sum(bool(group.skipped) for group in server.uploads) in (1, 2)


def test_what_is_left_out_of_a_run_that_ends_is_not_counted_in_the_next():
    order = [OUTCOMES[i] for i in in_order(*range(7))]
    flat, usable = order.index(ALL_WRONG), order.index(MIXED)
    server = Script(
        policy(0, run="a"),
        policy(0, run="a") | {"first": flat, "count": 1},
        policy(0, run="b"),
        policy(0, run="b") | {"first": usable, "count": 1},
        policies=W,
    )
    run(server)
    assert [(group.run, group.skipped) for group in server.uploads] == [("b", {})]


def test_a_worker_asks_for_more_while_it_samples_until_a_newer_policy_comes(monkeypatch):
    monkeypatch.setattr(worker, "ASK_SECONDS", -1)
    server = Script(
        policy(0),
        policy(0) | {"first": 0, "count": 2},  # all that there is room for
        policy(0) | {"first": 2, "count": 1},  # one group has ended
        policy(0),  # no work for now
        policy(0) | {"first": 5, "count": 2},  # not newer, so it asked once more
        policy(1),  # newer: what is in hand is finished, and no more is asked for
        policy(1),
        policies=W,
    )
    engine = run(server)
    assert server.fetched == [0, 1] and len(engine.used) == 1
    positions = Counter(in_order(0, 1, 2, 5, 6))
    flat = [i for i in positions if OUTCOMES[i] is not MIXED]
    assert Counter(g.item for g in server.uploads) == positions - Counter(flat)
    held = [asked["held"] for asked in server.asked]
    # Two in hand, one has ended, and its upload may have been answered; and one more is begun ...
    assert held[:2] == [0, 0] and held[2] in (1, 2) and held[-2:] == [0, 0]
    given = [0, 0, 2, 3, 3, 5, 5, 5]  # sampled ahead of their rewards, all may be outstanding
    assert all(0 <= n <= most for n, most in zip(held, given, strict=True))
    assert all(1 <= a["want"] <= 2 for a in server.asked)


def test_a_worker_does_not_ask_all_the_time():
    """It has other things to do than to ask for more after each group."""
    server = Script(policy(0), policy(0) | {"first": 0, "count": 2}, policies=W)
    run(server)
    assert len(server.asked) == 3


def test_a_worker_that_has_other_weights_than_the_trainer_does_not_sample():
    server = Script(policy(0), policies={0: W[1]})
    engine = run(
        server, expected=RuntimeError, match="policy 0 is loaded, but differs from the trainer's"
    )
    assert engine.used == [] and server.uploads == []


def test_a_worker_with_another_model_is_told_so():
    server = Script(policy(0), policies={0: torch.zeros(4)})
    run(server, expected=SystemExit, match="policy 0 does not fit MODEL here: .* another model")


def test_a_worker_with_other_constants_does_not_even_fetch():
    server = Script(policy(0), policies=W)
    recipe = a_recipe(RECIPE.prompts, temperature=0.5)
    run(server, recipe, SystemExit, "TEMPERATURE is 0.5 here, 1.0 there")
    assert server.fetched == []


def test_a_policy_that_is_gone_before_it_was_fetched_is_asked_for_anew():
    server = Script(policy(0), policy(1), policies={1: W[1]})
    run(server)
    assert server.fetched == [0, 1]
    assert [asked["version"] for asked in server.asked] == [-1, -1, 1]


def test_a_policy_that_the_server_deletes_before_it_is_loaded_is_asked_for_anew():
    server = Script(policy(0), policy(1), policies=W)
    fetch = server.fetch
    server.fetch = lambda record, path: fetch(record, path) if record["version"] else path
    run(server)
    assert [asked["version"] for asked in server.asked] == [-1, -1, 1]


def test_a_worker_waits_for_a_run_and_says_for_what(no_pause, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(
        stop_module.time, "monotonic", lambda: now.__setitem__(0, now[0] + 4) or now[0]
    )
    server = Script(*[{"policy": None}] * 99)
    server.limit = 60
    run(
        server, expected=RuntimeError, match="waited 60 s for a run .*no run has published a policy"
    )
    assert capsys.readouterr().err.count("waiting for a run to sample for") >= 3


def test_a_worker_waits_while_there_is_no_room(no_pause, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        stop_module.time, "monotonic", lambda: now.__setitem__(0, now[0] + 4) or now[0]
    )
    server = Script(policy(0), *[policy(0)] * 99, policies=W)
    server.limit = 60
    engine = run(
        server, expected=RuntimeError, match="as many groups wait .* as MAX_STALENESS allows"
    )
    assert engine.rests > 1  # another process of the device may have the memory


def test_an_upload_that_fails_ends_the_worker():
    server = Script(policy(0), policy(0) | {"first": 0, "count": 2}, policies=W)

    def call(*_, **__):
        raise RuntimeError("refused (400): rewards must be finite")

    server.call = call
    run(server, expected=RuntimeError, match="rewards must be finite")


def test_a_worker_says_what_it_did(capsys):
    server = Script(policy(0), policy(0) | {"first": 0, "count": 7}, policies=W)
    late = iter([True, False, True, False, False])
    plain = server.call

    def call(*arguments, **named):
        reply = plain(*arguments, **named).json()
        for answer in reply.get("groups", [reply]):
            answer["dropped"] = next(late)
        return SimpleNamespace(json=lambda: reply)

    server.call = call
    run(server)
    said = capsys.readouterr().err
    assert "policy 0 of run: 0.0 MB" in said and "differ from the trainer's by 0" in said
    assert "policy 0: 7 groups (2 flat, 2 too late)" in said and "7 groups in all" in said


# --- Trainer's side, server and worker together ------------------------------------
def test_a_worker_and_the_hub_get_along(hub_server, tmp_path, no_pause):
    """Two policies, room for five groups, and an end."""
    settings, store = RECIPE.settings(), hub_server.store

    def publish(version, **changes):
        safetensors.torch.save_file({"w": W[version]}, tmp_path / "w")
        hub_server.publish(tmp_path / "w", record_of(settings, version=version, **changes))

    publish(0, capacity=5)
    hub_server.limit = 0.2
    run(hub_server, expected=RuntimeError, match="as many groups wait .* as MAX_STALENESS allows")
    assert store.queued("run") == 5  # the flat ones, which stay at home, take no room
    stats = hub_server.stats()["workers"]["me"]
    assert (stats["held"], stats["version"]) == (0, 0)
    publish(1, capacity=14, oldest=1)  # all of version 0 are too old now
    assert store.queued("run") == 0
    run(hub_server, expected=RuntimeError, match="as many groups wait")
    groups = [unpack_group(body) for _, body in store.waiting(99, 0)]
    assert {g.policy_version for g in groups} == {1} and len(groups) >= 14
    assert all(OUTCOMES[g.item] is MIXED for g in groups)
    hub_server.call("POST", "/end", json={"run": "run"})
    run(hub_server, expected=RuntimeError, match="no run has published a policy")


def test_a_real_policy_reaches_a_worker_and_is_what_it_samples(tiny, hub_server):
    """PolicySender, hub, download, load and proof, with models: the worker's log-probs are those of
    the trainer's policy, plainly computed."""
    trainer, engine = tiny_policy(tiny, drift=0.02), tiny_policy(tiny)
    task = SimpleNamespace(rewards=lambda item, text: {"correctness": len(text) % 2, "format": 1.0})
    recipe = a_recipe(PROMPTS, task=task, group_size=4, sample_batch=8, skip_flat_groups=False)
    fixed = {"capacity": 3, "scored": False}
    sender = PolicySender(hub_server.copy(), "run", recipe, trainer, **fixed)
    sender.send(6, oldest=2)
    sender.finish()
    with pytest.raises(RuntimeError, match="as many groups wait"):
        worker.run_worker(engine, hub_server, recipe, "me")
    bodies = hub_server.store.lease("run", 9, seconds=60, patience=0)
    assert len(bodies) == 3
    for group in map(unpack_group, bodies.values()):
        assert group.policy_version == 6
        logps, ids = (group.completions(x) for x in (group.sampler_logps, group.completion_ids))
        for mine, completion in zip(logps, ids, strict=True):
            expected = trainer.logps(group.prompt_ids.tolist(), completion.tolist())
            torch.testing.assert_close(mine, torch.tensor(expected), rtol=0, atol=1e-5)


def test_over_a_slow_link_a_worker_samples_between_two_downloads(hub_server, tmp_path, no_pause):
    """While it fetches one policy another is published, each time; it would fetch for ever."""
    settings, fetch, versions = RECIPE.settings(), hub_server.fetch, iter(range(1, 6))

    def publish(version):
        safetensors.torch.save_file({"w": W[version]}, tmp_path / "w")
        record = record_of(settings, version=version, capacity=99, oldest=version - 4)
        hub_server.publish(tmp_path / "w", record)

    def slow_fetch(record, path):
        done = fetch(record, path)
        if (version := next(versions, None)) is None:
            raise Ended
        publish(version)
        return done

    hub_server.fetch = slow_fetch
    publish(0)
    run(hub_server)
    groups = [unpack_group(body) for _, body in hub_server.store.waiting(99, 0)]
    assert {g.policy_version for g in groups} == {1, 2, 3, 4}  # 0 is too old by now
