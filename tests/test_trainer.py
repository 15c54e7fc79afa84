"""The trainer's step: sequences, the first update, updates that fail."""

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from fakes import (
    a_group,
    a_recipe,
    a_run,
    loss_of,
    means_of,
    move,
    sampled,
    tiny_policy,
    totalled,
)

import grpo_ref_split as trainer
from grpo import checkpoint, engine, logp_checks
from grpo.logp_checks import TILT, check_reference, check_sampler
from grpo.policy import NOISE
from grpo.rollout import skip_if_flat
from grpo.run import Progress
from grpo.sample import keep_logps
from grpo.wire import group_of, pack_group, read_group

MIXED = [[1.0, -1.0], [-1.0, -1.0]]


def rows_of(*groups, step=0, **constants):
    recipe = a_recipe(**constants)
    trainer.set_advantages(recipe.c, groups)
    return trainer.samples_to_train(recipe.c, groups, step)


def advantages_of(group, **constants):
    trainer.set_advantages(a_recipe(**constants).c, [group])
    return [sample.advantage for sample in group.samples]


@pytest.mark.parametrize("level, step", [
    (3e8, 1), (2e7, 1), (-3e8, 1), (1e12, 1), (1e13, 1), (-1e9, 0.5), (0, 1e-7), (1e6, 1e-3),
    (0, 1e-12), (5, 1e-6), (1, 1e-9), (1e-20, 1e-22),
])  # fmt: skip
def test_differences_of_rewards_count_at_any_level(level, step):
    """Here and from a worker: not if they are float32 before the mean."""
    rewards = [[level + n * step, 0.0] for n in range(3)]
    group = a_group(rewards, lengths=(1, 1, 1), truncated=(False,) * 3)
    sent = totalled(a_recipe(), group_of(*read_group(pack_group(group))))
    for each in (group, sent):
        skip_if_flat(a_recipe().c, each)
        found = advantages_of(each, ADVANTAGE_STD=False)
        assert not each.skipped and found == pytest.approx([-2 * step, 0, 2 * step], rel=1e-6)


# --- Rows --------------------------------------------------------------------------
def test_rows_by_hand():
    rows = rows_of(a_group(MIXED), ADVANTAGE_STD=False)
    assert [row.ids for row in rows] == [[10, 11, 12], [13]]
    assert [row.group.prompt for row in rows] == [[5, 6]] * 2
    assert [row.advantage for row in rows] == [2.0, -2.0]  # 1 and -3, less their mean -1
    assert [row.logps for row in rows] == [[-1, -2, -3], [-4]]
    assert [row.weight for row in rows] == pytest.approx([1 / 6, 1 / 2])  # 1 / (2 sequences x T)


def test_truncated_rows_count_in_the_mean_and_are_not_trained():
    group = a_group(MIXED, truncated=(True, False))
    masked = {"ADVANTAGE_STD": False, "MASK_TRUNCATED": True}
    (row,) = rows_of(group, **masked)
    assert row.ids == [13] and row.advantage == -2.0
    assert row.weight == pytest.approx(1 / 2)  # of 2 sequences, the cut one included (as in TRL)
    assert rows_of() == rows_of(a_group(MIXED, truncated=(True, True)), **masked) == []  # no 0 / 0
    assert len(rows_of(group)) == 2


def test_advantages_are_of_the_rewards_that_apply():
    """A completion that no reward judges counts in no mean, and its advantage is 0."""
    nan, three = float("nan"), {"lengths": (1, 1, 1), "truncated": (False,) * 3}
    group = a_group([[1.0, nan], [nan, nan], [nan, -1.0]], **three)
    assert advantages_of(group, ADVANTAGE_STD=False) == [1.5, 0, -1.5]  # of 2 and -1
    for rewards in ([[nan, nan]] * 3, [[1.0, 1.0], [nan, nan], [nan, nan]]):
        assert advantages_of(a_group(rewards, **three)) == [0, 0, 0]


def test_whose_log_probs_are_the_old_ones():
    """On-policy the first update's, which cost nothing; of another policy the sampler's."""
    ours, old = a_group(MIXED, version=5), a_group(MIXED, version=4, sampler="a slow worker")
    theirs = a_group(MIXED, version=5, sampler="worker")

    rows = trainer.samples_to_train(a_recipe().c, [ours, ours], 5)
    assert all(row.on_policy and row.old_logps is None and not row.ratio_cap for row in rows)
    for other in (old, theirs):
        for groups in ([ours, other], [other, ours]):
            rows = trainer.samples_to_train(a_recipe().c, groups, 5)
            assert all(row.old_logps == row.logps and row.ratio_cap == 2.0 for row in rows)
            assert sum(row.on_policy for row in rows) == (2 if other is old else 4)


# --- The update ----------------------------------------------------------------------
def test_backward_and_optimiser_have_the_ranks_share_of_the_cores(alone, monkeypatch):
    """torchrun leaves each rank one thread, with which an offloaded update would take its time."""
    seen, before = [], torch.get_num_threads()
    noted = lambda value: lambda *_, **__: seen.append(torch.get_num_threads()) or value
    monkeypatch.setattr(trainer, "accumulate", noted({"loss": 0.0}))
    monkeypatch.setattr(trainer, "take_step", noted({"grad_norm": 1.0}))
    monkeypatch.setattr(engine, "training_threads", lambda: before + 1)
    run = a_run(a_recipe(), engine=SimpleNamespace(module=SimpleNamespace(head=None)))
    run.policy = SimpleNamespace(dtype="float32")
    run.reference = SimpleNamespace(info={"model": "tiny"})
    checks = []
    monkeypatch.setattr(logp_checks, "check_sampler", lambda *given: checks.append(given[2]))
    for sampler in ("trainer", "worker"):
        trainer.update(run, [SimpleNamespace(group=SimpleNamespace(sampler=sampler))], 1)
    assert seen == [before + 1] * 4 and torch.get_num_threads() == before
    assert checks == [False, True]  # a worker may sample in bfloat16


# --- The checks --------------------------------------------------------------------
GOOD = {"loss": 0.0, "sampler_k3": 1e-13, "sampler_tilt": 1e-6}
SAME = {"model": "ours", "dtype": "float32"}


@pytest.mark.parametrize("metrics, dtype, options, error", [
    (GOOD, "float32", {}, None),
    (GOOD | {"sampler_k3": 1e-5}, "float32", {}, "trainer and sampler"),
    (GOOD | {"sampler_k3": math.nan}, "float32", {}, "trainer and sampler"),
    # It will be skipped
    (GOOD | {"sampler_k3": math.nan, "loss": math.nan}, "float32", {}, None),
    (GOOD | {"sampler_tilt": -0.05}, "bfloat16", {}, "0.950 times"),
    ({"loss": 0.0}, "float32", {}, None),  # of a rollout's later updates
    ({"loss": 0.0, "sampler_k3": 3.5e-3}, "bfloat16", {}, None),
    # Models without a plain head (Gemma 2, Cohere) have bfloat16 logits: no other temperature
    (GOOD | {"sampler_tilt": 0.05}, "bfloat16", {"rounded": True}, None),
    (GOOD | {"sampler_k3": 1e-4}, "float32", {"by_workers": True}, None),  # in another dtype
])  # fmt: skip
def test_a_run_stops_if_its_sampler_has_other_log_probs(metrics, dtype, options, error):
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        check_sampler(metrics, SimpleNamespace(noise=NOISE[dtype]), **options)


@pytest.mark.parametrize("metrics, reference, error", [
    ({"kl": 1e-9}, SAME, None),
    ({"kl": 9e-4}, SAME, "reference.* ours"),
    # A reference in bfloat16 differs by that much; another model by any amount
    ({"kl": 9e-4}, SAME | {"dtype": "bfloat16"}, None),
    ({"kl": 9e-4}, SAME | {"model": "larger"}, None),
    ({}, {"model": None}, None),  # KL_BETA is 0
])  # fmt: skip
def test_a_run_stops_if_its_reference_begins_with_other_weights(metrics, reference, error):
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        check_reference(metrics, "float32", reference, model="ours")


PLAIN = {"KL_BETA": 0}


def first_update(policy, sampler, *, temperature=1.0, noise=0.0):
    """-> the metrics of an update on what `sampler` has sampled, with noise in its log-probs."""
    task = SimpleNamespace(
        rewards=lambda item, text: {"correctness": float(len(text) % 3), "format": 1.0}
    )
    prompts = [(i, {"answer": "4"}, [5 + i, 6, 7]) for i in range(32)]
    recipe, torch_seed = a_recipe(task=task, GROUP_SIZE=4), torch.manual_seed(0)
    groups = sampled(sampler, recipe.others(TEMPERATURE=temperature), prompts)
    for sample in [sample for group in groups for sample in group.samples]:
        noises = noise * torch.randn(len(sample.logps), generator=torch_seed)
        sample.logps = (torch.tensor(sample.logps) + noises).tolist()
    loss, stats = loss_of(policy, rows_of(*groups, **PLAIN), **PLAIN)
    metrics = means_of(loss, stats)
    del metrics["kl"]  # KL_BETA is 0
    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_tells_noise_from_a_wrong_sampler(dtype, tiny, alone):
    """Sampled at 0.9 with log-probs at 1.0, a ratio looked like 1 and was not. At 1.05 the gap is
    smaller than bfloat16's noise, and shows in the slope alone."""
    policy = tiny_policy(tiny, dtype)
    check = functools.partial(check_sampler, sampler=SimpleNamespace(noise=NOISE[dtype]))
    check(first_update(policy, policy))
    noises = [0.055, 0.084] if dtype == "bfloat16" else []  # published: see grpo.policy.NOISE
    for noise in noises:
        metrics = first_update(policy, policy, noise=noise)
        assert metrics["sampler_k3"] > 1e-3 and abs(metrics["sampler_tilt"]) < TILT / 2
        check(metrics)
    for temperature in (0.95, 1.05):
        for noise in [0.0, *noises]:
            metrics = first_update(policy, policy, temperature=temperature, noise=noise)
            assert metrics["sampler_tilt"] == pytest.approx(temperature - 1, abs=0.015)
            with pytest.raises(RuntimeError, match="sampler"):
                check(metrics)
    stale = tiny_policy(tiny, dtype)
    move(stale.model.model.layers[1], 0.1)
    with pytest.raises(RuntimeError, match="trainer and sampler"):
        check(first_update(policy, stale))


def test_old_log_probs_are_those_of_the_first_update_and_get_no_gradient(tiny, alone):
    policy, own = tiny_policy(tiny), {"KL_BETA": 0, "IS_CAP": 0}  # the logps are made up
    rows = rows_of(a_group(MIXED), **own)
    loss, stats = loss_of(policy, rows, **own)
    assert abs(loss.item()) < 1e-6  # the advantages sum to 0, and each sequence weighs the same
    gradient = torch.autograd.grad(loss, list(policy.model.parameters()))
    assert sum(g.norm() for g in gradient) > 1e-3  # and yet it learns: exp(logp - detached)
    keep_logps(rows, stats["logps"])
    assert not any(row.on_policy for row in rows)
    assert [p for row in rows for p in row.old_logps] == stats["logps"].tolist()
    move(policy.model, 0.05)
    loss, stats = loss_of(policy, rows, **own)
    assert abs(means_of(loss, stats)["ratio"] - 1) > 1e-3
    keep_logps(rows, stats["logps"])  # the old ones stay
    assert means_of(*loss_of(policy, rows, **own))["ratio"] == means_of(loss, stats)["ratio"]
    rows[1].old_logps = None  # the first update was another rank's
    with pytest.raises((TypeError, RuntimeError)):  # torch's
        loss_of(policy, rows, **own)


def test_a_workers_tokens_are_bounded_where_their_probability_grew_too_much(tiny, alone):
    """A sampler that found its tokens far less likely than the trainer does: IS_CAP."""
    policy, c = tiny_policy(tiny), a_recipe().c
    group = a_group(MIXED, sampler="worker")
    for sample in group.samples:
        sample.logps = [p - 20 for p in sample.logps]  # ratios of e^10 and more

    rows = rows_of(group, KL_BETA=0)
    loss, stats = loss_of(policy, rows, KL_BETA=0)
    assert means_of(loss, stats)["sampler_ratio_max"] > 1e4
    slope = sum(g.norm() for g in torch.autograd.grad(loss, list(policy.model.parameters())))
    # Their log-probs are the old ones: the ratio is cut at 1.2 for A > 0, at IS_CAP for A < 0, and
    # neither has a gradient; each sequence weighs a half
    right, wrong = (row.advantage for row in rows)
    expected = -(1 + c.CLIP_HIGH) * right / 2 - c.IS_CAP * wrong / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5) and slope == 0


@pytest.mark.parametrize("best", [2, 1])
def test_a_checkpoint_that_was_saved_before_it_was_evaluated_is_the_best(
    alone, monkeypatch, tmp_path, best
):
    """A run that was stopped during an evaluation resumes with it."""
    progress = Progress("run", step=2, saved=2, best=1)
    monkeypatch.setattr(trainer, "evaluate_if_due", lambda run: setattr(progress, "best", best))
    for step in (1, 2):
        (tmp_path / f"step_{step:06d}").mkdir()
    checkpoint.point(tmp_path, "best", 1)
    c = a_recipe(RUN_DIR=str(tmp_path), STEPS=2).c
    trainer.train(SimpleNamespace(progress=progress, c=c))
    assert (tmp_path / "best").resolve().name == f"step_{best:06d}"
    assert (tmp_path / "final").resolve().name == "step_000002"
