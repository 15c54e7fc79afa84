"""A step that is made again equals what the run has logged, bit by bit."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, QUICK, command_of, launch, start_ranks

from grpo.commands import replay

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
REPLAY = "grpo.commands.replay"
SMALL = QUICK | {"MAX_PROMPT_TOKENS": 64, "EVAL_STEPS": 2, "REF_SERVER": None, "TASK": "even"}
SMALL |= {"UPDATES_PER_ROLLOUT": 2, "STEPS": 7, "SAVE_STEPS": 3, "FINAL_LR": 0.1, "KL_BETA": 0.1}
SMALL |= {"SKIP_FLAT_GROUPS": "outcome", "KEEP_CHECKPOINTS": 3}


def run_of(folder, tiny, ranks=1, **changes):
    """-> the RUN_DIR of a run that has ended: checkpoints after steps 4, 6 and 7."""
    preset = SMALL | {"MODEL": str(tiny), "RUN_DIR": str(folder / "run")} | changes
    launch(ranks, command_of("grpo_ref_split", preset), folder / "log")
    return folder / "run"


@pytest.fixture(scope="module")
def ended(tiny, tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("replay"), tiny)


def files_in(folder):
    return {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }


def equal_in(output):
    """-> [(equal values, all values)], for metrics and samples of each replay."""
    found = re.findall(r"jsonl: (\d+) of (\d+) values of the run are equal", output)
    return [(int(equal), int(values)) for equal, values in found]


def test_every_step_is_equal_and_the_runs_folder_is_left_as_it_is(ended, tmp_path):
    """From the beginning and from a checkpoint, right after it and later, at both updates of a
    rollout; the learning rate falls until STEPS, whatever step is replayed."""
    before = files_in(ended)
    steps = [{"folder": str(ended), "step": step} for step in (1, 2, 3, 5, 6, 7)]
    output = launch(1, command_of(REPLAY, *steps), tmp_path / "log")
    counts = equal_in(output)
    assert len(counts) == 12 and all(equal == values for equal, values in counts)
    assert min(values for _, values in counts[::2]) > 10  # of metrics.jsonl
    assert "the run used" not in output
    assert [values for _, values in counts[1::2]] == [56, 0, 56, 56, 0, 56]  # one group a rollout
    assert files_in(ended) == before
    lines = re.findall(r"^  [+-]\d.* \((.*)\) ['\"]", output, re.MULTILINE)
    assert len(lines) % 4 == 0 and all("correctness" in line for line in lines)
    gaps = [float(gap) for line in lines for gap in re.findall(r"gap (\S+) at token", line)]
    first = gaps[: len(gaps) // 6]
    assert max(first) < 1e-4  # of step 1; a rollout's second update is off-policy


def test_what_a_constant_changes_is_shown_beside_what_was(ended, tmp_path):
    preset = {"folder": str(ended), "step": 5, "KL_BETA": 0.2}
    output = launch(1, command_of(REPLAY, preset), tmp_path / "log")
    (equal, values), samples = equal_in(output)
    assert 0 < equal < values and samples == (56, 56)  # the same samples, another loss
    record = next(r for r in replay_records(ended) if r["step"] == 5)
    assert f"loss[0]: {record['loss']!r}; with {{'KL_BETA': 0.2}}: " in output
    assert "  reward[0]: " not in output


def replay_records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


FAILS = """
import sys
sys.path[:0] = {path!r}
import grpo_ref_split as trainer
from {module} import main
updates, check = [], trainer.check_sampler

def differs(metrics, *others):
    updates.append(metrics)
    if len(updates) == {number}:
        raise RuntimeError("the sampler differs")
    check(metrics, *others)

trainer.check_sampler = differs
main({arguments})
"""


def test_a_step_that_failed_fails_again_and_shows_its_groups(tiny, tmp_path):
    """The run saved the step before it. The evidence is in the replay's folder."""
    preset = SMALL | {"MODEL": str(tiny), "RUN_DIR": str(tmp_path / "run"), "SAVE_STEPS": 100}
    jobs = ("grpo_ref_split", 3, f"**{preset!r}"), (REPLAY, 1, f"{preset['RUN_DIR']!r}, 3")
    for module, number, arguments in jobs:
        script = tmp_path / f"{module}.py"
        path = [str(ROOT), str(ROOT / "tests")]
        names = {"path": path, "module": module, "number": number, "arguments": arguments}
        script.write_text(FAILS.format(**names))
        (rank,) = start_ranks(1, [sys.executable, script], tmp_path / f"log_{module}")
        assert rank.wait(PATIENCE) == 1
    output = (tmp_path / f"log_{REPLAY}").read_text()
    assert "the sampler differs\nstep 3: its samples" in output
    assert len(re.findall(r"gap \S+ at token", output)) >= 4
    folder = Path(re.search(r"in (\S+/bad_step_000003.json)", output)[1])
    assert json.loads(folder.read_text())["step"] == 3 and folder.parent != tmp_path / "run"
    assert equal_in(output) == [(0, 0), (56, 56)]  # it was sampled, and not trained


def test_a_step_without_a_checkpoint_before_it_is_refused_with_those_that_have_one(
    alone, ended, tmp_path
):
    folder = shutil.copytree(ended, tmp_path / "run", symlinks=True)
    assert replay.start_of(folder, 7, 3, 2) == folder / "step_000006"
    assert replay.start_of(folder, 6, 3, 2) == folder / "step_000004"
    assert replay.start_of(folder, 4, 3, 2) is None
    (folder / "step_000004/trainer/optimizer_0.pt").unlink()  # as of the best checkpoint
    with pytest.raises(SystemExit, match=r"SAVE_STEPS = 3.*: 1 to 3, 7 to 9, 8 to 10"):
        replay.start_of(folder, 5, 3, 2)
    assert replay.start_of(folder, 5, 0, 2) is None
    with pytest.raises(SystemExit, match="no run.json"):
        replay.begin(ended / "step_000006", 1, {})


def test_a_step_of_two_ranks_is_equal_and_needs_two_ranks(tiny, tmp_path):
    folder = run_of(tmp_path, tiny, ranks=2, LORA_RANK=4)
    preset = {"folder": str(folder), "step": 7}
    output = launch(2, command_of(REPLAY, preset), tmp_path / "two")
    assert all(equal == values for equal, values in equal_in(output)) and len(equal_in(output)) == 2
    (rank,) = start_ranks(1, command_of(REPLAY, preset), tmp_path / "one")
    assert rank.wait(PATIENCE) == 1 and "2 ranks made step 7" in (tmp_path / "one").read_text()
