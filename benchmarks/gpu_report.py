"""Runs what needs a GPU, and writes a report: runs/gpu_report.md.

    make gpu-report MINUTES=9                               # or: python benchmarks/gpu_report.py
    python benchmarks/gpu_report.py --minutes 9             # nine minutes are the default
    python benchmarks/gpu_report.py demo sampling           # only these parts
    python benchmarks/gpu_report.py --small                 # on a GPU, too, the sizes of a CPU

The parts (gpu_parts.py) are processes with time limits, in the order of what they tell. Each prints
into a file, runs/gpu_report/NAME.log. The report is written anew before and after each part. So if
all is killed, it has what was found until then: SIGTERM and SIGINT lose nothing, SIGKILL only what
the part in work has not printed. All logs, metrics and samples are in runs/gpu_report.tar.gz.
`--out FOLDER` puts report, logs and archive elsewhere than into runs/. For a machine without
network see gpu_kit.py. Without a GPU the parts run on the CPU, with a model of 1M parameters.
"""

import argparse
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil

from grpo.stop import end_with_parent

MINUTES = 9
# The parts, and the seconds after which each is stopped; more MINUTES give each part more. They are
# guesses, together more than nine minutes: no GPU has run them
PARTS = {
    "facts": 40, "tests": 150, "demo": 80, "lora": 70, "full": 70, "sampling": 60,
    "sums_bfloat16": 120, "sampling_large": 70, "loss": 45, "sums_float32": 90, "offload": 90,
    "resumed": 70, "ranks": 70,
}  # fmt: skip
MARKED = [f"tests/test_{name}.py" for name in ("card", "bfloat16", "loss_triton")]
LEAST_SECONDS = 10  # with less time left a part does not begin
WORK = ROOT / "runs/gpu_report"  # the runs of the parts, and the models that they share
PACKED = ".log", ".jsonl", "run.json"
WRONG = 3  # exit status of a part that has found a fault
SHOWN_LINES, SHOWN_COLUMNS = 120, 300  # of each log, the last ones; the archive has all


def command_of(name):
    if name == "tests":
        options = ["-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu"]
        return [sys.executable, "-m", "pytest", *options, *MARKED]
    return [sys.executable, "benchmarks/gpu_parts.py", name]


# --- Running --------------------------------------------------------------------------
def run_part(command, log, seconds):
    """Returns "took 12 s", "FAILED ..." or "NOT FINISHED ..."; the log gets what is printed."""
    began, options = time.monotonic(), {"cwd": ROOT, "stdin": subprocess.DEVNULL}
    options["preexec_fn"] = functools.partial(end_with_parent, signal.SIGKILL)
    with open(log, "a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **options)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        stop_all(process)
    took = f"{time.monotonic() - began:.0f} s"
    if code is None:
        return f"NOT FINISHED in {took}"
    return f"FAILED ({code}) after {took}" if code else f"took {took}"


def stop_all(process):
    """Kills a process and all that it has started, in other sessions, too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid)
        for child in [*found.children(recursive=True), found]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def report(parts, out, minutes):
    """Runs the parts, {name: (command, seconds)}, one after the other, and writes `out`'s report
    before and after each."""
    logs, ends = out / "gpu_report", time.monotonic() + 60 * minutes
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = dict.fromkeys(parts, f"NOT RUN: the {minutes:g} minutes were over")
    try:
        for name, (command, seconds) in parts.items():
            left = ends - time.monotonic()
            if left < LEAST_SECONDS:
                continue
            outcomes[name] = "NOT FINISHED: the report was ended from outside"
            write(outcomes, out)
            seconds = min(seconds * max(1, minutes / MINUTES), left)
            print(f"{name}, up to {seconds:.0f} s ...", flush=True)
            outcomes[name] = run_part(command, logs / f"{name}.log", seconds)
            print(f"{name}: {outcomes[name]}", flush=True)
    finally:
        write(outcomes, out)
    print(f"written: {out}/gpu_report.md and .tar.gz. Please send both to the project.")


# --- The report -----------------------------------------------------------------------
def write(outcomes, out):
    """Writes report and archive, each as a whole or not at all."""
    logs, kit = out / "gpu_report", os.environ.get("GPU_KIT", "")  # the commit, where git is not
    lines = ["# GPU report", "", time.strftime("%Y-%m-%d %H:%M UTC ", time.gmtime()) + kit, ""]
    lines += ["| part | outcome |", "|---|---|", *(f"| {n} | {o} |" for n, o in outcomes.items())]
    for name in outcomes:
        if (log := logs / f"{name}.log").exists():
            lines += ["", f"## {name}", *shown(log.read_text(errors="replace"))]
    draft = out / ".draft"
    draft.write_text("\n".join([*lines, ""]))
    draft.rename(out / "gpu_report.md")
    found = [logs / f"{name}.log" for name in outcomes]
    found += [x for name in outcomes for x in (WORK / name).rglob("*") if x.name.endswith(PACKED)]
    with tarfile.open(draft, "w:gz") as archive:
        archive.add(out / "gpu_report.md", "gpu_report.md")
        for path in filter(Path.exists, found):
            archive.add(path, path.relative_to(logs if path.parent == logs else WORK))
    draft.rename(out / "gpu_report.tar.gz")


def shown(text):
    """Returns a log's last lines as Markdown: tables stay tables, all else is quoted; progress bars
    are left out."""
    lines = [x for x in text.splitlines() if x.strip() and "it/s]" not in x and "s/it]" not in x]
    body, quoted = [], False
    for line in lines[-SHOWN_LINES:]:
        if quoted == line.startswith("|"):
            body += ["```"] if quoted else ["", "```"]
            quoted = not quoted
            body += [""] * (not quoted)
        body.append(line[:SHOWN_COLUMNS])
    return body + ["```"] * quoted


def listen():
    """Makes SIGTERM and SIGINT end the report once it is written."""

    def end(number, _):
        signal.signal(number, signal.SIG_IGN)
        sys.exit(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):  # SIGINT also if a shell's `&` has it ignored
        signal.signal(number, end)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the whole report")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder of the report")
    parser.add_argument("--small", action="store_true", help="on a GPU, too, the sizes of a CPU")
    given = parser.parse_args()
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    os.environ["PYTHONUNBUFFERED"] = "1"
    if given.small:
        os.environ["GPU_REPORT_SMALL"] = "1"
    chosen = {n: (command_of(n), s) for n, s in PARTS.items() if n in (given.parts or PARTS)}
    shutil.rmtree(WORK / "models", ignore_errors=True)  # today's code may build others
    for name in chosen:
        Path(given.out, f"gpu_report/{name}.log").unlink(missing_ok=True)
    listen()
    report(chosen, given.out.resolve(), given.minutes)


if __name__ == "__main__":
    main()
