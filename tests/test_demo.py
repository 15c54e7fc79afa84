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
from transformers import AutoModelForCausalLM

import demo as demo_module
from tasks import arithmetic

ROOT = Path(__file__).parent.parent


def start_demo(folder, steps):
    short = {"DEMO_RUN_DIR": str(folder), "DEMO_WARM_STEPS": "20", "DEMO_STEPS": str(steps)}
    short["CUDA_VISIBLE_DEVICES"] = "0"
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process we start inherits it
    try:
        return subprocess.Popen(
            [sys.executable, "demo.py", "1"],
            cwd=ROOT,
            env=os.environ | short,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)


def test_the_demo_runs_and_leaves_what_the_readme_says(tmp_path):
    demo = start_demo(tmp_path / "run", steps=2)
    output, _ = demo.communicate(timeout=200)
    assert demo.returncode == 0, output[-3000:]
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
    elsewhere = with_workers | {"gpu_memory_gb", "teacher_kl"}
    assert named | elsewhere == documented_metrics()  # docs/metrics.md
    # the reward, accuracy, KL, length and tokens/s of the progress bar
    assert all(word in output for word in ("reward ", "accuracy ", "kl ", "length ", "tokens/s"))


@pytest.mark.long
def test_the_demo_ends_all_that_it_started(tmp_path):
    """Also where Ctrl-C comes to be ignored, as by what a shell script runs with an `&`. One is
    ended while server and trainer still start, the other while it trains. Two demos at once, as
    most of their time is spent on imports."""
    hows = {signal.SIGINT: tmp_path / "int", signal.SIGTERM: tmp_path / "term"}
    demos = {how: start_demo(folder, steps=10_000) for how, folder in hows.items()}
    for how, demo in demos.items():
        metrics, deadline = hows[how] / "metrics.jsonl", time.monotonic() + 180
        family = []
        while len(family) < 2 or (how == signal.SIGTERM and not metrics.exists()):
            if demo.poll() is not None or time.monotonic() > deadline:
                for other in demos.values():
                    other.terminate()
                raise AssertionError((how, family, demo.communicate(timeout=30)[0][-3000:]))
            time.sleep(0.1)
            family = psutil.Process(demo.pid).children(recursive=True)
        if metrics.exists():  # the GPU that was chosen is the one that is used
            assert {p.environ().get("CUDA_VISIBLE_DEVICES") for p in family} == {"0"}
        demo.send_signal(how)
        demo.communicate(timeout=30)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive and demo.returncode != 0


def test_a_signal_while_a_process_is_started_leaves_it_not_running(monkeypatch, tmp_path):
    started, start = [], demo_module.start

    def interrupted(command, log=None):
        started.append(start(["sleep", "100"], log))
        signal.raise_signal(signal.SIGUSR1)  # before the caller knows of it

    monkeypatch.setattr(demo_module, "ENDS", (signal.SIGUSR1,))
    monkeypatch.setattr(demo_module, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(demo_module, "warm_start", lambda *_: (tmp_path / "run").mkdir())
    monkeypatch.setattr(demo_module, "start", interrupted)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit, match="ended by SIGUSR1"):
            demo_module.main(0)
        # until it has ended nothing ends the demo: another signal would leave others running
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert len(started) == 1 and started[0].poll() is not None


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
