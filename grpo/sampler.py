"""Samples groups of completions from a model: token ids, and the log-prob of each.

    groups = sample_groups(model, prompts, group_size=8, max_new_tokens=512, temperature=1.0,
                           eos_ids={2}, vocab_size=151_665, generator=None)

We do not use `model.generate`: it takes every setting that we do not name from the model's
generation config (Qwen2.5-Instruct ships top_p 0.8, top_k 20, repetition_penalty 1.05), and then we
would train on log-probs of another distribution than the sampled one. Here there is one
distribution, softmax(logits / temperature) over the tokenizer's ids. It is also faster: a prompt
runs once for its group (decoder.py), and new prompts replace finished sequences.
Symbols: G completions of a prompt, S sequences in the batch, T completion tokens, V tokenizer ids.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from grpo.decoder import make_decoder
from grpo.sample import Prompt, Sample


def completion_text(tokenizer, completion, eos_ids):
    """Returns a completion's text, without the EOS if one ended it."""
    ids = completion.ids[:-1] if completion.ids[-1] in eos_ids else completion.ids
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def sample_groups(model, prompts, *, max_sequences=None, **settings):
    """Returns a list of G Samples for each of the prompts, which are lists of token ids.

    At most `max_sequences` are sampled at once (None: all); stream_groups explains the `settings`.
    """
    settings["max_sequences"] = max_sequences or len(prompts) * settings["group_size"]
    longest = max(map(len, prompts), default=0)
    asked = itertools.starmap(Prompt, enumerate(prompts))
    groups = dict(stream_groups(model, asked, longest_prompt=longest, **settings))
    return [groups[i] for i in range(len(prompts))]


@torch.no_grad()
def stream_groups(
    model,
    prompts,
    *,
    group_size,
    max_sequences,
    longest_prompt,
    max_new_tokens,
    temperature,
    eos_ids,
    vocab_size,
    generator,
    stop_strings=None,
):
    """Yields (key, [Sample] * G) for each group, as soon as its last completion has ended.

    `prompts` is an iterator of Prompts; None means that there is no prompt now. It is read when a
    group has room and enough sequences have ended to justify a copy of the cache. The stream ends
    when all sequences have ended and the iterator yields no prompt, even if it might yield one
    later. Completions are drawn from softmax(logits / temperature); temperature 0 is greedy, with
    log-probs at temperature 1. The softmax excludes ids from `vocab_size` on, the embedding's
    padding, here, in the trainer and in the reference server. `generator` is a
    torch.Generator on the model's device. With `stop_strings`, a StopStrings, each token costs a
    second wait for the device, and the host checks every new id. Raises RuntimeError if a
    completion ends whose logits were not finite.
    """
    running = None
    while True:
        if not (running and running.unfinished):
            running = Running(max_new_tokens, eos_ids, stop_strings, model.device)
            decoder = make_decoder(model, max_new_tokens, longest_prompt)
        room = groups_to_admit(running, decoder, max_sequences, group_size)
        check_ids(new := next_prompts(prompts, room), vocab_size)
        # Dropping copies the cache too: we drop many at once, or with an admission, which copies it
        many = running.ended > len(running.rows) // decoder.compaction
        if many or (new and running.ended):
            decoder.keep(running.drop_ended())
        logits = []  # (S, V') of the next tokens; V' is V plus the padding of the embedding
        if running.rows:
            logits.append(decoder.next_logits(running.tokens))
        if new:
            sizes = running.add(new, group_size)
            logits.append(decoder.admit([prompt.ids for prompt in new], sizes))
        if not logits:
            return
        logits = torch.cat(logits) if len(logits) > 1 else logits[0]
        tokens, logps = draw(logits[:, :vocab_size], temperature, generator)
        for (key, group), number, completion in running.write(tokens, logps):
            group[number] = completion
            if all(group):
                yield key, group


def next_prompts(prompts, most):
    """Returns the prompts of an iterator up to its first None, at most `most` of them."""
    return list(itertools.takewhile(bool, itertools.islice(prompts, most)))


def check_ids(prompts, vocab_size):
    """Raises SystemExit if a prompt has an id without an embedding (models.FOREIGN_IDS)."""
    for prompt in prompts:
        if (id := max(prompt.ids)) >= vocab_size:
            raise SystemExit(
                f"a prompt has the token {id}, for which the model has no embedding: resize the"
                " model's embeddings, or leave the token out of prompts and chat template"
            )


def groups_to_admit(running, decoder, max_sequences, group_size):
    """Returns how many groups to admit. Admitting copies the cache of running sequences, so we wait
    until a share of 1 / `compaction` has ended since the last time, and then fill all places."""
    unused = max(0, max_sequences - running.most) // group_size  # room that no prompt has taken
    room = (max_sequences - running.unfinished) // group_size
    ended, most = (room - unused) * group_size, max_sequences - unused * group_size
    pays = decoder.joins and ended >= most // decoder.compaction
    return room if pays or not running.unfinished else 0


@dataclass
class Row:
    """What a sequence of the batch is."""

    group: tuple  # key, and its G completions
    number: int  # in the group
    first: int  # the column where it starts; all end at the same one: a lower limit starts later


class Running:
    """The S sequences of the batch. Ended ones stay, unread, until drop_ended removes them."""

    def __init__(self, max_new_tokens, eos_ids, stop_strings, device):
        self.limit, self.eos_ids, self.stop_strings = max_new_tokens, eos_ids, stop_strings
        self.eos = torch.tensor(sorted(eos_ids), device=device)
        self.rows = []  # (S,)
        self.unfinished = self.most = 0  # how many have not ended: now, after the last admission
        self.ids = torch.zeros(0, max_new_tokens, dtype=torch.long, device=device)  # (S, T)
        self.logps = torch.zeros(0, max_new_tokens, device=device)  # (S, T)
        self.ends = torch.zeros(0, dtype=torch.long, device=device)  # (S,) the next column
        self.active = torch.zeros(0, dtype=torch.bool, device=device)
        self.tokens = None  # (S,) the last token of each sequence

    @property
    def ended(self):
        return len(self.rows) - self.unfinished

    def add(self, prompts, group_size):
        """Adds G empty sequences for each group that the prompts start. Returns the number of
        sequences of each prompt."""
        new, sizes = [], []
        for key, _, number, limit in prompts:
            groups = [(key, [None] * group_size) for _ in range(number)]
            at = self.limit - (limit or self.limit)
            new += [Row(group, i, at) for group in groups for i in range(group_size)]
            sizes.append(number * group_size)
        count = len(new)
        self.rows += new
        self.unfinished = self.most = self.unfinished + count
        self.ids, self.logps = pad(self.ids, (0, 0, 0, count)), pad(self.logps, (0, 0, 0, count))
        first = torch.tensor([row.first for row in new], device=self.ends.device)
        self.ends = torch.cat([self.ends, first])
        self.active = pad(self.active, (0, count), value=True)
        return sizes

    def drop_ended(self):
        """Removes ended sequences; returns the indices (S',) of the remaining ones."""
        stay = self.active.nonzero().flatten()
        self.rows = [self.rows[i] for i in stay.tolist()]
        self.ids, self.logps, self.ends = self.ids[stay], self.logps[stay], self.ends[stay]
        self.active, self.tokens = self.active[stay], self.tokens[stay]
        return stay

    def write(self, tokens, logps):
        """Adds a token to each sequence; yields (group, number, Sample) of those that end."""
        self.tokens = tokens
        column = self.ends.clamp(max=self.limit - 1)[:, None]  # past the end it is never read
        self.ids.scatter_(1, column, tokens[:, None])
        self.logps.scatter_(1, column, logps[:, None])
        self.ends += self.active
        ended = self.active & (torch.isin(tokens, self.eos) | (self.ends == self.limit))
        stopped = self.stop_strings.ended(self) if self.stop_strings else []
        if stopped:
            ended[stopped] = True
        self.active &= ~ended
        last = ended.nonzero().flatten()  # the only wait for the device per token
        if not len(last):
            return
        self.unfinished -= len(last)
        lists = (x[last].tolist() for x in (self.ids, self.logps, self.ends))
        for i, ids, found, end in zip(last.tolist(), *lists, strict=True):
            row = self.rows[i]
            ids, found = ids[row.first : end], found[row.first : end]
            if not math.isfinite(sum(found)):
                raise RuntimeError("the model's logits are not finite: its weights are broken")
            truncated = ids[-1] not in self.eos_ids and i not in stopped
            yield row.group, row.number, Sample(ids, found, truncated)


def draw(logits, temperature, generator):
    """Returns tokens (S,) drawn from logits (S, V), and their log-probs (S,).

    On a CPU we invert the distribution function, with one uniform number per sequence: a race draws
    V random numbers, which is slow there.
    """
    if temperature and logits.device.type != "cpu":
        from grpo.options.gpu.decoding import race

        return race(logits.float() / temperature, generator)
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        below = log_probs.exp().cumsum(-1, dtype=torch.float64)  # float32 sums would lose rare ids
        uniform = below.new_empty(len(below), 1).uniform_(generator=generator)
        tokens = torch.searchsorted(below, uniform * below[:, -1:], right=True).squeeze(1)
        tokens = tokens.clamp_(max=below.shape[1] - 1)  # for NaN it finds V, beyond all ids
    else:
        tokens = log_probs.argmax(-1)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)
