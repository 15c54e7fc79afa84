"""docs/learn.md: its numbers are what docs/learn.py prints, its curves what the loss computes."""

import ast
import contextlib
import io
import math
import re

import pytest
import torch
from documents import ROOT, TEXT

from docs import learn, learn_pictures

PAGE = TEXT["docs/learn.md"]
NUMBER = r"\d+\.\d+|\d+(?= GB)"


@pytest.fixture(scope="module")
def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        learn.main()
    return out.getvalue()


def row(printed, name):
    """Returns the numbers of a row of the followed token's table."""
    line = next(line for line in printed.splitlines() if line.startswith(name))
    return [float(word) for word in line.removeprefix(name).split()]


# --- The page and the script --------------------------------------------------------------
def test_every_block_of_the_page_is_printed(printed):
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == printed.count("--- ")
    for block in blocks:
        assert block in printed, block


def test_every_number_in_the_text_is_printed_or_has_its_table(printed):
    """Beside what the script prints: results of the demo, and the constants that it shares with the
    trainer. Sections of papers and arXiv's numbers are no results."""
    prose = re.sub(
        r"```.*?```|\]\([^)]*\)|sec\. [\d.]+\d|\b\d{4}\.\d{5}\b", "", PAGE, flags=re.DOTALL
    )
    known = set(re.findall(NUMBER, printed + (ROOT / "benchmarks/results/demo.md").read_text()))
    known |= {str(learn.CLIP_LOW), str(learn.KL_BETA)}
    found = re.findall(rf"(?<![\w.])(?:{NUMBER})", prose.replace("Qwen2.5", ""))
    assert len(found) > 25
    assert set(found) <= known, set(found) - known


def test_what_is_said_to_be_shipped_is_what_the_trainer_has():
    body = ast.parse((ROOT / "grpo_ref_split.py").read_text()).body
    constants = [node for node in body if isinstance(node, ast.Assign)]
    trainer = {node.targets[0].id: node.value for node in constants}
    shipped = re.findall(r"^\| `([A-Z_]+)` \| ([\d.e-]+) as shipped", PAGE, re.MULTILINE)
    assert len(shipped) == 4
    for name, value in [*shipped, *((n, getattr(learn, n)) for n in ("CLIP_LOW", "CLIP_HIGH"))]:
        assert float(value) == trainer[name].value, name


def test_the_page_does_by_hand_what_autograd_does(printed):
    """The slope of w (min(r A, clip(r) A) - beta k3), with the signs that the page gives."""
    advantage, weight = 1.4997, 0.0357
    assert f"A = {advantage}, w = {weight}" in printed
    logps, refs = row(printed, "logp"), row(printed, "ref_logp")
    ratios = row(printed, "r = exp(logp - old_logp)")
    for logp, ref, ratio, slope in zip(
        logps, refs, ratios, row(printed, "d loss / d logp"), strict=False
    ):
        gain = ratio * advantage if ratio < 1 + learn.CLIP_HIGH else 0.0
        by_hand = -weight * (gain - learn.KL_BETA * (1 - math.exp(ref - logp)))
        assert by_hand == pytest.approx(slope, abs=1e-4)
    assert row(printed, "loss, the sum over N tokens")[0] == 0  # and yet the policy moved
    assert row(printed, "probability, exp(logp)")[1] > row(printed, "probability, exp(logp)")[0]


# --- Pictures -----------------------------------------------------------------------------
def test_the_clip_is_flat_on_one_side_of_each_sign():
    ratios = torch.tensor([0.5, 0.9, 1.1, 1.5])
    for advantage, values, flat in (
        (1.0, [0.5, 0.9, 1.1, 1.2], 3),
        (-1.0, [-0.8, -0.9, -1.1, -1.5], 0),
    ):
        got, slopes = learn_pictures.objective(ratios, advantage)
        torch.testing.assert_close(got, torch.tensor(values))
        assert (slopes == 0).nonzero().flatten().tolist() == [flat]


def test_three_estimates_of_the_kl():
    """For a policy (1/2, 1/2) and a reference (1/4, 3/4): KL = ln(4 / 3) / 2."""
    d = (torch.tensor([0.25, 0.75]) / 0.5).log()
    k1, k2, k3 = (values.mean().item() for values in learn_pictures.estimates(d).values())
    assert k1 == pytest.approx(math.log(4 / 3) / 2) == pytest.approx(k3)
    assert k2 != pytest.approx(k1, rel=0.05)


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_pictures, "FOLDER", tmp_path)
    learn_pictures.main()
    for name in learn_pictures.DRAWINGS:
        assert (tmp_path / name).stat().st_size > 10_000 and f"]({name})" in PAGE
        assert (ROOT / "docs" / name).exists()
