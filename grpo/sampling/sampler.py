"""Samples groups of completions from the live policy: token ids, and the log-prob of each.

    groups = sample_groups(model, prompts, group_size=8, max_new_tokens=512, temperature=1.0,
                           eos_ids={2}, vocab_size=151_665, generator=None)

Why not `model.generate`: transformers fills every setting that we do not name from the model's
own generation config (Qwen2.5-Instruct ships top_p 0.8, top_k 20, repetition_penalty 1.05), and
then the log-probs that we train on are not those of the distribution that was sampled. This loop
knows one distribution, softmax(logits / temperature) over the tokenizer's ids: nothing to inherit.
It is faster too (decode.py): a prompt runs once for its whole group and is attended to once,
finished rows leave the batch, and prompts that wait take their place.

It knows nothing of HTTP, DeepSpeed or rewards. Symbols: B prompts, G completions of each, S rows in
the batch, T completion tokens, V ids of the tokenizer.
"""

import math
from dataclasses import dataclass

import torch

from grpo.sampling.decoders.choice import make_decoder


@dataclass
class Completion:
    """One sampled completion; `ids` ends with EOS unless `truncated`."""

    ids: list[int]
    logps: list[float]  # log-prob of each sampled id, at the sampling temperature, from float32
    truncated: bool  # cut at max_new_tokens: its last token is not EOS


def sample_groups(model, prompts, *, max_rows=None, **settings):
    """-> a list of G `Completion`s for each of the prompts, lists of token ids, in their order.

    At most `max_rows` rows are sampled at once (None: all); the rest as in stream_groups.
    """
    waiting = list(enumerate(prompts))[::-1]

    def take(count):
        return [waiting.pop() for _ in range(min(count, len(waiting)))]

    max_rows = max_rows or len(prompts) * settings["group_size"]
    longest = max(map(len, prompts), default=0)
    groups = dict(stream_groups(model, take, max_rows=max_rows, longest_prompt=longest, **settings))
    return [groups[i] for i in range(len(prompts))]


@torch.no_grad()
def stream_groups(
    model,
    take,
    *,
    group_size,
    max_rows,
    longest_prompt,
    max_new_tokens,
    temperature,
    eos_ids,
    vocab_size,
    generator,
):
    """Yields (key, [Completion] * G) for each prompt, as soon as its last completion has ended.

    `take(n)` gives up to n prompts, as (key, token ids); it is asked when there is room for a group
    and for some part (decoder.compaction) of `max_rows`, and the stream ends when all rows have
    ended and it gives none. Completions are drawn from softmax(logits / temperature); at 0 greedily
    (log-probs are then those at temperature 1). Ids from `vocab_size` on are the padding of the
    embedding: they are left out of the softmax here, in the trainer and in the reference server
    alike. `generator` is a torch.Generator on the model's device. No prompt is longer than
    `longest_prompt`. Raises RuntimeError where a completion ends whose logits were not finite.
    """
    device = model.device
    eos = torch.tensor(sorted(eos_ids), device=device)
    decoder = make_decoder(model, max_new_tokens, longest_prompt)
    groups, unfinished = {}, {}  # by key: completions, and how many of them are missing
    owners, running = [], 0  # (key, number) of each row; rows that have not ended
    rows, tokens = [], None
    while True:
        room = (max_rows - running) // group_size
        pays = room * group_size >= max_rows // decoder.compaction if decoder.joins else not running
        new = take(room) if room and pays else []
        # Rows that ended leave in bunches, for the others' past is copied then, or when others join
        if len(owners) - running > (0 if new else len(owners) // decoder.compaction):
            left = rows[-1].nonzero().flatten()
            rows, tokens = [x[left] for x in rows], tokens[left]
            owners = [owners[row] for row in left.tolist()]
            decoder.keep(left)
        if owners:
            logits = decoder.next_logits(
                tokens
            )  # (S, V'): V' is V plus the padding of the embedding
        if new:
            first = decoder.admit([ids for _, ids in new], group_size)  # (B * G, V')
            logits = first if not owners else torch.cat([logits, first])
            groups |= {key: [None] * group_size for key, _ in new}
            unfinished |= {key: group_size for key, _ in new}
            owners += [(key, i) for key, _ in new for i in range(group_size)]
            running += len(first)
            columns = max_new_tokens
            fresh = [
                torch.zeros(len(first), columns, dtype=torch.long, device=device),  # ids
                torch.zeros(len(first), columns, device=device),  # logps
                torch.zeros(len(first), dtype=torch.long, device=device),  # tokens so far
                torch.ones(len(first), dtype=torch.bool, device=device),  # still going
            ]
            rows = fresh if len(owners) == len(first) else list(map(torch.cat, zip(rows, fresh)))
        if not running:
            return

        ids, logps, at, going = rows
        tokens, chosen = draw(logits[:, :vocab_size], temperature, generator)  # (S,), (S,)
        column = at.clamp(max=max_new_tokens - 1)[:, None]  # a row that has ended is read already
        ids.scatter_(1, column, tokens[:, None])
        logps.scatter_(1, column, chosen[:, None])
        at += going
        ended = going & (torch.isin(tokens, eos) | (at == max_new_tokens))
        last = ended.nonzero().flatten()  # the one wait for the device in each turn
        if len(last):
            found = zip(last.tolist(), *(x[last].tolist() for x in (ids, logps, at)), strict=True)
            for row, row_ids, row_logps, n in found:
                if not math.isfinite(sum(row_logps[:n])):
                    raise RuntimeError("the model's logits are not finite: its weights are broken")
                key, i = owners[row]
                group, running = groups[key], running - 1
                cut = row_ids[n - 1] not in eos_ids
                group[i] = Completion(row_ids[:n], row_logps[:n], cut)
                unfinished[key] -= 1
                if not unfinished[key]:
                    yield key, groups.pop(key)
        going &= ~ended

        if not running:
            owners, decoder = [], make_decoder(model, max_new_tokens, longest_prompt)


def draw(logits, temperature, generator):
    """-> (tokens (S,), their log-probs (S,)) from logits (S, V)."""
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        # The inverse of the distribution function, at one uniform number for each row: multinomial
        # draws one for each id. Float64, or the sum over a large vocabulary would lose small ones.
        below = log_probs.exp().cumsum(-1, dtype=torch.float64)  # (S, V)
        uniform = torch.rand(
            len(below), 1, dtype=torch.float64, device=below.device, generator=generator
        )
        tokens = torch.searchsorted(below, uniform * below[:, -1:], right=True).squeeze(1)
        tokens.clamp_(max=below.shape[1] - 1)  # NaN is found beyond all ids: a device-side assert
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)
