"""What tells rounding from a wrong sampler: mean k3, and the tilt, of a trainer against samplers.

    python demo.py && python -m benchmarks.noise runs/demo

Takes the demo's models, its warm start and the one trained for 100 updates. A sampler draws 8
completions of 64 training questions, the trainer finds its own log-probs for them, d is the
difference. Noise is added to the sampler's log-probs, at sizes that others published for bfloat16
(see grpo.proof.NOISE); a stale layer is that of the other of the two models.
"""

import sys
from pathlib import Path

import torch

from grpo.forward import CompletionModel
from grpo.loss import linear_logps
from grpo.models import load_tokenizer, prompt_ids
from grpo.proof import NOISE, TILT
from grpo.sampling.policy import load_policy
from grpo.sampling.sampler import sample_groups
from tasks import arithmetic

G = 8


def compare(trainer, sampler, temperature=1.0, noise=0.0):
    """Returns (mean |d|, mean k3, tilt) over the tokens that `sampler` draws."""
    chats = [arithmetic.messages(item) for item in arithmetic.load("train")[:64]]
    prompts = [prompt_ids(trainer.tokenizer, chat) for chat in chats]
    generator = torch.Generator().manual_seed(0)
    settings = {"max_new_tokens": 24, "temperature": temperature, "generator": generator}
    settings |= {"eos_ids": sampler.eos_ids, "vocab_size": sampler.vocab_size}
    groups = sample_groups(sampler.model, prompts, group_size=G, **settings)
    model, d, surprise = CompletionModel(trainer.model, share_prompts=True), [], []
    for prompt, group in zip(prompts, groups, strict=True):
        with torch.no_grad():
            hidden, ids = model([prompt] * G, [c.ids for c in group])
            scored = {"vocab_size": trainer.vocab_size, "entropy": True}
            logps, entropy = linear_logps(hidden, model.head, ids, **scored)
        drawn = torch.tensor([p for c in group for p in c.logps])
        drawn += noise * torch.randn(len(drawn), generator=generator)
        d.append((logps - drawn).double())
        surprise.append((logps + entropy).double())
    d, surprise = torch.cat(d), torch.cat(surprise)
    tilt = (d * surprise).sum() / (surprise**2).sum()
    return d.abs().mean().item(), (d.expm1() - d).mean().item(), tilt.item()


def main(run):
    folders = {"warm start": run / "warm_start", "trained": max(run.glob("step_*"))}
    print(f"Limits: mean k3 {NOISE}, tilt {TILT}\n")
    print("| model | trainer and sampler | mean abs d | mean k3 | tilt |\n|---|---|---|---|---|")

    def load(name, dtype):
        return load_policy(str(folders[name]), load_tokenizer(str(folders[name])), dtype)

    for name, other in zip(folders, list(folders)[::-1], strict=True):
        half, exact = load(name, "bfloat16"), load(name, "float32")
        rows = {"float32": (exact, exact), "bfloat16": (half, half)}
        rows |= {"float32, bfloat16": (exact, half), "float32, at 1.05": (exact, exact, 1.05)}
        rows |= {"bfloat16, noise 0.055": (half, half, 1.0, 0.055)}
        rows |= {"bfloat16, noise 0.084": (half, half, 1.0, 0.084)}
        rows |= {"bfloat16, at 1.05": (half, half, 1.05)}
        rows |= {"bfloat16, at 1.05, noise 0.055": (half, half, 1.05, 0.055)}
        for layer in range(2):
            stale = load(name, "bfloat16")
            old = load(other, "bfloat16").model.model.layers[layer].state_dict()
            stale.model.model.layers[layer].load_state_dict(old)
            rows[f"bfloat16, layer {layer} stale"] = (half, stale)
        for what, case in rows.items():
            gap, k3, tilt = compare(*case)
            print(f"| {name} | {what} | {gap:.1e} | {k3:.1e} | {tilt:+.4f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
