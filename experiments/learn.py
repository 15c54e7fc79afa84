"""The numbers of docs/learn.md: one group of GRPO, from its question to what it has changed.

    .venv/bin/python -m experiments.learn      # a few seconds, no GPU
    .venv/bin/python -m experiments.learn REWARDS="1 1 0 0" UPDATES=6      # or ADVANTAGE_STD=False

A tiny model answers one question, four times; the project's functions do the rest: sampler,
advantages, token weights, log-probs, loss. tests/test_learn.py compares the page with the output.
In float64, so that other machines print the same digits.
"""

import math
import re

import torch

from grpo import constants
from grpo.commands.tiny_model import make_model, make_tokenizer, next_token_loss
from grpo.loss import LOSS_TYPES, group_advantages, linear_logps, policy_loss, token_weights
from grpo.models import prompt_ids
from grpo.sampler import sample_groups
from tasks import arithmetic

QUESTION, ANSWER = "7+5=?", "12"
KNOWN = ["12", "12", "12", "2", "2", "2", "7+5=12", "7+5=2"]  # what the model has learned to answer
SEED = 0
FOLLOWED = 4  # the token that is followed: so many of the first completion's are before it

# As in grpo_ref_split.py, but for a smaller group, three updates and a tiny model's rate
GROUP_SIZE = 4
CLIP_LOW, CLIP_HIGH, KL_BETA = 0.2, 0.2, 0.04
CLIPS = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
ADAM_BETAS = (0.9, 0.99)
MAX_GRAD_NORM = 1.0
MAX_COMPLETION_TOKENS = 8
LEARNING_RATE = 1e-4
FOUR = 'None, or four numbers: "1 1 0 0"', lambda r: re.fullmatch(r"None|(-?[\d.]+ ?){4}", str(r))
# Of a command. REWARDS are the group's, such as "1 1 0 0"; None: is_right's
DEFAULTS = {"UPDATES": 3, "ADVANTAGE_STD": True, "REWARDS": None}
KINDS = [(constants.WHOLE, "UPDATES"), (constants.FLAG, "ADVANTAGE_STD"), (FOUR, "REWARDS")]


# --- A model and a group ----------------------------------------------------------------
def start():
    """Returns (model, tokenizer, prompt's ids): a policy that answers QUESTION as KNOWN does."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(arithmetic)
    model = make_model(tokenizer).double()
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": QUESTION}])
    ends = [tokenizer.eos_token_id]
    examples = [(prompt + tokenizer(t)["input_ids"] + ends, len(prompt)) for t in KNOWN]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=ADAM_BETAS)
    for _ in range(40):
        next_token_loss(model, examples).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer, prompt


def sample(model, tokenizer, prompt):
    """Returns GROUP_SIZE completions: ids that end with EOS, and the sampler's log-probs."""
    settings = {"group_size": GROUP_SIZE, "max_new_tokens": MAX_COMPLETION_TOKENS}
    settings |= {"eos_ids": {tokenizer.eos_token_id}, "vocab_size": len(tokenizer)}
    draw = torch.Generator().manual_seed(SEED)
    (group,) = sample_groups(model, [prompt], temperature=1.0, generator=draw, **settings)
    return group


def weights_of(lengths, loss_type):
    """Returns the weight (G,) of a token of each completion."""
    counts = {"sequences": GROUP_SIZE, "tokens": int(lengths.sum()), "loss_type": loss_type}
    return token_weights(lengths, max_completion_tokens=MAX_COMPLETION_TOKENS, **counts)


def logits_of(model, tokenizer, prompt, ids):
    """Returns the logits (T, V) from which the ids of a completion are drawn."""
    # Row t of the logits predicts token t + 1, so the prompt's last row predicts our first
    return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, : len(tokenizer)]


def logps_of(model, tokenizer, prompt, completions):
    """Returns the log-probs (N,) of the completions' ids, one after another, and those of all ids
    where the followed token stands, (V,)."""
    logits = [logits_of(model, tokenizer, prompt, c.ids) for c in completions]
    pairs = zip(logits, completions, strict=True)
    logps = [linear_logps(rows, None, torch.tensor(c.ids)) for rows, c in pairs]
    return torch.cat(logps), logits[0][FOLLOWED].log_softmax(-1).detach()


@torch.no_grad()
def logp_of(model, tokenizer, prompt, ids):
    """Returns the log-prob of a whole completion."""
    return linear_logps(logits_of(model, tokenizer, prompt, ids), None, torch.tensor(ids)).sum()


def is_right(completion):
    """A toy's reward: 1 for the right number at the end. For real ones see tasks/."""
    return completion.split("=")[-1] == ANSWER


# --- Three updates ----------------------------------------------------------------------
def train(model, tokenizer, prompt, completions, advantages, weights, updates):
    """Makes so many updates on the group, as the trainer does. Returns (columns, distributions):
    before each update and after the last {name: value of the followed token}, and the log-probs of
    all ids where it stands, (V,)."""
    lengths = torch.tensor([len(c.ids) for c in completions])
    given = [x.double().repeat_interleave(lengths) for x in (advantages, weights)]  # (G,) -> (N,)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0)
    columns, distributions, first = [], [], None
    for _ in range(updates + 1):
        logps, there = logps_of(model, tokenizer, prompt, completions)
        first = logps.detach() if first is None else first  # of the sampler and of the reference
        at = logps.detach().requires_grad_()  # the loss, as a function of the N log-probs
        loss, stats = policy_loss(at, first, first, *given, **CLIPS, kl_beta=KL_BETA)
        (slope,) = torch.autograd.grad(loss, at)
        optimizer.zero_grad()
        logps.backward(slope)  # the rest of the chain rule, from the log-probs to the weights
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        tokens = (at, first, stats["ratio"], stats["kl"], slope, *given)
        column = column_of(*(values[FOLLOWED].item() for values in tokens))
        columns.append(column | {"loss, the sum over N tokens": loss.item()})
        columns[-1]["norm of the gradient"] = norm.item()
        columns[-1]["tokens clipped, of N"] = (stats["clip_low"] | stats["clip_high"]).sum().item()
        distributions.append(there)
        if len(columns) <= updates:
            optimizer.step()
    return columns, distributions


def column_of(logp, old_logp, ratio, k3, slope, A, w):
    """Returns {name: value} of the followed token, whose old_logp is its ref_logp, too."""
    clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH) * A
    return {
        "probability, exp(logp)": math.exp(logp),
        "logp": logp,
        "old_logp": old_logp,
        "ref_logp": old_logp,
        "r = exp(logp - old_logp)": ratio,
        "r A": ratio * A,
        "clip(r) A": clipped,
        "k3, of d = ref_logp - logp": k3,
        "its part of the loss": -w * (min(ratio * A, clipped) - KL_BETA * k3),
        "d loss / d logp": slope,
    }


def exact(value):
    """Returns the value to 4 digits, where rounding errors may have made -0.0000 of 0."""
    return round(value, 4) + 0


# --- The page's tables ------------------------------------------------------------------
def show_group(tokenizer, prompt, completions, rewards, advantages, weights):
    print(f"question {QUESTION}   right answer {ANSWER}   prompt, P = {len(prompt)} ids")
    heads = f"{'T':>3}{'reward':>8}{'advantage':>11}{'weight':>9}{'w A':>9}"
    print(f"\n{'completion':<12}{'ids':<22}{heads}")
    for c, reward, a, w in zip(completions, rewards, advantages, weights, strict=True):
        text, ids = tokenizer.decode(c.ids[:-1]), " ".join(map(str, c.ids))
        print(f"{text:<12}{ids:<22}{len(c.ids):>3}{reward:>8.0f}{a:>+11.4f}{w:>9.4f}{a * w:>+9.4f}")
    tokens = sum(len(c.ids) for c in completions)
    print(f"mean {rewards.mean():.2f}, standard deviation {rewards.std():.2f}, N = {tokens}")


def show_token(tokenizer, ids, columns, advantage, weight):
    token, before = tokenizer.decode(ids[FOLLOWED]), tokenizer.decode(ids[:FOLLOWED])
    print(f'token "{token}" after "{before}": A = {advantage:.4f}, w = {weight:.4f}\n')
    heads = [f"update {n + 1}" for n in range(len(columns) - 1)] + ["afterwards"]
    print(f"{'':<28}" + "".join(f"{head:>12}" for head in heads))
    for name in columns[0]:
        # Afterwards there is no update, only a new policy
        shown = columns if name in ("probability, exp(logp)", "logp") else columns[:-1]
        form = "d" if "clipped" in name else ".4f"
        print(f"{name:<28}" + "".join(f"{exact(c[name]):>12{form}}" for c in shown))


def answer_probs(model, tokenizer, prompt):
    """Returns {answer: probability that the model gives it}, for all that it has learned."""
    ids = {text: tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in KNOWN}
    return {text: logp_of(model, tokenizer, prompt, i).exp().item() for text, i in ids.items()}


def show_answers(before, after):
    print(f"{'answer':<14}{'before':>8}{'after':>9}")
    for text in before:
        print(f"{text:<14}{before[text]:>8.4f}{after[text]:>9.4f}")
    right = [sum(p for text, p in probs.items() if is_right(text)) for probs in (before, after)]
    print(f"{'right, in sum':<14}{right[0]:>8.4f}{right[1]:>9.4f}")


def estimates(d):
    """Returns {name: (N,)} of three estimates of the KL at d = ref_logp - logp, k3 by the loss."""
    zeros = torch.zeros_like(d)
    _, stats = policy_loss(zeros, zeros, d, zeros, zeros, **CLIPS, kl_beta=1)
    return {"k1 = -d": -d, "k2 = d^2 / 2": d**2 / 2, "k3 = exp(d) - d - 1": stats["kl"]}


def show_kl(policy, reference):
    """Exact, over all V ids: no sampling."""
    p, d = policy.exp(), reference - policy
    print(f"KL(policy || reference) = {(-p * d).sum():.4f}\n")
    print(f"{'':<26}{'mean':>8}{'standard deviation':>21}")
    for name, k in estimates(d).items():
        mean = (p * k).sum()
        print(f"{name:<26}{mean:>8.4f}{(p * (k - mean) ** 2).sum().sqrt():>21.4f}")
    print(f"\nk3 at d = -5, 0 and 5: {math.exp(-5) + 4:.1f}, 0 and {math.exp(5) - 6:.1f}")


def show_temperature(tokenizer, logps):
    print(f"{'token':<8}{'tau = 1':>8}{'tau = 0.9':>11}{'difference':>13}")
    cooler = (logps / 0.9).softmax(-1)
    for i in logps.topk(2).indices.tolist():
        one, other = logps[i].exp(), cooler[i]
        print(f"{tokenizer.decode([i]):<8}{one:>8.4f}{other:>11.4f}{other - one:>+13.4f}")


def show_weights(lengths, weights):
    print(f"{'T':<10}" + "".join(f"{n:>9}" for n in lengths.tolist()) + "    w x T")
    for name, values in weights.items():
        shown = "".join(f"{w:>9.4f}" for w in values)
        print(f"{name:<10}{shown}    " + "  ".join(f"{x:.2f}" for x in values * lengths))


def show_mixed():
    """A group is mixed unless all are right, p^G, or all wrong, (1 - p)^G."""
    shares, sizes = (0.01, 0.05, 0.1, 0.3, 0.5), (4, 8, 16, 64)
    print("accuracy" + "".join(f"{f'G = {size}':>9}" for size in sizes))
    for p in shares:
        print(f"{p:<8}" + "".join(f"{1 - p**n - (1 - p) ** n:>9.2f}" for n in sizes))


def chapter(title, show, *given):
    print(f"--- {title} ---")
    show(*given)
    print()


def main(**given):
    c = constants.checked("experiments/learn.py", DEFAULTS, given, KINDS, [])
    policy = _, tokenizer, prompt = start()
    completions = sample(*policy)
    right = [is_right(tokenizer.decode(c.ids[:-1])) for c in completions]
    rewards = torch.tensor([float(r) for r in (c.REWARDS.split() if c.REWARDS else right)])
    advantages = group_advantages(rewards, scale_by_std=c.ADVANTAGE_STD)
    lengths = torch.tensor([len(c.ids) for c in completions])
    w = (weights := {name: weights_of(lengths, name) for name in LOSS_TYPES})["grpo"]
    chapter("a group", show_group, tokenizer, prompt, completions, rewards, advantages, w)
    before = answer_probs(*policy)
    columns, logps = train(*policy, completions, advantages, w, c.UPDATES)
    chapter("a token", show_token, tokenizer, completions[0].ids, columns, advantages[0], w[0])
    chapter("all answers", show_answers, before, answer_probs(*policy))
    chapter("the KL there", show_kl, logps[-1], logps[0])
    chapter("temperature", show_temperature, tokenizer, logps[-1])
    chapter("token weights", show_weights, lengths, weights)
    chapter("mixed groups", show_mixed)


if __name__ == "__main__":
    main(**constants.command_line(DEFAULTS, __doc__)[1])
