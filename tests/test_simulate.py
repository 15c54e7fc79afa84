"""benchmarks/simulate.py: its scheduling against the sampler's own, its sums, its errors."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import published
import schedule
import simulate

from grpo.sampling import sampler


def job(**values):
    return SimpleNamespace(**simulate.JOB | {"steps": 3} | values)


# --- Columns ----------------------------------------------------------------------------
class Decoder:
    """A graphed decoder that knows beforehand how long each completion is: a logit is the number of
    tokens that are left."""

    joins, compaction = True, schedule.GraphedDecoder.compaction

    def __init__(self, lengths):
        self.lengths, self.left = lengths, torch.zeros(0, 1)

    def admit(self, prompts, group_size):
        first = [next(self.lengths) for _ in range(len(prompts) * group_size)]
        self.left = torch.cat([self.left, torch.tensor(first)[:, None]])
        return self.left[-len(first) :]

    def next_logits(self, tokens):
        self.left = self.left - 1
        return self.left

    def keep(self, indices):
        self.left = self.left[indices]


@pytest.mark.parametrize("groups", [1, 4, 8, 9, 14, 30])
def test_columns_are_those_of_the_sampler(groups, monkeypatch):
    c, columns = job(longest=60), []
    drawn = [random.Random(i).randint(1, 60) for i in range(groups * c.group)]

    def draw(logits, temperature, generator):
        columns.append(len(logits))
        return (logits[:, 0] == 1).long(), torch.zeros(len(logits))

    lengths, again = iter(drawn), iter(drawn)
    monkeypatch.setattr(sampler, "make_decoder", lambda *_: Decoder(lengths))
    monkeypatch.setattr(sampler, "draw", draw)
    sampled = sampler.stream_groups(
        SimpleNamespace(device="cpu"),
        ((key, [0]) for key in range(groups)),
        group_size=c.group,
        max_rows=c.batch,
        longest_prompt=1,
        max_new_tokens=60,
        temperature=1.0,
        eos_ids={1},
        vocab_size=1,
        generator=None,
    )
    assert len(list(sampled)) == groups
    batch = schedule.run_batch(groups, c, lambda _: next(again), random.Random(0))
    assert (batch.columns, batch.rows) == (len(columns), sum(columns))


def test_without_flat_groups_the_longest_completion_decides():
    c = job(flat=0.0)
    for seed in range(5):
        rounds = schedule.run_rounds(c, schedule.lengths(c), random.Random(seed))
        (ranks,) = rounds
        ended = [tokens for batch in ranks for _, tokens, _ in batch.ended]
        assert schedule.columns_of(rounds) == max(map(max, ended))
        assert len(ended) == c.prompts


def mean_columns(flat, steps=20):
    c = job(flat=flat)
    made = (schedule.run_rounds(c, schedule.lengths(c), random.Random(s)) for s in range(steps))
    return sum(map(schedule.columns_of, made)) / steps


def test_flat_groups_cost_less_than_their_share():
    """One after the other they cost 4.7 and 7 times the columns at 50 % and 70 %."""
    without = mean_columns(0.0)
    assert mean_columns(0.5) < 2.3 * without
    assert mean_columns(0.7) < 2.6 * without


def test_a_step_ends_when_all_that_may_be_begun_is():
    c = job(flat=0.99)
    rounds = schedule.run_rounds(c, schedule.lengths(c), random.Random(0))
    begun = sum(len(batch.ended) for ranks in rounds for batch in ranks)
    assert begun == c.prompts * (1 + c.refills)


# --- Seconds ----------------------------------------------------------------------------
def test_parts_are_those_of_each_step():
    c = job()
    made = simulate.steps(tuple(sorted(vars(c).items())))
    m, card = simulate.sizes_of("Qwen2.5-3B", 0), simulate.CARDS["A800"]
    sums = [sum(simulate.step_parts(*step, m, card, c)[0].values()) for step in made]
    assert simulate.step_seconds("Qwen2.5-3B", "A800", c) == pytest.approx(sum(sums) / c.steps)


def test_a_faster_card_fewer_kernels_and_fewer_flat_groups_take_less():
    now = simulate.step_seconds("Qwen2.5-3B", "A800", job())
    assert simulate.step_seconds("Qwen2.5-3B", "H100", job()) < now
    assert simulate.step_seconds("Qwen2.5-3B", "A800", job(kernels=20)) < now
    assert simulate.step_seconds("Qwen2.5-3B", "A800", job(flat=0.0)) < now
    assert simulate.step_seconds("Qwen2.5-3B", "4090", job()) > now


def test_constants_are_where_their_fit_leaves_no_mean_error():
    found = published.errors()
    assert found.keys() == {"generate", "vLLM", "training, A100", "training, H100"}
    assert all(abs(error) < 0.03 for error in found.values()), found


# --- The command --------------------------------------------------------------------------
def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
    simulate.main()


def test_the_printed_parts_add_up(monkeypatch, capsys):
    run(monkeypatch, "Qwen2.5-0.5B", "4090", "--steps", "2", "--flat", "0.3")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "% |" in line]
    *parts, total = [float(row[1]) for row in rows]
    assert rows[-1][0] == "| the step"
    assert sum(parts) == pytest.approx(total, abs=0.01 * len(parts))


def test_what_does_not_fit_is_said(monkeypatch, capsys):
    run(monkeypatch, "Qwen2.5-14B", "A800", "--steps", "1")
    assert "more than one A800 has" in capsys.readouterr().out


def test_lengths_may_be_real_ones(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("40\n40 9999")
    draw, numbers = schedule.lengths(job(lengths=str(path))), random.Random(0)
    assert {draw(numbers) for _ in range(50)} == {40, 512}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("GPT-9", "A800"), "unknown model GPT-9: known are Qwen2.5-0.5B, "),
        (("Qwen2.5-3B", "V100"), "unknown card V100: known are A800, A100, H100, 4090"),
        (("Qwen2.5-3B", "A800", "--flat", "1"), "--flat 1.0: a share of the groups"),
    ],
)
def test_mistakes_get_a_sentence(words, sentence, monkeypatch):
    with pytest.raises(SystemExit, match=sentence):
        run(monkeypatch, *words)
