"""The model card: read by the hub, and by whoever finds the checkpoint."""

import ast
import json
import subprocess

import pytest
from huggingface_hub import ModelCard

import grpo_ref_split as trainer
from grpo.training import report as cards
from grpo.training.report import constants_of


def card_of(monkeypatch, folder, step=100, **changes):
    for name, value in {"RUN_DIR": str(folder), **changes}.items():
        monkeypatch.setattr(trainer, name, value)
    c = trainer.constants()
    return cards.model_card(c, {"step": step, "constants": constants_of(vars(c))})


@pytest.mark.parametrize("rank", [0, 16])
def test_a_card_has_what_the_hub_and_a_person_want_to_know(tmp_path, monkeypatch, rank):
    records = [{"step": 5, "loss": 1.0}]
    for step in range(0, 125, 5):
        records.append({"step": step, "eval_accuracy": step / 1000, "eval_truncated": None})
    records[-1] = {"step": 120, "eval_truncated": 0.5}  # its outcome applied to none
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    text = card_of(monkeypatch, tmp_path, LORA_RANK=rank, TASK="countdown", EVAL_SPLIT="test")
    data = ModelCard(text).data
    assert data.base_model == "Qwen/Qwen2.5-3B" and data.tags == ["grpo"]
    assert data.library_name == ("peft" if rank else "transformers") and data.license is None
    assert "step 100" in text and "`countdown`" in text and "split `test`" in text
    assert "| 120 |  | 0.500 |" in text and "| 25 | 0.025 |" in text
    assert "| 20 | 0.020 |" not in text  # the newest 20
    load, constants = (block.split("```")[0] for block in text.split("```python\n")[1:])
    assert len(load.splitlines()) == 3 and ast.parse(load)
    names = {}
    exec(constants, names)  # noqa: S102 (a preset of them)
    assert names["LORA_RANK"] == rank and names["REWARD_WEIGHTS"] == trainer.REWARD_WEIGHTS


def test_a_card_of_a_folder_names_no_base_model_that_the_hub_would_look_for(tmp_path, monkeypatch):
    text = card_of(monkeypatch, tmp_path, MODEL=str(tmp_path))
    assert ModelCard(text).data.base_model is None and f"`{tmp_path}`" in text
    assert "None yet" in text


def test_the_code_has_a_commit_where_it_is_a_git_checkout(tmp_path, monkeypatch):
    here = cards.commit.__wrapped__
    monkeypatch.setattr(cards, "ROOT", tmp_path)
    assert here() == "not a git checkout"
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a.py").touch()
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    assert here() == f"commit `{commit.strip()}`"
    (tmp_path / "a.py").write_text("changed")
    assert here() == f"commit `{commit.strip()}`, with changes that are not committed"
    (tmp_path / "inner").mkdir()  # a copy within another repository
    monkeypatch.setattr(cards, "ROOT", tmp_path / "inner")
    assert here() == "not a git checkout"
