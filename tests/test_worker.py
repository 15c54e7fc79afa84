"""Workers: the policy arrives whole and is proved to, prompts are those given, groups are sent."""

import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import requests
import safetensors.torch
import torch
from test_sampler import tiny_model
from test_server import FakeReference, InProcess
from test_trainer import ALL_RIGHT, ALL_WRONG, MIXED, FakeEngine, a_recipe, prompts_of
from test_wire import Replies, reply
from transformers import AutoTokenizer

from grpo import client as client_module
from grpo import stop as stop_module
from grpo.client import RefServer
from grpo.proof import NOISE, check_proof, proof_of, sample_proof
from grpo.sampling import worker
from grpo.sampling.policy import ALL, load_policy
from grpo.sampling.rollout import Stream, tally_of
from grpo.serving.policies import Policies
from grpo.serving.store import Store
from grpo.training.publish import Publisher
from grpo.weights import load_weights, merge_adapters, trained_weights
from grpo.wire import unpack_bodies, unpack_group
from ref_server import make_app


@pytest.fixture
def no_pause(monkeypatch):
    """Of waits alone: other threads sleep, too."""
    fake = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(stop_module, "time", fake)


# --- Prompts ------------------------------------------------------------------------
def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own():
    prompts, order = list("abcdefg"), Stream(list("abcdefg"), seed=3)
    epochs = [[order[7 * epoch + at] for at in range(7)] for epoch in range(20)]
    assert all(sorted(epoch) == prompts for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 20 and prompts == list("abcdefg")
    other = Stream(prompts, seed=4)
    assert [other[at] for at in range(7)] != epochs[0]


def test_the_order_is_the_trainers_and_may_be_read_anywhere():
    """Positions come from the server: a worker sees some of them, back and forth."""
    prompts = list(range(10))
    order, alone = Stream(prompts, 5), Stream(prompts, 5, rank=0, world=1)
    expected = [next(alone) for _ in range(45)]
    positions = torch.randperm(45, generator=torch.Generator().manual_seed(0)).tolist()
    assert [order[at] for at in positions] == [expected[at] for at in positions]


# --- Settings -----------------------------------------------------------------------
def test_settings_are_the_same_after_a_journey_as_json():
    recipe = a_recipe(prompts_of([MIXED]))
    mine = recipe.settings()
    worker.check_settings(json.loads(json.dumps(mine)), mine)
    # What may differ: how many rows a machine has room for, and where it gives up
    other = a_recipe(prompts_of([MIXED]), sample_batch=8, max_refills=0).settings()
    worker.check_settings(other, mine)


@pytest.mark.parametrize(("name", "change"), [
    ("TASK", {"task_name": "gsm8k"}),
    ("GROUP_SIZE", {"group_size": 4}),
    ("MAX_PROMPT_TOKENS", {"max_prompt_tokens": 99}),
    ("MAX_COMPLETION_TOKENS", {"max_completion_tokens": 99}),
    ("TEMPERATURE", {"temperature": 0.9}),
    ("REWARD_WEIGHTS", {"reward_weights": {"correctness": 1.0, "format": 1.0}}),
    ("OUTCOME", {"outcome": "format"}),
    ("SEED", {"seed": 1}),
    ("prompts", {"prompts": prompts_of([MIXED, MIXED])}),
    ("prompts", {"prompts": [(0, {}, [5, 7])]}),  # another template, tokenizer or split
    ("prompts", {"prompts": [(1, {}, [5, 6])]}),
])  # fmt: skip
def test_a_worker_with_other_constants_is_told_which(name, change):
    theirs, fields = a_recipe(prompts_of([MIXED])).settings(), {"prompts": prompts_of([MIXED])}
    mine = a_recipe(**fields | change).settings()
    with pytest.raises(SystemExit, match=f"constants differ from the trainer's: {name}") as caught:
        worker.check_settings(json.loads(json.dumps(theirs)), mine)
    assert str(caught.value).count("here,") == 1  # and of no other


def test_a_trainer_that_does_not_tell_a_setting_has_another():
    mine = a_recipe().settings()
    theirs = {k: v for k, v in mine.items() if k != "SEED"}
    with pytest.raises(SystemExit, match="SEED is 0 here, None there"):
        worker.check_settings(theirs, mine)


# --- Proof --------------------------------------------------------------------------
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


def proof_by(policy):
    """-> a proof, as it comes over the wire."""
    recipe = a_recipe(PROMPTS, max_prompt_tokens=20, max_completion_tokens=64)
    return json.loads(json.dumps(proof_of(policy, *sample_proof(policy, recipe))))


def test_the_same_weights_prove_it_and_others_do_not(tiny):
    """simple_GRPO's vLLM process sampled with the initial weights, without a word."""
    trainer = tiny_policy(tiny, drift=0.02)
    record = {"version": 7, "proof": proof_by(trainer)}
    assert len(record["proof"]["logps"]) == 20 + 64 - 4  # as many as may be
    mine = tiny_policy(tiny)
    with pytest.raises(RuntimeError, match="policy 7 is loaded, but its log-probs differ"):
        check_proof(mine, record)
    mine.load(trained_weights(trainer.model))
    assert check_proof(mine, record) < 1e-6
    with torch.no_grad():
        mine.model.model.norm.weight[0] = torch.nan
    with pytest.raises(RuntimeError, match="differ from the trainer's by nan"):
        check_proof(mine, record)


def test_another_dtype_is_no_other_policy_and_one_stale_layer_is(tiny):
    """Measured: 1e-4 in bfloat16, and 0.04 with one layer off by as much as the drift."""
    trainer, coarse = tiny_policy(tiny), tiny_policy(tiny, "bfloat16")
    record = {"version": 0, "proof": proof_by(trainer)}
    gap = check_proof(coarse, record)
    assert NOISE["float32"] < gap < NOISE["bfloat16"] / 2
    move(coarse.model.model.layers[1], 0.1)
    with pytest.raises(RuntimeError, match="limit 0.01"):
        check_proof(coarse, record)


@pytest.mark.parametrize("sd, passes", [(0.055, True), (0.084, True), (0.3, False)])
def test_noise_of_published_sizes_is_no_other_policy(sd, passes, tiny):
    """sd 0.055: Qwen2.5-0.5B in bfloat16; 0.084: mean |d| 0.067, a mixture of experts in FP8."""
    policy = tiny_policy(tiny, "bfloat16")
    record = {"version": 0, "proof": proof_by(policy)}
    torch.manual_seed(0)
    exact = policy.logps
    policy.logps = lambda *text: [p + sd * torch.randn(()).item() for p in exact(*text)]
    if passes:
        assert check_proof(policy, record) > 1e-3
    else:
        with pytest.raises(RuntimeError, match="limit 0.01"):
            check_proof(policy, record)


def test_the_text_of_the_proof_is_the_policys_own_and_sampled_once(tiny, monkeypatch):
    policy, post = tiny_policy(tiny), Post()
    publisher = Publisher(post, "run", a_recipe(PROMPTS), policy, capacity=9, scored=True)
    for version in range(2):
        publisher.publish(version, oldest=0)
        publisher.finish()
        move(policy.model, 0.02)
        monkeypatch.setattr(policy, "continuation", None)
    first, second = (record["proof"] for _, record in post.got)
    assert first["prompt"] == second["prompt"] == PROMPTS[0][2]
    assert first["completion"] == second["completion"] and first["logps"] != second["logps"]
    strange = policy.logps(PROMPTS[0][2], PROMPTS[-1][2])
    assert sum(first["logps"]) / len(first["logps"]) > sum(strange) / len(strange)


# --- Publisher ----------------------------------------------------------------------
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


def test_what_is_published_is_the_policy_as_it_was(tiny):
    """The trainer's next step changes the weights while they are on their way."""
    policy, post = tiny_policy(tiny), Post()
    recipe = a_recipe(PROMPTS)
    publisher = Publisher(post, "run", recipe, policy, capacity=9, scored=True)
    before = trained_weights(policy.model)
    post.ready.clear()
    publisher.publish(3, oldest=-1)
    move(policy.model, 0.05)
    assert post.got == []  # training has gone on meanwhile
    post.ready.set()
    publisher.publish(4, oldest=0)
    publisher.finish()
    (first, record), (second, later) = post.got
    assert first.keys() == before.keys()
    assert all(torch.equal(first[name], before[name]) for name in before)
    assert all(torch.equal(second[n], p) for n, p in trained_weights(policy.model).items())
    proof = record.pop("proof")
    assert record == {
        "run": "run",
        "version": 3,
        "oldest": -1,
        "capacity": 9,
        "scored": True,
        "settings": recipe.settings(),
    }
    assert (later["version"], later["oldest"]) == (4, 0)
    mine = tiny_policy(tiny)
    assert check_proof(mine, {"version": 3, "proof": proof}) < 1e-6
    with pytest.raises(RuntimeError):
        check_proof(mine, later)


def test_a_policy_that_could_not_be_sent_ends_the_run(tiny):
    post = Post()
    publisher = Publisher(
        post, "run", a_recipe(PROMPTS), tiny_policy(tiny), capacity=9, scored=True
    )
    publisher.finish()  # nothing was begun
    post.error = RuntimeError("refused (400): SHA-256 differs")
    publisher.publish(0, oldest=0)
    with pytest.raises(RuntimeError, match="SHA-256 differs"):
        publisher.publish(1, oldest=0)
    with pytest.raises(RuntimeError, match="SHA-256 differs"):
        publisher.finish()


def test_a_lora_policy_sends_its_adapters_alone(tiny):
    policy, post = tiny_policy(tiny, lora_rank=2), Post()
    publisher = Publisher(post, "run", a_recipe(PROMPTS), policy, capacity=9, scored=True)
    publisher.publish(0, oldest=0)
    publisher.finish()
    assert all(".lora_" in name for name in post.got[0][0]) and len(post.got[0][0]) == 28


# --- Weights ------------------------------------------------------------------------
def test_weights_that_do_not_fit_change_nothing():
    model, good = tiny_model("qwen2"), trained_weights(tiny_model("qwen2", seed=1))
    name, before = "model.layers.1.mlp.up_proj.weight", trained_weights(model)
    for bad, reason in (
        ({k: v for k, v in good.items() if k != name}, "another model, or another LORA_RANK"),
        (good | {"extra.weight": torch.zeros(1)}, "extra.weight"),
        (good | {name: good[name][:-1]}, f"{name} is .63, 32., not .64, 32."),
    ):
        with pytest.raises(ValueError, match=reason):
            load_weights(model, bad)
        now = trained_weights(model)
        assert all(torch.equal(now[k], before[k]) for k in before)
    load_weights(model, good)
    assert all(torch.equal(v, good[k]) for k, v in trained_weights(model).items())


def test_a_frozen_model_takes_all_and_in_its_own_dtype():
    """The reference: nothing of it is trained. And a worker may be in bfloat16."""
    model, good = tiny_model("gpt2"), trained_weights(tiny_model("gpt2", seed=1))
    model.requires_grad_(False)
    model.bfloat16()
    load_weights(model, good)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, good[name].bfloat16()), name
    with pytest.raises(ValueError, match="another model"):
        load_weights(model, {})


def with_adapters(model, rank=4):
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL))
    move(model, 0.1)  # B, too, which starts as 0
    return model


def test_adapters_travel_to_a_model_with_adapters():
    mine, theirs = (with_adapters(tiny_model("qwen2")) for _ in range(2))
    move(theirs, 0.1)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert (mine(ids).logits - theirs(ids).logits).abs().max() > 0.1
    load_weights(mine, trained_weights(theirs))
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    with pytest.raises(ValueError, match="another LORA_RANK"):
        load_weights(mine, trained_weights(tiny_model("qwen2")))
    with pytest.raises(ValueError, match="is .2, 32., not .4, 32."):
        load_weights(mine, trained_weights(with_adapters(tiny_model("qwen2"), rank=2)))


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llama", "opt"])
def test_merged_adapters_compute_what_the_model_with_adapters_does(family):
    """W + 2 B A. GPT-2 has its matrices transposed, the square ones too."""
    ids, adapted = torch.tensor([[3, 4, 5, 6, 7, 8]]), with_adapters(tiny_model(family))
    expected = adapted(ids).logits
    base = tiny_model(family)
    assert (base(ids).logits - expected).abs().max() > 0.1
    tensors = trained_weights(adapted)
    merged = merge_adapters(base, tensors)
    load_weights(base, merged)
    # Measured: 6e-6 at most
    torch.testing.assert_close(base(ids).logits, expected, rtol=0, atol=5e-5)


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no layer model.layers.0.self_attn.q_proj"):
        merge_adapters(tiny_model("gpt2"), trained_weights(with_adapters(tiny_model("qwen2"))))


def test_adapters_from_a_file_are_merged_on_the_models_device():
    """A file is read to the CPU, and the reference may be on a GPU: "meta" stands for it."""
    tensors = trained_weights(with_adapters(tiny_model("qwen2")))
    merged = merge_adapters(tiny_model("qwen2").to("meta"), tensors)
    assert all(tensor.device.type == "meta" for tensor in merged.values())


# --- Download -----------------------------------------------------------------------
WEIGHTS = bytes(range(256)) * 40


def policy_record(weights=WEIGHTS, version=3, **changes):
    facts = {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return {"run": "the run", "version": version} | facts | changes


class Cutting:
    """An HTTP server that knows Range, and cuts each connection after so many bytes."""

    def __init__(self, weights, cuts):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.heads = []
        threading.Thread(target=self.run, args=(weights, cuts), daemon=True).start()

    def run(self, weights, cuts):
        for cut in cuts:
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as request:
                head = b"".join(iter(request.readline, b"\r\n")).decode()
                self.heads.append(head)
                start = int(head.split("Range: bytes=")[1].split("-")[0])
                if cut is not None:  # None: hangs up without a word
                    body = weights[start:]
                    connection.sendall(reply(206, body[:cut], length=len(body)))
        self.socket.close()


def test_a_download_goes_on_where_the_connection_broke(no_pause, tmp_path):
    weights = random.Random(0).randbytes(5 << 20)
    server = Cutting(weights, [5 << 19, None, 0, 5 << 19, 5 << 20])
    path = tmp_path / "policy"
    path.write_bytes(b"of a former policy")
    assert RefServer(server.url, 20).fetch(policy_record(weights), path)
    assert path.read_bytes() == weights
    assert all(head.startswith("GET /policy?run=the+run&version=3 ") for head in server.heads)
    starts = [int(head.split("Range: bytes=")[1].split("-")[0]) >> 20 for head in server.heads]
    assert starts == [0, 2, 2, 2, 4]  # in MiB: a part of that size may be lost


def test_a_policy_that_is_gone_is_no_error(tmp_path):
    """A newer one has come: the worker asks for that."""
    server = Replies(reply(404, b"{}"))
    assert not RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy")


def test_a_damaged_download_is_an_error(tmp_path):
    damaged = bytearray(WEIGHTS)
    damaged[5000] ^= 1
    server = Replies(reply(206, bytes(damaged)))
    with pytest.raises(RuntimeError, match="policy 3 was damaged on its way"):
        RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy")


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_server_that_answers_otherwise_is_an_error(tmp_path, status):
    """Also one that knows no Range: what has come would be doubled."""
    server = Replies(reply(status, WEIGHTS))
    with pytest.raises(RuntimeError, match=f"GET /policy: {status}"):
        RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy")


def test_a_download_from_nowhere_ends_with_a_sentence(tmp_path):
    server = Replies()  # listens, and hangs up
    with pytest.raises(RuntimeError, match="waited 0.2 s for policy 3 from .*the connection broke"):
        RefServer(server.url, 0.2).fetch(policy_record(), tmp_path / "policy")


def test_a_policy_goes_up_in_parts_and_comes_down_as_it_was(hub_server, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "PART_BYTES", 3000)
    (tmp_path / "sent").write_bytes(WEIGHTS)
    record = record_of({}, version=1)
    hub_server.publish(tmp_path / "sent", record)
    parts = [query["offset"] for method, query in hub_server.asked if method == "PUT"]
    assert parts == [0, 3000, 6000, 9000]
    assert record["bytes"] == len(WEIGHTS) and hub_server.hub.record() == record
    assert hub_server.fetch(record, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == WEIGHTS


@pytest.mark.parametrize("lost", range(5))
def test_a_policy_arrives_though_an_answer_was_lost(
    hub_server, tmp_path, monkeypatch, no_pause, lost
):
    """Each request in turn is carried out, and its answer does not come."""
    monkeypatch.setattr(client_module, "PART_BYTES", 3000)
    (tmp_path / "sent").write_bytes(WEIGHTS)
    plain, count = hub_server.session.request, iter(range(99))

    def request(*arguments, **named):
        answer = plain(*arguments, **named)
        if next(count) == lost:
            raise requests.ConnectionError
        return answer

    hub_server.session.request = request
    hub_server.publish(tmp_path / "sent", record_of({}, version=1))
    assert hub_server.hub.path("run", 1).read_bytes() == WEIGHTS


# --- The worker ---------------------------------------------------------------------
class Ended(Exception):
    pass


class Engine(FakeEngine):
    """Its policy is one vector, `w`; it proves to have it by giving it away."""

    dtype = "float32"

    def __init__(self):
        super().__init__()
        self.w, self.used = torch.zeros(3), []

    def load(self, tensors):
        if tensors["w"].shape != self.w.shape:
            raise ValueError("the weights are of another model: w")
        self.w = tensors["w"]

    def logps(self, prompt, completion):
        assert (prompt, completion) == ([1, 2], [3, 4, 5])
        return self.w.tolist()

    def stream(self, take, **settings):
        self.used.append((self.w.tolist(), settings["seed"]))
        return super().stream(take, **settings)


class Script:
    """A server whose answers to /work are written down; the last question ends the worker."""

    url, limit = "http://script", 5

    def __init__(self, *answers, regroups=False, policies=()):
        self.answers, self.regroups, self.policies = list(answers), regroups, policies
        self.asked, self.uploads, self.fetched = [], [], []

    def twin(self):
        return self

    def work(self, name, **asked):
        self.asked.append(asked)
        if not self.answers:
            raise Ended
        return {"first": 0, "count": 0} | self.answers.pop(0)

    def fetch(self, record, path):
        self.fetched.append(record["version"])
        if record["version"] not in self.policies:
            return False
        safetensors.torch.save_file({"w": self.policies[record["version"]]}, path)
        return True

    def call(self, method, path, *, data, params):
        assert (method, path) == ("POST", "/upload")
        several = params.get("several")
        bodies = unpack_bodies(data).values() if several else [data]
        self.uploads += [(unpack_group(body), params["pool"]) for body in bodies]
        answers = [{"stored": True} for _ in bodies]
        return SimpleNamespace(json=lambda: {"groups": answers} if several else answers[0])


W = {version: torch.arange(3.0) - 5 - version for version in range(9)}
OUTCOMES = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED]
RECIPE = a_recipe(prompts_of(OUTCOMES), sample_batch=4)


def record_of(settings, *, version=0, logps=None, **changes):
    proof = {"prompt": [1, 2], "completion": [3, 4, 5], "dtype": "float32"}
    proof["logps"] = (W[version] if logps is None else logps).tolist()
    record = {"run": "run", "version": version, "bytes": 99, "sha256": "", "settings": settings}
    return record | {"proof": proof, "capacity": 9, "oldest": 0, "scored": True} | changes


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
    groups = [group for group, _ in server.uploads]
    assert [g.item for g in groups] == in_order(0, 1, 9)
    assert [g.policy_version for g in groups] == [0, 0, 3]
    assert {(g.run, g.sampler, g.outcome) for g in groups} == {("run", "me", "correctness")}
    assert len({g.id for g in groups}) == 3 and all(pool == 0 for _, pool in server.uploads)
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


@pytest.mark.parametrize("regroups", [False, True])
def test_flat_groups_are_pooled_or_stay_at_home(regroups):
    answers = policy(0), policy(0) | {"first": 0, "count": 7}
    server = Script(*answers, regroups=regroups, policies=W)
    run(server)
    flat = {OUTCOMES.index(ALL_WRONG), OUTCOMES.index(ALL_RIGHT)}
    sent = {group.item: pool for group, pool in server.uploads}
    assert sent == {i: int(i in flat) for i in range(7) if regroups or i not in flat}
    assert len(server.uploads) == len(sent)


@pytest.mark.parametrize("regroups", [False, True])
def test_what_is_left_out_is_counted_with_the_next_group(regroups):
    """So the trainer's accuracy is of all that was sampled, also over two rollouts."""
    first, second = {"first": 0, "count": 4}, {"first": 4, "count": 3}
    answers = policy(0), policy(0) | first, policy(0) | second
    server = Script(*answers, regroups=regroups, policies=W)
    run(server)
    sent, count = [group for group, pool in server.uploads if not pool], Counter()
    for group in sent:
        count.update(tally_of(RECIPE, group))
    kept = [OUTCOMES[i] is MIXED for i in in_order(*range(7))]
    assert kept[-1] and not all(kept[:4]) and count["groups"] == 7 and count["flat"] == 2
    assert count["completions"] == 14 and count["right"] == 5 + 2
    assert all(not group.skipped for group, pool in server.uploads if pool)
    assert sum(bool(group.skipped) for group in sent) in (1, 2)


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
    assert Counter(g.item for g, _ in server.uploads) == positions - Counter(flat)
    held = [asked["held"] for asked in server.asked]
    # Two in hand, one has ended, and its upload may have been answered; and one more is begun ...
    assert held[:2] == [0, 0] and held[2] in (1, 2) and held[-2:] == [0, 0]
    assert all(0 <= n <= 4 for n in held) and all(1 <= a["want"] <= 2 for a in server.asked)


def test_a_worker_does_not_ask_all_the_time():
    """It has other things to do than to ask for more after each group."""
    server = Script(policy(0), policy(0) | {"first": 0, "count": 2}, policies=W)
    run(server)
    assert len(server.asked) == 3


def test_a_worker_that_has_other_weights_than_the_trainer_does_not_sample():
    server = Script(policy(0), policies={0: W[1]})
    engine = run(
        server, expected=RuntimeError, match="policy 0 is loaded, but its log-probs differ"
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
    run(server, expected=RuntimeError, match="as many groups wait .* as MAX_STALENESS allows")


def test_an_upload_that_fails_ends_the_worker():
    server = Script(policy(0), policy(0) | {"first": 0, "count": 2}, policies=W)

    def call(*_, **__):
        raise RuntimeError("refused (400): rewards must be finite")

    server.call = call
    run(server, expected=RuntimeError, match="rewards must be finite")


def test_a_worker_says_what_it_did(capsys):
    server = Script(policy(0), policy(0) | {"first": 0, "count": 7}, regroups=True, policies=W)
    late = iter([True, False, True, False, False, False, False])
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


# --- Trainer's side, server and worker together ---------------------------------------
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
    app = make_app(store, hub, FakeReference(), regroup=True, **settings)
    client = Noting(app, limit=0.2)
    client.store, client.hub, client.regroups = store, hub, True
    yield client
    store.db.close()


def test_a_worker_and_the_hub_get_along(hub_server, tmp_path, no_pause):
    """Two policies, room for five groups, flat ones joined, and an end."""
    settings, store = RECIPE.settings(), hub_server.store

    def publish(version, **changes):
        safetensors.torch.save_file({"w": W[version]}, tmp_path / "w")
        hub_server.publish(tmp_path / "w", record_of(settings, version=version, **changes))

    publish(0, capacity=5)
    hub_server.limit = 0.2
    run(hub_server, expected=RuntimeError, match="as many groups wait .* as MAX_STALENESS allows")
    assert store.queued("run") == 5  # and the flat ones make no room: they are pooled, not queued
    stats = hub_server.stats()["workers"]["me"]
    assert (stats["held"], stats["version"]) == (0, 0)
    publish(1, capacity=14, oldest=1)  # all of version 0 are too old now
    assert store.queued("run") == 0
    run(hub_server, expected=RuntimeError, match="as many groups wait")
    groups = [unpack_group(body) for _, body in store.waiting(99, 0)]
    assert {g.policy_version for g in groups} == {1} and len(groups) >= 14
    assert not any(g.flat for g in groups)
    hub_server.call("POST", "/end", json={"run": "run"})
    run(hub_server, expected=RuntimeError, match="no run has published a policy")


def test_a_real_policy_reaches_a_worker_and_is_what_it_samples(tiny, hub_server):
    """Publisher, hub, download, load and proof, with models: the worker's log-probs are those of
    the trainer's policy, plainly computed."""
    trainer, engine = tiny_policy(tiny, drift=0.02), tiny_policy(tiny)
    task = SimpleNamespace(rewards=lambda item, text: {"correctness": len(text) % 2, "format": 1.0})
    recipe = a_recipe(PROMPTS, task=task, group_size=4, sample_batch=8, skip_flat_groups=False)
    fixed = {"capacity": 3, "scored": False}
    publisher = Publisher(hub_server.twin(), "run", recipe, trainer, **fixed)
    publisher.publish(6, oldest=2)
    publisher.finish()
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
