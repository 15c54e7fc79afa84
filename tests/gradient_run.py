"""Run by test_ranks.py under the deepspeed launcher: a step's gradient, cut up in several ways.

deepspeed --num_gpus 2 tests/gradient_run.py MODEL OUT.pt
"""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from living import Live

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import grpo_ref_split as trainer
from grpo.checks import trainer_constants
from grpo.engine import make_engine
from grpo.forward import CompletionModel
from grpo.loss import linear_logps, token_weights
from grpo.prepare import load_policy
from grpo.ranks import join_ranks
from grpo.run import Clock, Progress
from grpo.sample import Group, Sample

BUDGETS = {"one batch": 10**6, "some": 60, "a row each": 1}


def make_rows(policy, loss_type):
    """-> 7 rows of very different length and 4 prompts, the same on every rank. With 2 ranks and a
    row a batch one rank has fewer: empty ones go on top, or the run would hang."""
    model = CompletionModel(policy.model)
    draw, rows = torch.Generator().manual_seed(0), []
    for i in range(7):
        prompt, completion = (
            torch.randint(policy.vocab_size, (n,), generator=draw).tolist()
            for n in (4 + i % 3, 1 + 4 * i)
        )
        if i % 2:
            prompt = rows[-1].group.prompt  # a group of two
        with torch.no_grad():  # old and reference log-probs near the model's, as they are in a run
            hidden, ids = model([prompt], [completion])
            logps = linear_logps(hidden, model.head, ids, vocab_size=policy.vocab_size)
        noise = torch.randn(3, len(completion), generator=draw) * 0.3
        names = ("ref_logps", "old_logps", "logps")
        noisy = dict(zip(names, (logps + noise).tolist(), strict=True))
        advantage = (-1.0) ** i * (1 + i)
        rows.append(Sample(completion, advantage=advantage, **noisy))
        Group(i, None, prompt, rows[-1:])
    lengths = torch.tensor([len(row.ids) for row in rows])
    sizes = {"sequences": 7, "tokens": int(lengths.sum()), "max_completion_tokens": 32}
    weights = token_weights(lengths, loss_type=loss_type, **sizes)
    for row, weight in zip(rows, weights.tolist(), strict=True):
        row.weight = weight
    return rows


def plain_gradient(policy, rows):
    """The specification: one batch, not packed, no chunks, no DeepSpeed, no plan."""
    c = trainer_constants(trainer.DEFAULTS, {})
    model = CompletionModel(policy.model)
    model.packs = False
    hidden, ids = model([row.group.prompt for row in rows], [row.ids for row in rows])
    with mock.patch.object(trainer.chunked, "linear_logps", linear_logps):
        loss, _ = trainer.batch_loss(c, hidden, model.head, ids, rows, policy.vocab_size)
    gradient = torch.autograd.grad(loss, list(policy.model.parameters()))
    return torch.cat([g.flatten() for g in gradient])


def bad_steps(engine, policy):
    """-> for two steps with a row that is not finite, and two without: whether they were skipped,
    and whether weights have changed."""
    result, c = [], trainer_constants(trainer.DEFAULTS, {"LEARNING_RATE": 1e-2})
    for value in (torch.nan, torch.inf, 0.0, 0.0):
        rows = make_rows(policy, "grpo")
        rows[3].ref_logps = [p + value for p in rows[3].ref_logps]
        before = [p.clone() for p in policy.model.parameters()]
        run = SimpleNamespace(engine=engine, policy=policy, sampler=policy, c=c, clock=Clock())
        run.reference, run.progress = (
            SimpleNamespace(info={"model": c.MODEL}),
            Progress("run", checked=True),
        )
        metrics = trainer.update(run, rows, 100)
        pairs = zip(before, policy.model.parameters(), strict=True)
        result.append((metrics["skipped"], any(bool((a != b).any()) for a, b in pairs)))
    return result


def saved(policy, folder):
    """-> (storages of the weights, the most bytes that a save copies at once, those of the largest
    weight). DeepSpeed has made all weights views of one storage, which save_pretrained copies."""
    weights, live = list(policy.model.parameters()), Live(policy.model)
    with live:
        live.reset()
        before = live.peak
        policy.save(folder)
    again = load_policy(str(folder), policy.tokenizer, "float32").model
    assert all(map(torch.equal, weights, again.parameters()))
    storages = len({weight.untyped_storage().data_ptr() for weight in weights})
    return storages, live.peak - before, max(weight.nbytes for weight in weights)


def main(model, out):
    from deepspeed.utils import safe_get_full_grad
    from transformers import AutoTokenizer

    c = trainer_constants(
        trainer.DEFAULTS, {"LEARNING_RATE": 0.0}
    )  # a step leaves the model as it is
    policy = load_policy(model, AutoTokenizer.from_pretrained(model), "float32")
    loss_types = ("grpo", "dapo", "dr_grpo")
    result = {(t, "plain"): plain_gradient(policy, make_rows(policy, t)) for t in loss_types}
    join_ranks(60)
    engine = make_engine(c, policy)
    run = SimpleNamespace(engine=engine, policy=policy)
    for loss_type in loss_types:
        for name, budget in BUDGETS.items():
            rows = make_rows(policy, loss_type)
            run.c = c.but(MICRO_BATCH_TOKENS=budget)
            metrics = trainer.accumulate(run, rows)
            gradient = [safe_get_full_grad(p).flatten() for p in policy.model.parameters()]
            result[loss_type, name] = torch.cat(gradient)
            result[loss_type, name, "metrics"] = metrics
            engine.step()
    if dist.get_rank() == 0:  # transformers writes on no other rank
        result["saved"] = saved(policy, f"{out}_model")
    result["bad"] = {"float32": bad_steps(engine, policy)}
    tokenizer = policy.tokenizer
    for dtype in ("float32", "bfloat16") if dist.get_world_size() > 1 else ():
        policy = load_policy(model, tokenizer, dtype)
        engine = make_engine(c.but(OFFLOAD_OPTIMIZER=True), policy)
        result["bad"][f"{dtype}, offload"] = bad_steps(engine, policy)
    if dist.get_rank() == 0:
        torch.save(result, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
