"""`make demo` in short: what it prints and leaves behind, and that it ends all that it started."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from documents import documented_metrics
from processes import PATIENCE, kill, launch, python, records
from transformers import AutoModelForCausalLM

import demo
from tasks import arithmetic

ROOT = Path(__file__).parent.parent


def test_a_demo_deletes_only_what_an_earlier_one_has_made(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo, "warm_start", lambda *_: sys.exit("begins"))
    run = tmp_path / "run"
    (run / "warm_start").mkdir(parents=True)
    with pytest.raises(SystemExit, match="begins"):
        demo.main(0, RUN_DIR=str(run))
    assert not run.exists()
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="RUN_DIR .* no demo has made"):
        demo.main(0, RUN_DIR=str(tmp_path))
    assert os.listdir(tmp_path) == ["mine"]


def test_a_demo_ends_with_its_server(tmp_path, monkeypatch, capsys):
    """And does not wait for it until WAIT_LIMIT_SECONDS."""
    codes = {"ref_server.py": "1 / 0", "grpo_ref_split.py": "import time; time.sleep(900)"}
    monkeypatch.setattr(demo, "command", lambda name, *_, **__: [sys.executable, "-c", codes[name]])
    with pytest.raises(SystemExit, match="ref_server.log has the server's output"):
        demo.train_and_serve("demo", {}, {"RUN_DIR": str(tmp_path)})
    assert "ref_server.py has ended" in capsys.readouterr().out
    assert "ZeroDivisionError" in (tmp_path / "ref_server.log").read_text()


@pytest.mark.long
def test_the_demo_runs_and_leaves_what_the_readme_says(tmp_path):
    ended = python("demo.py", "1", f"RUN_DIR={tmp_path}/run", "STEPS=2", "WARM_STEPS=20")
    output = ended.stderr + ended.stdout
    assert ended.returncode == 0, output[-3000:]
    result = json.loads(output.splitlines()[-1])
    assert result["steps"] == 2 and result["seconds"] > 0
    assert {"accuracy_before", "accuracy_after", "format_after"} <= result.keys()
    run = tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(run / "step_000002")
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / "samples.jsonl").exists()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    written = set().union(*map(json.loads, lines)) - {"step", "time"}
    named = {re.sub("^(rewards/|eval_positive_)[^/]*", r"\1NAME", metric) for metric in written}
    with_workers = {"staleness", "staleness_max", "groups_dropped", "seconds_publish"}
    with_turns = {"num_turns/mean", "num_turns/max", "tools/call_share", "environment_tokens"}
    with_workers |= with_turns | {"tools/failure_frequency", "eval_num_turns", "teacher_kl"}
    rare = {"gpu_memory_gb", "weights_changed", "rewards/none"}  # a GPU; bfloat16; None
    rare |= {"seconds_score"}  # without a server
    assert named | with_workers | rare == documented_metrics()  # docs/metrics.md
    assert "python plot.py live" in output
    for step in (1, 2):
        group = output.split(f"\nstep {step}, sampled by trainer")[1].split("\nstep ")[0]
        assert group.count("advantage ") == 8 and '"correctness": ' in group
    # the reward, accuracy, KL, length and tokens/s of the progress bar
    assert all(word in output for word in ("reward ", "accuracy ", "kl ", "length ", "tokens/s"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["calculator", "guess"])
def test_a_tiny_model_of_a_task_with_turns_is_trained_with_its_preset(name, tmp_path, monkeypatch):
    """With the commands of `make demo-tools`, which are in the preset."""
    import tasks.__main__ as module

    text = (ROOT / f"presets/{name}.py").read_text()
    made, trained = map(str.split, re.findall("^python (.*)$", text, re.MULTILINE))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(module, "WARM_STEPS", 10)
    monkeypatch.setattr(sys, "argv", ["tasks", *made[3:-1], f"OUT={tmp_path}/model"])
    module.main(made[2])
    own = [f"MODEL={tmp_path}/model", f"RUN_DIR={tmp_path}/run", "STEPS=2", "EVAL_QUESTIONS=8"]
    own += ["SKIP_FLAT_GROUPS=False"]  # this model is seldom right
    own += ["PROMPTS_PER_STEP=2", "GROUP_SIZE=4", "SAMPLE_BATCH=8"]
    launch(1, [sys.executable, *trained, *own], tmp_path / "log")
    steps = [record for record in records(tmp_path / "run") if "num_turns/mean" in record]
    assert len(steps) == 2 and all(1 <= record["num_turns/mean"] <= 3 for record in steps)
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-5 for record in steps)
    assert {r["step"] for r in records(tmp_path / "run", "samples.jsonl")} == {1, 2}


WAITS = "import time; time.sleep(900)"
ENDS = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as by a shell's `&`
import demo
demo.command = lambda *_, **__: [sys.executable, "-c", {WAITS!r}]
demo.warm_start = lambda folder, *_: demo.Path(folder).mkdir(parents=True)
demo.main(1, RUN_DIR=sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_ends_all_that_it_started(how, tmp_path):
    """Also where Ctrl-C is ignored. What the two started end with them (test_recovery.py)."""
    process = subprocess.Popen([sys.executable, "-c", ENDS, tmp_path / "run"], cwd=ROOT)
    try:
        deadline, started = time.monotonic() + PATIENCE, []
        while [p.cmdline()[-1:] for p in started] != [[WAITS]] * 2:  # both are more than forked
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
            started = psutil.Process(process.pid).children()
        process.send_signal(how)
        assert process.wait(PATIENCE) != 0 and not psutil.wait_procs(started, timeout=60)[1]
    finally:
        kill(process)


def test_arithmetic_splits_share_no_question_and_stay_the_same():
    splits = {name: arithmetic.load(name) for name in arithmetic.SIZES}
    questions = {name: {item["question"] for item in items} for name, items in splits.items()}
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["validation"]
    assert not questions["validation"] & questions["test"]
    assert splits == {name: arithmetic.load(name) for name in arithmetic.SIZES}
    for item in splits["test"]:
        a, b = item["a"], item["b"]
        assert int(item["answer"]) == (a + b if item["operator"] == "+" else a - b) >= 0
        assert str(a) in item["question"] and str(b) in item["question"]
