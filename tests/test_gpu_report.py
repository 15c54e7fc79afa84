"""The report is written whatever its parts do."""

import sys

import psutil

from benchmarks import gpu_report

TABLE = "print('| a | b |\\n|---|---|\\n| 1 | 2 |')"
SLEEP = "import time; time.sleep(99)"
HANGS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


def test_a_part_that_fails_or_hangs_is_a_section_and_not_the_end(tmp_path, capsys):
    parts = {
        "a table": ([sys.executable, "-c", TABLE], 1),
        "one that fails": ([sys.executable, "-c", "raise ValueError('no such kernel')"], 1),
        "one that hangs": ([sys.executable, "-c", HANGS], 1 / 30),
        "the last": ([sys.executable, "-c", "print('fine')"], 1),
    }
    path, before = tmp_path / "report.md", set(psutil.Process().children(recursive=True))
    gpu_report.report(parts, path, 1)
    text = path.read_text()
    assert "## a table: took" in text and "\n| 1 | 2 |\n" in text
    assert "## one that fails: FAILED (1)" in text and "no such kernel" in text
    assert "## one that hangs: NOT FINISHED in 2 s" in text
    assert "## the last: took" in text and "fine" in text
    assert set(psutil.Process().children(recursive=True)) <= before
    assert str(path) in capsys.readouterr().out


def test_the_parts_are_files_that_exist():
    for command, minutes in gpu_report.parts_of_the_report().values():
        files = [part for part in command[1:] if part.endswith(".py")]
        assert files and all((gpu_report.ROOT / file).exists() for file in files) and minutes > 0
    assert sum(m for _, m in gpu_report.parts_of_the_report().values()) <= gpu_report.MINUTES
