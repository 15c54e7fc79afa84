"""plot.py: curves of runs, and samples in a terminal."""

import json
from types import SimpleNamespace

import pytest

import plot

NOW = {"reward": 0.5, "accuracy": 0.4, "completions/mean_length": 80.0, "rewards/format/mean": 1.0}
SAMPLE = {
    "step": 4,
    "group": "000003-0000-0001",
    "number": 0,
    "prompt": "<|im_start|>user\n" + "How many apples are left? " * 10,
    "answer": "42",
    "flat": True,
    "truncated": False,
    "sampler": "trainer",
}


def a_run(folder, metrics, *, steps=12, end=""):
    """Writes metrics.jsonl of a run; -> its folder, as a text."""
    folder.mkdir()
    lines = [json.dumps({"step": step} | metrics) + "\n" for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines) + end)
    return str(folder)


def titles(monkeypatch, *runs):
    """-> {title: [number of points, of each line]} of the picture that is drawn."""
    from matplotlib.figure import Figure

    drawn = {}  # not saved: that takes seconds, and test_demo.py does it

    def look(figure, *_, **__):
        for ax in figure.axes:
            drawn[ax.get_title()] = [len(line.get_xdata()) for line in ax.lines]
        drawn["legend"] = [text.get_text() for x in figure.legends for text in x.get_texts()]

    monkeypatch.setattr(Figure, "savefig", look)
    return drawn, plot.plot(*runs)


def test_a_run_that_is_being_written_is_drawn_and_each_reward_has_its_axes(tmp_path, monkeypatch):
    metrics = NOW | {"rewards/format/std": 0.1, "reward_std": 0.2, "kl": None}
    drawn, path = titles(monkeypatch, a_run(tmp_path / "a", metrics, end='{"step": 12, "rew'))
    assert path == tmp_path / "a/curves.png"
    assert drawn["reward"] == drawn["reward: format"] == [12, 12]  # the values, and their means
    assert drawn["gradient norm"] == [] and len(drawn) == len(plot.CURVES) + 1 + 1  # no more


def test_runs_are_laid_over_one_another(tmp_path, monkeypatch):
    runs = a_run(tmp_path / "new", NOW), a_run(tmp_path / "old", NOW, steps=5)
    drawn, path = titles(monkeypatch, *runs)
    assert path == tmp_path / "new/curves_vs.png" and drawn["legend"] == list(runs)
    for title in ("completion length (tokens)", "reward: format"):
        assert drawn[title] == [12, 12, 5, 5], title
    assert plot.plot(runs[0], target=tmp_path / "two.png") == tmp_path / "two.png"


def test_means_run_over_the_steps_before():
    lines = []
    ax = SimpleNamespace(plot=lambda steps, values, **_: lines.append((steps, values)))
    records = [{"step": 3}] + [{"step": 5 * i, "kl": 3.0 if i else 1.0} for i in range(40)]
    plot.draw(ax, records, "kl", "C0")
    (_, values), (steps, means) = lines
    assert values[:2] == (1.0, 3.0) and steps == (*range(0, 200, 5),)  # step 3 trained nothing
    assert means[:2] == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5]) and means[-1] > 2.99
    plot.draw(ax, records[1:9], "kl", "C0")
    assert list(lines[2][1]) == lines[3][1]  # of few steps a mean would only be late


def test_control_characters_of_a_text_are_shown_and_break_no_line(capsys):
    plot.show("completion", "a\x0bb\x1b[2J\r\u2028c\n\tx = 1\n")
    assert capsys.readouterr().out.split("\n")[1:] == [
        r"  a\x0bb\x1b[2J\r\u2028c",
        "      x = 1",
        "",
    ]


def test_samples_are_printed_the_best_first_at_80_columns(tmp_path, capsys):
    samples = [
        ("so so", 0.1, 0.0),
        ("right <answer>42</answer>", 3.0, 1.5),
        ("x\n" * 99, -1.0, -1.5),
    ]
    records = [
        SAMPLE | {"completion": text, "rewards": {"total": r, "style": None}, "advantage": a}
        for text, r, a in samples
    ]
    records.append(records[0] | {"step": 5})
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    plot.show_samples(tmp_path, "4")
    lines = capsys.readouterr().out.splitlines()
    assert "step 4" in lines[0] and "same total" in lines[0] and max(map(len, lines)) <= 80
    titles = [line for line in lines if line.startswith("---")]
    assert titles[:2] == ["--- prompt ---", "--- answer ---"]
    assert "+1.50" in titles[2] and '{"total": 3.0, "style": null}' in titles[2]
    assert "-1.50" in titles[4] and "  right <answer>42</answer>" in lines and "59" in lines[-1]
    plot.show_samples(tmp_path)
    assert "step 5" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="7.* 5"):
        plot.show_samples(tmp_path, "7")
    plot.show_samples(tmp_path, "total")  # those with this reward, of both steps
    out = capsys.readouterr().out
    assert out.count("so so") == 2 and "step 4" in out and "step 5" in out and "x\n" not in out
    with pytest.raises(SystemExit, match="no samples of style.* total"):
        plot.show_samples(tmp_path, "style")
