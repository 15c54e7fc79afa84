"""The trainer as the only process (REF_SERVER = None): what it learns, and its page."""

import json
import re
import time
import urllib.request

import pytest
from processes import QUICK, command_of, launch, records, reference_server, start
from safetensors.torch import load_file

from demo import free_port

SMALL = QUICK | {"TASK": "even", "MAX_PROMPT_TOKENS": 64, "EVAL_QUESTIONS": 2, "CPU_THREADS": 1}
TIMES = ("time", "seconds", "tokens_per_second")


def learned(folder, file):
    """-> a run's metrics, without times, and the weights after its last step."""
    steps = [r for r in records(folder) if "loss" in r]
    metrics = [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in steps]
    return metrics, load_file(folder / "step_000002" / file)


@pytest.mark.long
def test_two_ranks_learn_the_same_with_and_without_a_server_also_where_the_run_resumes(
    tiny, tmp_path
):
    """A resumed run has MODEL as its reference, and not the checkpoint."""
    shared = SMALL | {"MODEL": str(tiny), "EVAL_QUESTIONS": 1, "PAGE_PORT": 0}
    presets = []
    with reference_server(tmp_path, tiny) as url:
        for rank in (0, 4):
            for name, server, starts in (("server", url, [2]), ("alone", None, [1, 2][rank > 0 :])):
                own = {"RUN_DIR": str(tmp_path / f"{name}_{rank}"), "REF_SERVER": server}
                own |= {"LORA_RANK": rank}
                presets += [shared | own | {"STEPS": steps} for steps in starts]
        output = launch(2, command_of("grpo_ref_split", *presets), tmp_path / "log")
    assert re.search("the run alone_0-.* resumes from", output)
    assert output.count("the reference is a copy of MODEL\n") == 2
    assert output.count("the reference is the policy's model without its adapters\n") == 1
    for rank, file in ((0, "model.safetensors"), (4, "adapter_model.safetensors")):
        expected, there = learned(tmp_path / f"server_{rank}", file)
        found, here = learned(tmp_path / f"alone_{rank}", file)
        assert [r["step"] for r in found] == [1, 2] and found[1]["kl"] > 1e-4
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
        gaps = [(weight - there[name]).abs().max().item() for name, weight in here.items()]
        assert max(gaps) < 1e-5


@pytest.mark.long
def test_one_process_trains_and_serves_its_page_meanwhile(tiny, tmp_path):
    port = free_port()
    preset = SMALL | {"MODEL": str(tiny), "RUN_DIR": str(tmp_path / "run"), "REF_SERVER": None}
    preset |= {"PAGE_PORT": int(port), "STEPS": 5}
    log, live, deadline = tmp_path / "log", {}, time.monotonic() + 100
    process = start(command_of("grpo_ref_split", preset), log, OMP_NUM_THREADS="1")
    try:
        while process.poll() is None and (live.get("step") or 0) < 1:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=5) as reply:
                    live = json.load(reply)
            except OSError:
                time.sleep(0.05)
        assert live and live["step"] >= 1 and "reward" in live["metrics"], live
        assert live["groups"]
        assert process.wait(100) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    assert f"the live page, for this machine alone: http://127.0.0.1:{port}/\n" in log.read_text()
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == [1, 2, 3, 4, 5]
