"""The messages between processes, as safetensors: ids to score, their log-probs, whole groups.

To score, the ids of one or several groups go to the reference server and their log-probs come back
(`pack_ids`, `pack_logps`). A `Group` is a prompt and its G completions with everything known about
them; ranks exchange groups, and workers send theirs to the trainer (`pack_group`). Completions are
concatenated without padding, N tokens in all. Nothing is pickled, so a body is only data, and the
receiver checks it before use.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

PROTOCOL = 4  # trainer, server and workers need the same; raise it if routes or blobs change

KINDS = ("prompt", "completion")
IDS = [f"{kind}_{what}" for kind in KINDS for what in ("ids", "lengths")] + ["group_sizes"]
IDS = dict.fromkeys(IDS, torch.int32)  # of a request to score
TENSORS = {  # of a group
    "prompt_ids": torch.int32,  # (P,)
    "completion_ids": torch.int32,  # (N,), as sampled; text is never tokenised again
    "completion_lengths": torch.int32,  # (G,)
    "sampler_logps": torch.float32,  # (N,), of the policy that sampled, at its temperature
    "truncated": torch.bool,  # (G,), cut at the length limit, without EOS or a stop string
    "rewards": torch.float32,  # (G, K), raw, a column for each of reward_names; NaN: not applicable
    "ref_logps": torch.float32,  # (N,), of the reference model; a rank attaches them
    "own": torch.bool,  # (N,), False: a token that the task added (turns); absent: all True
}


@dataclass
class Group:
    """A prompt and its completions; tensors on the CPU, as above."""

    id: str  # unique in its run; a step trains its groups in the order of their ids
    run: str
    policy_version: int  # number of optimiser updates of the policy that sampled
    item: int  # index of the question in the task's training split
    sampler: str  # "trainer", or a worker's name
    outcome: str  # the reward that tells right from wrong
    skipped: dict  # tally() of the flat groups that the sampler skipped before this one
    reward_names: list  # K texts
    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    completion_lengths: torch.Tensor
    sampler_logps: torch.Tensor
    truncated: torch.Tensor
    rewards: torch.Tensor
    ref_logps: torch.Tensor | None = None
    own: torch.Tensor | None = None

    def completions(self, tensor):
        """Returns the parts of a (N,) tensor: a tensor for each of the G completions."""
        return list(tensor.split(self.completion_lengths.tolist()))

    def owns(self):
        """Returns a bool (T,) for each of the G completions: which tokens the model sampled."""
        everything = torch.ones_like(self.completion_ids, dtype=torch.bool)
        return self.completions(everything if self.own is None else self.own)


METADATA = {name: kind for name, kind in Group.__annotations__.items() if name not in TENSORS}


# --- Ids to score -----------------------------------------------------------------------
def pack_ids(groups) -> bytes:
    """Returns the body of POST /score: the ids of K groups, with M completions in all."""

    def joined(name):
        return np.concatenate([getattr(group, name).numpy() for group in groups])

    def lengths(values):
        return np.array([len(value) for value in values], dtype=np.int32)

    tensors = {
        "prompt_ids": joined("prompt_ids"),  # the K prompts
        "prompt_lengths": lengths(group.prompt_ids for group in groups),  # (K,)
        "completion_ids": joined("completion_ids"),  # (N,)
        "completion_lengths": joined("completion_lengths"),  # (M,)
        "group_sizes": lengths(group.completion_lengths for group in groups),  # (K,), sum M
    }
    return safetensors.numpy.save(tensors)


def unpack_ids(body, *, vocab_size, max_tokens):
    """Returns the checked tensors of pack_ids, for ids_by_sequence.

    `vocab_size` bounds the ids, `max_tokens` (None: no limit) the length of prompt plus completion.
    Raises ValueError with the reason if the body is malformed.
    """
    _, tensors = read_blob(body, "of ids", IDS)
    (p, c), sizes = (tensors[f"{kind}_lengths"] for kind in KINDS), tensors["group_sizes"]
    for kind in KINDS:
        check_parts(kind, tensors[f"{kind}_ids"], tensors[f"{kind}_lengths"], vocab_size)
    fit = sizes.shape == p.shape and sizes.min() >= 1 and int(sizes.sum()) == len(c)
    require(fit, f"group_sizes must be {len(p)} numbers, 1 or more, that sum to {len(c)}")
    longest = int((p.repeat_interleave(sizes) + c).max())
    fits = max_tokens is None or longest <= max_tokens
    require(fits, f"{longest} tokens exceed the model's context of {max_tokens}")
    return tensors


def check_parts(kind, ids, lengths, vocab_size=None):
    """Raises ValueError unless `lengths` (M,) sum to the number of `ids` (N,), all valid ids."""
    flat = ids.dim() == lengths.dim() == 1 and len(lengths)
    require(flat, f"{kind}_ids and {kind}_lengths must have one dimension, and not be empty")
    total = int(lengths.sum())
    fit = lengths.min() >= 1 and total == len(ids)
    require(fit, f"{kind}_lengths must be 1 or more and sum to {len(ids)} ids, not to {total}")
    last, low, high = (vocab_size or math.inf) - 1, int(ids.min()), int(ids.max())
    require(0 <= low <= high <= last, f"token ids must lie in 0..{last}, got {low}..{high}")


def ids_by_sequence(tensors):
    """Returns (prompts, completions), two lists of M lists of ids, with a prompt per completion.
    The lists take ten times the memory of the tensors."""
    prompts, completions = (
        [
            part.tolist()
            for part in tensors[f"{kind}_ids"].split(tensors[f"{kind}_lengths"].tolist())
        ]
        for kind in ("prompt", "completion")
    )
    sizes = tensors["group_sizes"].tolist()
    prompts = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
    return prompts, completions


def pack_logps(logps) -> bytes:
    """Returns the answer to POST /score: the completions' log-probs (N,), float32."""
    return safetensors.numpy.save({"logps": logps.numpy()})


def unpack_logps(body, groups):
    """Returns the log-probs (N,) of each group, in order. Raises ValueError if they don't fit."""
    _, tensors = read_blob(body, "of log-probs", {"logps": torch.float32})
    logps, sizes = tensors["logps"], [len(group.completion_ids) for group in groups]
    fit = logps.shape == (sum(sizes),) and logps.isfinite().all()
    require(fit, f"the answer must be {sum(sizes)} finite log-probs")
    return list(logps.split(sizes))


# --- Groups ---------------------------------------------------------------------------
def pack_group(group: Group) -> bytes:
    """Returns the group as one safetensors blob."""
    fields = vars(group)  # not asdict, which copies every tensor with its whole storage
    tensors = {k: fields[k].contiguous().numpy() for k in TENSORS if fields[k] is not None}
    meta = {"protocol": PROTOCOL} | {k: fields[k] for k in METADATA}
    return safetensors.numpy.save(tensors, {"grpo": json.dumps(meta)})  # a third of torch's time


def unpack_group(body) -> Group:
    """Returns the checked Group in a blob. Raises ValueError with the reason if it is malformed."""
    meta, tensors = read_blob(body, "with a group in it", TENSORS, optional={"ref_logps", "own"})
    current = meta.get("protocol") == PROTOCOL
    require(current, f"the protocol must be {PROTOCOL}: update the older side")
    for name, kind in METADATA.items():
        require(type(meta.get(name)) is kind, f"{name} must be of the type {kind.__name__}")
    group = Group(**{name: meta[name] for name in METADATA}, **tensors)
    check_group(group)
    return group


def read_blob(blob, what, dtypes, optional=frozenset()):
    """Returns a safetensors blob's metadata and its tensors, {name: tensor}, which must have the
    names and `dtypes` given; `optional` names may be missing. Raises ValueError."""
    try:
        tensors = safetensors.torch.load(blob)  # checks the header
        (size,) = struct.unpack_from("<Q", blob)
        header = json.loads(blob[8 : 8 + size])
        meta = dict(json.loads((header.get("__metadata__") or {}).get("grpo", "{}")))
        json.dumps(meta, ensure_ascii=False).encode()  # half a surrogate pair could not be logged
    # What a made-up header raises in safetensors, torch and json (RecursionError is a RuntimeError)
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ValueError(f"not a safetensors blob {what}: {error!r:.500}") from error
    complete = dtypes.keys() - optional <= tensors.keys() <= dtypes.keys()
    require(complete, f"tensors must be {sorted(dtypes)}, got {sorted(tensors)}")
    for name, tensor in tensors.items():
        require(tensor.dtype == dtypes[name], f"{name} must be {dtypes[name]}, got {tensor.dtype}")
    return meta, tensors


# --- Check ----------------------------------------------------------------------------
def require(holds, reason):
    if not holds:
        raise ValueError(reason)


def is_count(x):
    """Returns whether a JSON value is a number that can be added up: finite, and below 2^53."""
    return type(x) in (int, float) and abs(x) < 1 << 53


def check_group(g):
    """Raises ValueError with the reason if the group's fields do not fit one another."""
    check_parts("completion", g.completion_ids, g.completion_lengths)
    texts, numbers = [*g.reward_names, *g.skipped], g.skipped.values()
    kinds = all(type(x) is str for x in texts) and all(map(is_count, numbers))
    require(kinds, "reward_names must be texts, and skipped numbers by name")
    require(g.policy_version >= 0, f"policy_version must be 0 or more, got {g.policy_version}")
    require(g.outcome in g.reward_names, f"outcome must be one of reward_names, got {g.outcome!r}")
    G, N = len(g.completion_lengths), len(g.completion_ids)
    shapes = {"sampler_logps": (N,), "ref_logps": (N,), "own": (N,)}
    shapes |= {"truncated": (G,), "rewards": (G, len(g.reward_names))}
    for name, shape in shapes.items():
        if (tensor := getattr(g, name)) is not None:  # ref_logps and own may be missing
            require(tensor.shape == shape, f"{name} must be {shape}, got {tuple(tensor.shape)}")
            # A NaN reward does not apply
            bad = tensor.isinf() if name == "rewards" else ~tensor.isfinite()
            require(not bad.any(), f"{name} must be finite")
    ends = all(own[0] and own[-1] for own in g.owns())
    require(ends, "a completion must begin and end with a token that the model sampled")


def sha256_of(path) -> str:
    """Returns the file's SHA-256, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vocab_size_of(tokenizer):
    """Returns V, the number of ids that the tokenizer has.

    A model's embedding may have more rows than that, as padding (Qwen2.5: 151 936 or 152 064 rows
    for 151 665 ids). Only the tokenizer's ids are sampled and counted in the softmax, on both
    sides, so that policy and reference have the same support whatever their padding.
    """
    return max(tokenizer.get_vocab().values()) + 1


def facts_of(tokenizer, temperature):
    """Returns the facts, by name, that must be equal on trainer, server and workers."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    facts = {"protocol": PROTOCOL, "temperature": temperature}
    facts |= {"vocab_size": vocab_size_of(tokenizer)}
    return facts | {"tokenizer": hashlib.sha256(vocab).hexdigest()[:16]}


def check_facts(facts, mine, reference, policy):
    """Raises SystemExit if a reference's facts_of differ from the policy's, `mine`, because its
    log-probs would not fit. `reference` and `policy` name the two."""
    wrong = [f"{k} {facts.get(k)} instead of {v}" for k, v in mine.items() if facts.get(k) != v]
    if wrong:
        raise SystemExit(
            f"the reference {reference} does not fit the policy {policy}: it has"
            f" {', '.join(wrong)}. Both sides need the same TEMPERATURE, models with the same"
            " tokenizer, and the same version of this code"
        )
