"""docs/learn.md: its numbers are what experiments/learn.py prints, its curves those of the loss."""

import contextlib
import io
import re

import pytest
import torch
from documents import ROOT, TEXT

import grpo_ref_split as trainer
from experiments import learn, learn_pictures
from grpo.loss import group_advantages, policy_loss, token_weights

PAGE = TEXT["docs/learn.md"]


@pytest.fixture(scope="module")
def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        learn.main()
    return out.getvalue()


def test_the_group_s_rewards_and_the_updates_are_set_in_the_command(capsys):
    learn.main(REWARDS="1 1 0 0", UPDATES=6, ADVANTAGE_STD=False)
    out = capsys.readouterr().out
    assert "mean 0.50" in out and "update 6" in out
    assert len(re.search(r"(?m)^logp (.*)", out)[1].split()) == 7
    advantages = re.findall(r"(?m)^\S+ +[\d ]+ ([+-]\d\.\d{4}) ", out)
    assert advantages[:4] == ["+0.5000", "+0.5000", "-0.5000", "-0.5000"]
    with pytest.raises(SystemExit, match="REWARDS = '1 1 0' must"):
        learn.main(REWARDS="1 1 0")


def test_every_block_of_the_page_is_printed(printed):
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == printed.count("--- ")
    assert re.findall(r"```text\n(.*?)```", TEXT["docs/learn.zh.md"], re.DOTALL) == blocks
    assert all(block in printed for block in blocks)


def test_what_is_said_to_be_shipped_is_what_the_trainer_has():
    shipped = [(name, getattr(learn, name)) for name in ("CLIP_LOW", "CLIP_HIGH", "KL_BETA")]
    for name, value in shipped:
        assert float(value) == trainer.DEFAULTS[name], name


def test_the_page_s_15_lines_are_the_loss(printed):
    """By value and gradient, at updates that are on-policy, moved, and clipped."""
    names = {}
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(block, names)  # noqa: S102 (the page's code)
    draw = torch.Generator().manual_seed(0)
    lengths, rewards = torch.tensor([2, 5, 3]), torch.tensor([1.0, 0.0, 0.5])
    ids = [torch.randint(0, 7, (int(n),), generator=draw) for n in lengths]
    logits = [torch.randn(len(i), 7, generator=draw).requires_grad_() for i in ids]
    logps = [names["logps_of"](*pair) for pair in zip(logits, ids, strict=True)]
    assert names["sft_loss"](logits[0], ids[0]).item() == pytest.approx(-logps[0].mean().item())
    for moved in (0.0, 0.1, 0.5):
        old, ref = ([x.detach() + k * moved for x in logps] for k in (-1, 1))
        mine = names["grpo_loss"](logits, ids, old, ref, rewards)
        weights = token_weights(
            lengths, loss_type="grpo", sequences=3, tokens=10, max_completion_tokens=8
        )
        flat = (group_advantages(rewards, scale_by_std=True), weights)
        flat = [values.repeat_interleave(lengths) for values in flat]
        theirs, stats = policy_loss(
            *map(torch.cat, (logps, old, ref)), *flat, **learn.CLIPS, kl_beta=learn.KL_BETA
        )
        assert stats["clip_high"].any() == (moved == 0.5)
        slopes = [torch.autograd.grad(x, logits, retain_graph=True) for x in (mine, theirs)]
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(*slopes)


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_pictures, "FOLDER", tmp_path)
    learn_pictures.main()
    for name in learn_pictures.DRAWINGS:
        assert (tmp_path / name).stat().st_size > 10_000 and f"]({name})" in PAGE
        assert (ROOT / "docs" / name).exists()
