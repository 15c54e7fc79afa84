"""The settings that a worker must share with its trainer."""

import json
from types import SimpleNamespace

import pytest
from fakes import MIXED, a_recipe, prompts_of

from grpo.options.workers.shared_settings import check_settings, settings_of
from grpo.task import load_task
from tasks import ledger


def test_settings_are_the_same_after_a_journey_as_json():
    mine = settings_of(a_recipe(prompts_of([MIXED])))
    # What may differ: how many rows a machine has room for, and the order of the prompts
    theirs = settings_of(a_recipe(prompts_of([MIXED]), SAMPLE_BATCH=8, SEED=1))
    check_settings(json.loads(json.dumps(theirs)), mine)


@pytest.mark.parametrize(("name", "change"), [
    ("TASK", {"TASK": "gsm8k"}),
    ("TEMPERATURE", {"TEMPERATURE": 0.9}), ("RATIO_LEVEL", {"RATIO_LEVEL": "sequence"}),
    ("TOOLS", {"task": SimpleNamespace(Environment=ledger.Environment)}),
    ("REWARD_WEIGHTS", {"REWARD_WEIGHTS": {"correctness": 1.0, "format": 1.0}}),
    ("hash of prompts", {"prompts": prompts_of([MIXED, MIXED])}),
    ("hash of prompts", {"prompts": [(0, {}, [5, 7])]}),  # another template, tokenizer or split
    ("GROUP_SIZE", None),  # that the trainer does not send
])  # fmt: skip
def test_a_worker_with_other_constants_is_told_which(name, change):
    theirs, fields = settings_of(a_recipe(prompts_of([MIXED]))), {"prompts": prompts_of([MIXED])}
    mine = settings_of(a_recipe(**fields | (change or {})))
    if not change:
        del theirs[name]
    with pytest.raises(SystemExit, match=f"differs from the trainer: {name}") as caught:
        check_settings(json.loads(json.dumps(theirs)), mine)
    assert str(caught.value).count("here,") == 1  # and of no other


def test_a_worker_with_an_older_file_of_the_task_is_refused(tmp_path):
    """Its rewards would be other ones; the file may be in another folder."""
    theirs, mine = tmp_path / "there/task.py", tmp_path / "here/task.py"
    found = []
    for path, reward in ((theirs, 1.0), (mine, 1.0), (mine, 0.5)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"load = messages = None\ndef rewards(*_):\n    return {reward}\n")
        recipe = a_recipe(task=load_task(str(path)), TASK=str(path), REWARD_WEIGHTS={"reward": 1})
        found.append(settings_of(recipe))
    check_settings(found[0], found[1])
    with pytest.raises(SystemExit, match="differs from the trainer: hash of the task's file"):
        check_settings(found[0], found[2])
