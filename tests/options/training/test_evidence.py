"""An update that fails a check leaves its samples, from which the cause can be read."""

import functools
import json
import math
from types import SimpleNamespace

import pytest
from fakes import a_recipe, move, sampled, tiny_policy
from rank_threads import Ranks

import grpo_ref_split as trainer
from grpo import chunked
from grpo.forward import CompletionModel
from grpo.metrics import TokenStats
from grpo.options.training.evidence import size_of, skip_step, summary, tokens_of
from grpo.proof import NOISE, check_gap, check_sampler
from grpo.ranks import RunFailed
from grpo.report import RunFolder, check_update, leaving_evidence
from grpo.resume import Progress
from grpo.sample import Sample, keep_logps

CONSTANTS = {"GROUP_SIZE": 4, "MAX_COMPLETION_TOKENS": 48, "KL_BETA": 0}
PROMPTS = [(i, {}, [5 + i, 6, 7, 8, 9, 10, 11, 12]) for i in range(16)]
TASK = SimpleNamespace(rewards=lambda item, text: {"correctness": len(text) % 3, "format": 1.0})


def samples_of(sampler, prompts=PROMPTS, **constants):
    """-> the samples that an update trains."""
    recipe = a_recipe(task=TASK, **CONSTANTS | constants)
    groups = sampled(sampler, recipe, prompts)
    trainer.set_advantages(recipe, groups)
    return trainer.samples_to_train(recipe, groups, 0)[0]


def updated(policy, samples, **constants):
    """-> the metrics of a forward pass of one rank, which keeps its log-probs."""
    model, c = CompletionModel(policy.model), a_recipe(**CONSTANTS | constants).c
    hidden, ids = model([s.prompt for s in samples], [s.ids for s in samples])
    loss, stats = trainer.batch_loss(c, hidden, model.head, ids, samples, policy.vocab_size)
    means = TokenStats("cpu")
    means.add(loss, stats)
    keep_logps(samples, stats["logps"], first=True)
    return means.over_ranks()


def a_run(policy, folder, **constants):
    c, progress = a_recipe(**CONSTANTS | constants).c, Progress("run", step=7)
    return SimpleNamespace(c=c, policy=policy, folder=RunFolder(folder), progress=progress)


def evidence(folder):
    (path,) = folder.glob("bad_step_*.json")
    return json.loads(path.read_text())


# --- The table of docs/troubleshooting.md, "Read the evidence" --------------------------
def gaps_of(policy, samples):
    """-> the summary of an update that check_sampler refuses."""
    with pytest.raises(RuntimeError, match="trainer and sampler"):
        check_sampler(updated(policy, samples), SimpleNamespace(noise=NOISE["float32"]))
    return summary(samples, "sampler")


def is_even(gaps):
    """Whether all quarters have the same gap, up to a third, and most tokens have one."""
    low, high = min(gaps["quarters"]), max(gaps["quarters"])
    return high < 1.34 * low and gaps["largest"] < 30 * gaps["median"]


def test_other_weights_move_every_token_by_more_than_rounding(tiny, alone):
    other = tiny_policy(tiny)
    move(other.model.model.layers[1], 0.1)
    gaps = gaps_of(tiny_policy(tiny), samples_of(other))
    assert is_even(gaps) and gaps["median"] > 0.1 and gaps["mean"] < -0.1  # 0.6, -0.4


def test_another_dtype_moves_every_token_by_rounding(tiny, alone):
    """And not in float32: weights that are an update old would move them there, too."""
    policy = tiny_policy(tiny)
    gaps = gaps_of(policy, samples_of(tiny_policy(tiny, "bfloat16")))
    assert is_even(gaps) and 0.01 < gaps["median"] < 0.05 and abs(gaps["mean"]) < 0.01
    same = samples_of(policy)
    updated(policy, same)
    assert summary(same, "sampler")["largest"] < 1e-4


@pytest.mark.parametrize("before, added", [(0, [3]), (8, [3, 4])])
def test_tokens_that_only_one_side_has_move_the_first_tokens_most(tiny, alone, before, added):
    """A template or a server that adds them: here a BOS, or two tokens that begin the answer."""
    longer = [(i, {}, [*ids[:before], *added, *ids[before:]]) for i, _, ids in PROMPTS]
    samples = samples_of(tiny_policy(tiny), longer)
    for sample in samples:
        sample.prompt = sample.prompt[:before] + sample.prompt[before + len(added) :]
    gaps = gaps_of(tiny_policy(tiny), samples)
    assert not is_even(gaps)
    assert gaps["quarters"] == sorted(gaps["quarters"], reverse=True)
    assert gaps["quarters"][0] > 1.5 * gaps["quarters"][3]


def test_log_probs_of_the_tokens_beside_fit_when_they_are_moved(tiny, alone):
    policy = tiny_policy(tiny)
    samples = samples_of(policy)
    for sample in samples:
        sample.logps = [-1.0, *sample.logps[:-1]]
    gaps = gaps_of(policy, samples)
    before, after = gaps["moved"]
    assert after < 1e-5 and min(before, gaps["median"]) > 0.1


def test_a_kernel_moves_some_tokens_far_and_the_others_by_rounding(tiny, alone, monkeypatch):
    """One of the seven chunks in which the tokens pass the LM head."""
    policy, chunks, forward = tiny_policy(tiny), [], chunked.torch_forward
    samples = samples_of(policy)

    def broken(logits, *others):
        chunks.append(len(logits))
        forward(logits.roll(1, dims=1) if len(chunks) == 3 else logits, *others)

    monkeypatch.setattr(chunked, "torch_forward", broken)
    gaps = gaps_of(policy, samples)
    assert gaps["median"] < 1e-5 and gaps["largest"] > 1
    tokens = tokens_of(samples, "sampler")
    wrong = [n for n, t in enumerate(tokens) if size_of(t, "sampler") > 1e-3]
    first, chunk = sum(chunks[:2]), chunks[2]  # the file has them one after another
    assert first <= wrong[0] and wrong[-1] < first + chunk and len(wrong) > 0.9 * chunk


# --- The file and the message -------------------------------------------------------------
def failed(run, samples, metrics, check, other="sampler"):
    """-> the text that a failing check's error has after its message."""
    with pytest.raises(RunFailed) as failure, leaving_evidence(run, 1, samples, metrics, other):
        check()
    (note,) = failure.value.__cause__.__notes__
    return note


def test_the_error_names_the_file_and_its_worst_tokens(tiny, alone, tmp_path):
    policy = tiny_policy(tiny)
    samples, run = samples_of(policy), a_run(policy, tmp_path)
    for number, at, gap in [(2, 5, 4.0), (0, 3, -2.0), (9, 0, 1.0)]:
        samples[number].logps[at] -= gap
    metrics = updated(policy, samples)
    check = functools.partial(check_sampler, metrics, SimpleNamespace(noise=NOISE["float32"]))
    note = failed(run, samples, metrics, check)
    assert f"{tmp_path}/bad_step_000001.json" in note and note.count("at token") == 3
    found, worst = evidence(tmp_path), samples[2]
    text = policy.tokenizer.decode([worst.ids[5]])
    assert f"at token 5 of sample 2, {text!r}, the sampler says {worst.logps[5]:.3g}, the" in note
    assert [(t["sample"], t["token"]) for t in found["worst"][:3]] == [(2, 5), (0, 3), (9, 0)]
    assert len(found["worst"]) == 10 and found["compared"] == ["trainer", "sampler"]
    assert found["worst"][0] | {"text": text, "sampler": worst.logps[5]} == found["worst"][0]
    assert found["metrics"] == metrics and "trainer and sampler should" in found["why"]
    assert [s["ids"] for s in found["samples"]] == [s.ids for s in samples]
    assert [s["trainer_logps"] for s in found["samples"]] == [s.trainer_logps for s in samples]


def test_a_reference_that_differs_leaves_its_log_probs(tiny, alone, tmp_path):
    """REF_SERVER serves another checkpoint under MODEL's name."""
    policy, other = tiny_policy(tiny), tiny_policy(tiny)
    move(other.model, 0.05)
    samples, run = samples_of(policy), a_run(policy, tmp_path, MODEL="tiny", KL_BETA=0.1)
    updated(other, samples)
    for sample in samples:
        sample.ref_logps, sample.trainer_logps = sample.trainer_logps, None
    run.reference = SimpleNamespace(info={"model": "tiny", "dtype": "float32"})
    metrics = updated(policy, samples, KL_BETA=0.1) | {"skipped": 0}
    with pytest.raises(RunFailed) as failure:
        check_update(run, metrics, samples)
    found = evidence(tmp_path)
    assert "the reference says" in failure.value.__cause__.__notes__[0] and not run.progress.checked
    assert found["step"] == 7 and found["compared"] == ["trainer", "reference"]
    assert found["gaps"]["median"] > 0.01 and "reference's weights differ" in found["why"]
    worst = found["worst"][0]
    assert worst["reference"] == samples[worst["sample"]].ref_logps[worst["token"]]


def test_steps_that_are_not_finite_are_kept_and_end_the_run_if_they_follow_each_other(
    tiny, alone, tmp_path, capsys
):
    policy = tiny_policy(tiny)
    run, metrics = a_run(policy, tmp_path, IDLE_LIMIT=3), {"loss": math.nan, "grad_norm": math.inf}
    samples = [Sample([7, 8, 9], [-1.0, -2.0, -3.0], version=2), Sample([7], [-1.0], version=1)]
    samples[0].trainer_logps, samples[1].trainer_logps = [-1.0, math.nan, -3.5], [math.inf]
    for run.progress.step in range(1, 5):
        if run.progress.step == 3:
            run.progress.bad = 0  # a good one between
        skip_step(run, samples, metrics)
    run.progress.step = 5
    with pytest.raises(RunFailed) as failure:
        skip_step(run, samples, metrics)
    assert "3 steps in a row" in str(failure.value.__cause__)
    assert "bad_step_000005.json" in str(failure.value.__cause__)
    assert "step 4 is skipped: loss nan, norm of the gradient inf; 2 in" in capsys.readouterr().out
    paths = sorted(tmp_path.glob("bad_step_*"))
    assert [path.name for path in paths] == [f"bad_step_00000{step}.json" for step in (3, 4, 5)]
    found = json.loads(paths[0].read_text())
    places = [(t["sample"], t["token"], t["trainer"]) for t in found["worst"]]
    assert places == [(0, 1, None), (1, 0, None), (0, 2, -3.5), (0, 0, -1.0)]  # null: not finite
    assert found["gaps"]["tokens"] == 2 and found["gaps"]["largest"] == 0.5


def test_tokens_of_the_task_and_samples_of_an_older_policy_are_not_compared():
    turns = Sample([5, 6, 7], [-1.0, 0.0, -2.0], is_model_token=[True, False, True], version=7)
    turns.trainer_logps = [-1.5, -2.5]
    old = Sample([5], [-9.0], version=6, trainer_logps=[-1.0], ref_logps=[-1.0])
    assert [(t["token"], t["trainer"]) for t in tokens_of([turns, old], "sampler", 7)] == [
        (0, -1.5), (2, -2.5)
    ]  # fmt: skip
    assert [t["sample"] for t in tokens_of([turns, old], "reference", 7)] == [1]
    assert summary([old], "sampler", 7) == {}


def test_a_disk_that_is_full_does_not_hide_the_error(tiny, alone, tmp_path):
    run = a_run(tiny_policy(tiny), tmp_path)
    (tmp_path / "bad_step_000001.json").mkdir()
    note = failed(run, [], {}, lambda: check_gap(1.0, 0.1, "they differ"))
    assert "can't be written" in note


def test_two_ranks_leave_one_file_with_the_log_probs_of_both(tiny, tmp_path, monkeypatch):
    """Each has the log-probs of the samples that it trained; the worst token is the other's."""
    policy, ranks = tiny_policy(tiny), Ranks(monkeypatch)
    run = a_run(policy, tmp_path)

    def of_rank(rank):
        samples = [Sample([7 + i, 8], [-1.0, -1.0], group=f"group {i}") for i in range(5)]
        for number in range(rank, 5, 2):
            samples[number].trainer_logps = [-1.0, -1.0 - number]
        return failed(run, samples, {"loss": 0.0}, lambda: check_gap(1.0, 0.1, "they differ"))

    first, second = ranks.run(of_rank)
    assert first == second and "at token 1 of sample 4" in first
    found = evidence(tmp_path)
    assert [s["trainer_logps"] for s in found["samples"]] == [[-1, -1 - i] for i in range(5)]
    assert [t["sample"] for t in found["worst"][:4]] == [4, 3, 2, 1]
    assert found["samples"][3]["group"] == "group 3"
