"""The trainer's constants are checked before anything starts."""

import re
from pathlib import Path

import pytest

import grpo_ref_split as trainer
from grpo.checks import trainer_constants

WRONG = {
    "GROUP_SIZE": [1, "8"],
    "TEMPERATURE": [0.0],
    "LOSS_TYPE": ["ppo", ["grpo"]],
    "KL_BETA": [-0.1, True, None, float("nan")],
    "REFERENCE": ["", "a/teacher"],  # REF_SERVER is set
    "OUTCOME": [""],
    "REWARD_WEIGHTS": [{"a": "1"}],
    "CHAT_TEMPLATE": [{1: 2}],
    "STEPS": [0, True],
    "EVAL_STEPS": [2.5],
    "MICRO_BATCH_TOKENS": [0],
    "SAMPLE_BATCH": [4],
    "SKIP_FLAT_GROUPS": ["outcome"],
    "STOP_STRINGS": ["</answer>", [""]],
    "MAX_STALENESS": [-1],
    "REF_SERVER": ["127.0.0.1:59875", ""],
    "REPORT_TO": ["wandb", ["mlflow"], [None], None],
    "TRAINER": ["127.0.0.1:59876", "https://gpu01:59876", "http://gpu01", None],
}


def check(**given):
    return trainer_constants(trainer.DEFAULTS, given)


@pytest.mark.parametrize("name, value", [(name, x) for name in WRONG for x in WRONG[name]])
def test_a_wrong_constant_is_named_with_its_value(name, value):
    check()
    with pytest.raises(SystemExit, match=re.escape(f"{name} = {value!r} must be")):
        check(**{name: value})


def test_only_groups_of_workers_get_old():
    check(UPDATES_PER_ROLLOUT=8)
    with pytest.raises(SystemExit, match="MAX_STALENESS = 4 must be"):
        check(UPDATES_PER_ROLLOUT=8, PUBLISH_STEPS=1)


def test_a_constant_that_is_edited_in_the_script_keeps_its_kind():
    assert trainer_constants(trainer.DEFAULTS | {"KL_BETA": 0}, {"KL_BETA": 0.04}).KL_BETA == 0.04
    for name, value in {"FUSED_LOSS": "no", "WARMUP_STEPS": 0.1}.items():
        with pytest.raises(SystemExit, match=f"{name} = {value!r} must be"):
            trainer_constants(trainer.DEFAULTS | {name: value}, {})


def test_every_constant_of_the_trainer_is_checked():
    for name in trainer.DEFAULTS:
        with pytest.raises(SystemExit, match=f"{name} = b'' must be"):
            check(**{name: b""})


@pytest.mark.parametrize("name, own", [
    ("KL_BETA", {"KL_BETA": 0.0, "REWARD_WEIGHTS": {}, "SKIP_FLAT_GROUPS": False}),
    ("IS_CAP", {"IS_CAP": 0.5}),
    ("RATIO_LEVEL", {"RATIO_LEVEL": "sequence", "PUBLISH_STEPS": 1}),
    ("VLLM_CACHE_GB", {"VLLM_CACHE_GB": 0}),
])  # fmt: skip
def test_what_would_be_ignored_in_silence_or_found_late_is_refused(name, own):
    with pytest.raises(SystemExit, match=f"{name} = .* must be"):
        check(**own)


def test_without_rewards_a_teacher_needs_no_group_but_all_of_them():
    alone = {"REWARD_WEIGHTS": {}, "SKIP_FLAT_GROUPS": False, "GROUP_SIZE": 1}
    check(**alone)
    check(**alone, OUTCOME="right")  # evaluated all the same
    with pytest.raises(SystemExit, match="SKIP_FLAT_GROUPS = True must be False"):
        check(**alone | {"SKIP_FLAT_GROUPS": True})


def test_a_folder_that_cant_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file/run", "/proc/run"):
        with pytest.raises(SystemExit, match=f"RUN_DIR = '{folder}' can't be written"):
            trainer.resume.check_run_dir(str(folder))


def test_a_disk_without_links_is_refused_before_a_run_needs_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(SystemExit, match="can't be written .no links here"):
        trainer.resume.check_run_dir(str(tmp_path))
    assert not list(tmp_path.iterdir())
