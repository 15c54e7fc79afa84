"""Writes tests/trl_loss_table.json: TRL's GRPO loss, and its gradient, on three small batches.

    python3 -m venv ../venv-trl && ../venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    PYTHONPATH=. ../venv-trl/bin/python tests/trl_loss_table.py

TRL is an oracle here, not a dependency: the table is kept, and test_loss_trl.py compares our loss
with it. Every number is from the `compute_loss` of a real GRPOTrainer, in float64. One method is
replaced, the forward pass, so that the log-probs are a leaf tensor of our choosing.

TRL's settings are its defaults, but for three. `use_bias_correction_kl` is off: our k3 is not
multiplied by the ratio. One micro-batch is the whole step, as TRL's `grpo` and `dr_grpo` average
over micro-batches. `max_completion_length` exceeds the width of the batch, so that `dr_grpo` can't
divide by that width.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from tiny import make_tiny

TABLE = Path(__file__).resolve().with_suffix(".json")
COMMAND = "PYTHONPATH=. ../venv-trl/bin/python tests/trl_loss_table.py"

LENGTHS = [7, 5, 3, 6, 1, 4]  # unmasked tokens of the 6 sequences
ADVANTAGES = [1.2, -0.4, -0.8, 0.9, 0.3, -1.2]  # two groups of three, each sums to 0
TRUNCATED = 3  # the sequence that is fully masked in `off_policy_masked`, as a truncated one may be
LOG_RATIOS = [0.4, -0.3, 0.1, -0.6, 0.7, 0.0, 0.2, -0.1]  # in turn; ratios 0.55 to 2.01
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # no ratio above is nearer than 0.05 to 0.8 or 1.28
MAX_COMPLETION_TOKENS = 10
LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]
KL_BETAS = [0.0, 0.04]


def make_batches():
    """Returns {name: batch}; a batch maps names to (6, 7) lists, (6,) for advantages. What the mask
    leaves out are plausible log-probs too."""
    generator = torch.Generator().manual_seed(0)
    rows, width = len(LENGTHS), max(LENGTHS)
    uniform = torch.rand(2, rows, width, generator=generator, dtype=torch.float64)
    logps = (-4.0 + 3.2 * uniform[0]).round(decimals=3)  # at most -0.8: old_logps stay below 0
    ref_logps = (logps - 0.7 + 1.4 * uniform[1]).round(decimals=3)
    turns = torch.arange(rows * width).reshape(rows, width) % len(LOG_RATIOS)
    log_ratios = torch.tensor(LOG_RATIOS, dtype=torch.float64)[turns]
    old_logps = (logps - log_ratios).round(decimals=3)
    mask = (torch.arange(width) < torch.tensor(LENGTHS)[:, None]).long()
    masked = mask.clone()
    masked[TRUNCATED] = 0

    def batch(old, mask):
        tensors = {"logps": logps, "old_logps": old, "ref_logps": ref_logps, "mask": mask}
        return {k: v.tolist() for k, v in tensors.items()} | {"advantages": ADVANTAGES}

    return {
        "on_policy": batch(logps, mask),
        "off_policy": batch(old_logps, mask),
        "off_policy_masked": batch(old_logps, masked),
    }


def make_trainer(folder, *, loss_type, kl_beta):
    args = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(LENGTHS),
        gradient_accumulation_steps=1,
        num_generations=3,
        max_completion_length=MAX_COMPLETION_TOKENS,
        loss_type=loss_type,
        beta=kl_beta,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        use_bias_correction_kl=False,
        use_vllm=False,
    )
    trainer = trl.GRPOTrainer(
        model=str(make_tiny(folder)),  # it is never run
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "hello"}] * len(LENGTHS)),
    )
    trainer.model.train()  # TRL's normaliser is another one in eval mode
    trainer.current_gradient_accumulation_steps = 1  # train() would set it
    return trainer


def trl_loss(trainer, batch, *, on_policy):
    """Returns TRL's loss (a float) and its gradient with respect to the log-probs, (6, 7) lists."""
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in batch.items()}
    logps = tensors["logps"].requires_grad_()
    entropies = torch.zeros_like(logps)  # logged by TRL, no part of the loss
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    mask = tensors["mask"].long()
    inputs = {
        "prompt_ids": torch.full((len(LENGTHS), 1), 2),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.full_like(mask, 2),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "ref_per_token_logps": tensors["ref_logps"],
        "num_items_in_batch": mask.sum(),
    }
    if not on_policy:  # without the key, TRL takes logps.detach() itself: its on-policy path
        inputs["old_per_token_logps"] = tensors["old_logps"]
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert (logps.grad[mask == 0] == 0).all(), "TRL gave a masked token a gradient"
    return loss.item(), logps.grad.tolist()


def main():
    batches, cases = make_batches(), []
    for loss_type in LOSS_TYPES:
        for kl_beta in KL_BETAS:
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(folder, loss_type=loss_type, kl_beta=kl_beta)
            for name, batch in batches.items():
                loss, grad = trl_loss(trainer, batch, on_policy=name == "on_policy")
                settings = {"batch": name, "loss_type": loss_type, "kl_beta": kl_beta}
                cases.append(settings | {"loss": loss, "grad": grad})
    versions = {library.__name__: library.__version__ for library in (trl, torch, transformers)}
    table = {
        "made_by": {"command": COMMAND, **versions},
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "batches": batches,
        "cases": cases,
    }
    TABLE.write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
