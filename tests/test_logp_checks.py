"""An update that fails a check leaves its samples, from which the cause can be read."""

import json
import math
import re
from types import SimpleNamespace

import pytest
from documents import TEXT
from fakes import a_recipe, loss_of, means_of, move, sampled, tiny_policy
from rank_threads import Ranks

import grpo_ref_split as trainer
from grpo.bad_step import skip_step
from grpo.forward import CompletionModel
from grpo.logp_checks import check_logps
from grpo.ranks import RunFailed
from grpo.report import RunFolder
from grpo.run import Progress
from grpo.sample import Group, Sample, keep_logps

CONSTANTS = {"GROUP_SIZE": 4, "MAX_COMPLETION_TOKENS": 48, "KL_BETA": 0}
PROMPTS = [(i, {}, [5 + i, 6, 7, 8, 9, 10, 11, 12]) for i in range(16)]
BAD = {"loss": 0.0, "sampler_k3": 1.0}
TASK = SimpleNamespace(rewards=lambda item, text: {"correctness": len(text) % 3, "format": 1.0})


def samples_of(sampler, prompts=PROMPTS, **constants):
    """-> the samples that an update trains."""
    recipe = a_recipe(task=TASK, **CONSTANTS | constants)
    groups = sampled(sampler, recipe, prompts)
    trainer.set_advantages(recipe.c, groups)
    return trainer.samples_to_train(recipe.c, groups, 0)


def updated(policy, samples, **constants):
    """-> the metrics of a forward pass of one rank, which keeps its log-probs."""
    loss, stats = loss_of(policy, samples, **CONSTANTS | constants)
    keep_logps(samples, stats["logps"])
    return means_of(loss, stats)


def a_run(policy, folder, **constants):
    c, progress = a_recipe(**CONSTANTS | constants).c, Progress("run", step=7)
    own = {"engine": SimpleNamespace(module=CompletionModel(policy.model)), "sampler": policy}
    own["reference"] = SimpleNamespace(info={"model": "tiny", "dtype": "float32"})
    return SimpleNamespace(c=c, policy=policy, folder=RunFolder(folder), progress=progress, **own)


def evidence(folder):
    (path,) = folder.glob("bad_step_*.json")
    return json.loads(path.read_text())


def failed(run, samples, metrics):
    """-> the text that a failing check's error has after its message."""
    with pytest.raises(RunFailed) as failure:
        check_logps(run, 1, samples, metrics)
    (note,) = failure.value.__cause__.__notes__
    return note


def test_the_error_names_the_file_which_has_both_sides_log_probs(tiny, alone, tmp_path):
    policy = tiny_policy(tiny)
    samples, run = samples_of(policy), a_run(policy, tmp_path)
    samples[2].logps[5] -= 4.0
    samples[0].is_model_token = [True] * (len(samples[0].ids) - 1) + [False]
    metrics = updated(policy, samples)
    note = failed(run, samples, metrics)
    assert f"{tmp_path}/bad_step_000001.json" in note
    found = evidence(tmp_path)
    assert found["metrics"] == metrics and "trainer and sampler should" in found["why"]
    assert [s["ids"] for s in found["samples"]] == [s.ids for s in samples]
    assert [s["logps"] for s in found["samples"]] == [s.logps for s in samples]
    first, *others = [s["trainer_logps"] for s in found["samples"]]
    assert first == [*samples[0].trainer_logps, None]  # the task's token
    assert others == [s.trainer_logps for s in samples[1:]]


@pytest.mark.parametrize("fault", ["moved", "another policy"])
def test_the_lines_in_the_docs_tell_the_cause(fault, tiny, alone, tmp_path, monkeypatch, capsys):
    """docs/troubleshooting.md, "Read the evidence"."""
    policy, other = tiny_policy(tiny), tiny_policy(tiny)
    move(other.model.model.layers[1], 0.0 if fault == "moved" else 0.1)
    samples = samples_of(other)
    for sample in samples if fault == "moved" else []:
        sample.logps = [-1.0, *sample.logps[:-1]]
    run = a_run(policy, tmp_path / "runs/gsm8k")
    failed(run, samples, updated(policy, samples))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/gsm8k/bad_step_000001.json").rename("runs/gsm8k/bad_step_000138.json")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT["docs/troubleshooting.md"], re.DOTALL)
    exec(code, {})  # noqa: S102
    found = dict(re.findall(r"([a-z ]+?) (\d[\d.e-]*)", capsys.readouterr().out))
    assert (float(found["moved by one"]) < 1e-5) == (fault == "moved")
    assert float(found["median"]) > 0.1


def test_a_reference_that_differs_ends_the_run(tiny, alone, tmp_path):
    """REF_SERVER serves another checkpoint under MODEL's name."""
    policy, other = tiny_policy(tiny), tiny_policy(tiny)
    move(other.model, 0.05)
    samples, run = samples_of(policy), a_run(policy, tmp_path, MODEL="tiny", KL_BETA=0.1)
    updated(other, samples)
    for sample in samples:
        sample.ref_logps, sample.trainer_logps = sample.trainer_logps, None
    with pytest.raises(RunFailed) as failure:
        check_logps(run, 7, samples, updated(policy, samples, KL_BETA=0.1))
    found = evidence(tmp_path)
    assert "reference's weights differ" in str(failure.value.__cause__)
    assert found["step"] == 7 and not run.progress.checked
    assert found["samples"][0]["ref_logps"] == samples[0].ref_logps


def test_steps_that_are_not_finite_are_kept_and_end_the_run_if_they_follow_each_other(
    tiny, alone, tmp_path, capsys
):
    policy = tiny_policy(tiny)
    run, metrics = a_run(policy, tmp_path, IDLE_LIMIT=3), {"loss": math.nan, "grad_norm": math.inf}
    samples = [Sample([7, 8, 9], [-1.0, -2.0, -3.0]), Sample([7], [-1.0])]
    Group(0, None, [5], samples)
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
    assert found["samples"][0]["trainer_logps"] == [-1.0, None, -3.5]  # null: not finite


def test_a_disk_that_is_full_does_not_hide_the_error(tiny, alone, tmp_path):
    run = a_run(tiny_policy(tiny), tmp_path)
    (tmp_path / "bad_step_000001.json").mkdir()
    note = failed(run, [], BAD)
    assert "can't be written" in note


def test_two_ranks_leave_one_file_with_the_log_probs_of_both(tiny, tmp_path, monkeypatch):
    """Each has the log-probs of the samples that it trained."""
    policy, ranks = tiny_policy(tiny), Ranks(monkeypatch)
    run = a_run(policy, tmp_path)

    def of_rank(rank):
        samples = [Sample([7 + i, 8], [-1.0, -1.0]) for i in range(5)]
        for i, sample in enumerate(samples):
            Group(i, None, [5], [sample], id=f"group {i}")
        for number in range(rank, 5, 2):
            samples[number].trainer_logps = [-1.0, -1.0 - number]
        return failed(run, samples, BAD)

    first, second = ranks.run(of_rank)
    found = evidence(tmp_path)
    assert first == second and found["samples"][3]["group"] == "group 3"
    assert [s["trainer_logps"] for s in found["samples"]] == [[-1, -1 - i] for i in range(5)]
