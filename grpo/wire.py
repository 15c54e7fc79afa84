"""What travels between samplers, reference server and trainer: groups, each a safetensors blob.

A group is a prompt and its G completions, N tokens in all, laid one after another without padding:
the tensors below, and metadata as JSON. Several groups, in one upload or in the answer to a lease,
are a blob of blobs (`pack_bodies`). Nothing is pickled, so a body can only ever be data. The
receiver checks it first (`unpack_group`).
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass

import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

PROTOCOL = 3  # raised when the routes change; trainer and server must agree
GROUP_PROTOCOL = 2  # raised when a group changes: stores hold those of older servers, too
MAX_HEADER_BYTES = 1 << 16  # a group's is 1 KB; 16 MB of header took 3.5 s and 300 MB to refuse
MAX_COMPLETIONS = 10_000  # of a group; to pack 100 000 of one token for scoring took 2 minutes

TENSORS = {
    "prompt_ids": torch.int32,  # (P,)
    "completion_ids": torch.int32,  # (N,), the sampled ids: text is never tokenised again
    "completion_lengths": torch.int32,  # (G,)
    "sampler_logps": torch.float32,  # (N,), of the policy that sampled, at its temperature
    "truncated": torch.bool,  # (G,), cut at the length limit: neither EOS nor a stop string ends it
    "rewards": torch.float32,  # (G, K), raw, a column for each of reward_names; NaN: not applicable
    "ref_logps": torch.float32,  # (N,), of the reference model; added by the server
}
# What reading a blob raises; RuntimeError: JSON nested too deeply, torch's view of 4-bit dtypes
UNREADABLE = (SafetensorError, struct.error, ValueError, KeyError, TypeError, RuntimeError)


@dataclass
class Group:
    """A prompt and its completions; tensors on the CPU, as above."""

    id: str  # unique in its run: a repeated upload changes nothing
    run: str
    policy_version: int  # optimiser updates behind the policy that sampled
    item: int  # index of the question in the task's training split
    sampler: str  # "trainer", or a worker's name
    outcome: str  # the reward that tells right from wrong
    skipped: dict  # sums over the flat groups that the sampler left out before this one: tally()
    reward_names: list  # K texts
    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    completion_lengths: torch.Tensor
    sampler_logps: torch.Tensor
    truncated: torch.Tensor
    rewards: torch.Tensor
    ref_logps: torch.Tensor | None = None

    def completions(self, tensor):
        """Returns the parts of a (N,) tensor: a tensor for each of the G completions."""
        return list(tensor.split(self.completion_lengths.tolist()))


METADATA = {k: kind for k, kind in Group.__annotations__.items() if k not in TENSORS}


# --- Pack and unpack ------------------------------------------------------------------
def pack_group(group: Group) -> bytes:
    """Returns the group as one safetensors blob."""
    fields = vars(group)  # not asdict, which copies every tensor with its whole storage
    tensors = {k: fields[k].contiguous().numpy() for k in TENSORS if fields[k] is not None}
    meta = {"protocol": GROUP_PROTOCOL} | {k: fields[k] for k in METADATA}
    return safetensors.numpy.save(tensors, {"grpo": json.dumps(meta)})  # a third of torch's time


def unpack_group(body, *, vocab_size=None, max_tokens=None) -> Group:
    """Returns the Group in a blob, checked. Raises ValueError with the reason if it is malformed.

    `vocab_size` bounds the ids, `max_tokens` the length of prompt plus completion.
    """
    meta, tensors = read_blob(body, "with a group in it", MAX_HEADER_BYTES)
    require(type(meta) is dict, f"the metadata must be a JSON object, got {type(meta).__name__}")
    current = meta.get("protocol") == GROUP_PROTOCOL and type(meta["protocol"]) is int
    require(current, f"its protocol must be {GROUP_PROTOCOL}; update the older side")
    for name, kind in METADATA.items():
        value = meta.get(name)
        require(type(value) is kind, f"metadata {name!r} must be {kind.__name__}, got {value!r}")
    complete = TENSORS.keys() - {"ref_logps"} <= tensors.keys() <= TENSORS.keys()
    require(complete, f"tensors must be {sorted(TENSORS)}, got {sorted(tensors)}")
    for name, tensor in tensors.items():
        dtype = TENSORS[name]
        require(tensor.dtype == dtype, f"{name} must be {dtype}, got {tensor.dtype}")
    group = Group(**{k: meta[k] for k in METADATA}, **tensors)
    check_group(group, vocab_size, max_tokens)
    return group


def pack_bodies(bodies):
    """Returns {id: body} as one blob, in parts: each body is a uint8 tensor under its id.

    By hand: safetensors.torch.save copies 16 MB several times, and blocks all threads meanwhile.
    """
    header, end = {}, 0
    for id, body in bodies.items():
        begin, end = end, end + len(body)
        header[id] = {"dtype": "U8", "shape": [len(body)], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *bodies.values()]


def unpack_bodies(blob, *, max_header_bytes=MAX_HEADER_BYTES):
    """Returns {id: body} of a blob of pack_bodies, in its order. Raises ValueError."""
    _, bodies = read_blob(blob, "of groups", max_header_bytes)
    if not bodies or any(x.dtype != torch.uint8 or x.dim() != 1 for x in bodies.values()):
        raise ValueError("a blob of groups must hold them as uint8 tensors of one dimension")
    return {id: body.numpy().tobytes() for id, body in bodies.items()}


def read_blob(blob, what, max_header_bytes):
    """Returns a safetensors blob's metadata and its tensors, in its order. Raises ValueError."""
    try:
        (size,) = struct.unpack_from("<Q", blob)
        require(size <= max_header_bytes, f"its header claims {size} bytes")
        tensors = safetensors.torch.load(blob)  # checks the header; in an order of its own
        header = json.loads(blob[8 : 8 + size])
        meta = json.loads((header.pop("__metadata__", None) or {}).get("grpo", "null"))
        return meta, {name: tensors[name] for name in header}
    except UNREADABLE as error:
        raise ValueError(f"not a safetensors blob {what}: {error!r}") from error


# --- Check ----------------------------------------------------------------------------
def require(holds, reason):
    if not holds:
        raise ValueError(reason)


def is_name(text):
    """Whether it can be logged, and stored: SQLite can't take half a surrogate pair."""
    return 0 < len(text) <= 200 and text.isprintable()


def check_metadata(g):
    names, rewards = [g.id, g.run, g.sampler, *g.reward_names, *g.skipped], g.reward_names
    printable = all(isinstance(name, str) and is_name(name) for name in names)
    require(printable, "id, run, sampler and other names must be printable, 1 to 200 characters")
    require(g.id != "__metadata__", "id may be any name but not __metadata__")  # see pack_bodies
    in_range = 0 <= g.policy_version < 2**63 and 0 <= g.item < 2**63
    require(in_range, "policy_version and item must not be negative, nor need over 64 bits")
    differ = 0 < len(rewards) == len(set(rewards))
    require(differ, f"reward_names must be a list of names that differ, got {rewards!r}")
    require(g.outcome in rewards, f"outcome must be one of reward_names, got {g.outcome!r}")
    numbers = all(type(x) in (int, float) and abs(x) < 1e30 for x in g.skipped.values())
    require(numbers and len(g.skipped) <= 100, "skipped must be at most 100 finite numbers by name")


def check_group(g, vocab_size=None, max_tokens=None):
    """Raises ValueError with the reason if the group's fields do not fit one another."""
    check_metadata(g)
    lengths, prompt = g.completion_lengths, g.prompt_ids
    many = lengths.dim() == 1 and lengths.numel() > 0
    require(many, "completion_lengths must be (G,) with G of 1 or more")
    G, N = len(lengths), int(lengths.sum(dtype=torch.int64))
    require(G <= MAX_COMPLETIONS, f"a group has at most {MAX_COMPLETIONS} completions")
    require(lengths.min() >= 1, "every completion must have at least one token (EOS counts)")
    shapes = dict.fromkeys(("completion_ids", "sampler_logps", "ref_logps"), (N,))
    shapes |= {"truncated": (G,), "rewards": (G, len(g.reward_names))}
    for name, shape in shapes.items():
        if (tensor := getattr(g, name)) is not None:  # ref_logps may be missing
            found = tuple(tensor.shape)
            require(found == shape, f"{name} must be {shape}, got {found[:9]}")
            # A NaN reward does not apply. Older servers refuse it, so GROUP_PROTOCOL stays
            bad = tensor.isinf() if name == "rewards" else ~tensor.isfinite()
            require(not bad.any(), f"{name} must be finite")
    require(g.sampler_logps.max() <= 1e-3, "sampler_logps must be log-probs, not positive")
    # torch takes any byte for a bool
    require(g.truncated.view(torch.uint8).max() <= 1, "truncated must be of bytes 0 and 1")
    some = prompt.dim() == 1 and prompt.numel() > 0
    require(some, "prompt_ids must be (P,) with P of 1 or more")
    ids, last = torch.cat([prompt, g.completion_ids]), (vocab_size or math.inf) - 1
    low, high = int(ids.min()), int(ids.max())
    require(0 <= low <= high <= last, f"token ids must lie in 0..{last}, got {low}..{high}")
    longest = len(prompt) + int(lengths.max())
    fits = max_tokens is None or longest <= max_tokens
    require(fits, f"{longest} tokens exceed the reference model's context of {max_tokens}")


def sha256_of(path) -> str:
    """Returns the file's SHA-256, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def tokenizer_facts(tokenizer):
    """Returns {"vocab_size", "tokenizer"}: how many ids the tokenizer has, and its fingerprint.

    A model's embedding may have more rows than that, as padding (Qwen2.5: 151 936 or 152 064 rows
    for 151 665 ids). Only the tokenizer's ids are sampled and counted in the softmax, on both
    sides, so that policy and reference have the same support whatever their padding.
    """
    vocab = tokenizer.get_vocab()
    digest = hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
    return {"vocab_size": max(vocab.values()) + 1, "tokenizer": digest[:16]}
