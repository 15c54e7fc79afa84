"""What travels between samplers, reference server and trainer: groups, each a safetensors blob.

A group is a prompt and its G completions, N tokens in all, laid one after another without padding:

    prompt_ids         int32 (P,)        completion_lengths int32 (G,)
    completion_ids     int32 (N,)        the sampled ids: text is never tokenised again
    sampler_logps    float32 (N,)        under the policy that sampled, at the sampling temperature
    truncated           bool (G,)        cut at the length limit: the last token is not EOS
    rewards          float32 (G, K)      raw, a column for each name in reward_names
    ref_logps        float32 (N,)        under the reference model; added by the server
    metadata (JSON)                      protocol, id, run, policy_version, item, sampler, outcome,
                                         skipped, reward_names

Several groups, in one upload or in the answer to a lease, are a blob of blobs (`pack_bodies`).
Nothing is pickled, so a body can only ever be data. Who reads one checks it first (`unpack_group`).
"""

import hashlib
import json
import struct
from dataclasses import dataclass

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

PROTOCOL = 3  # raised when the routes change; trainer and server must agree
GROUP_PROTOCOL = 2  # raised when a group changes: stores hold those of older servers, too
MAX_HEADER_BYTES = 1 << 16  # a group's is 1 KB; 16 MB of header took 3.5 s and 300 MB to refuse
MAX_COMPLETIONS = 10_000  # of a group; joining two flat ones of 500 000 each took 14 s


@dataclass
class Group:
    """A prompt and its completions; tensors on the CPU, shapes as above."""

    id: str  # unique in its run: uploading it twice is the same as once
    run: str
    policy_version: int  # optimiser updates that the sampling policy had behind it
    item: int  # index of the question in the task's training split
    sampler: str  # who sampled: "trainer", or a worker's name
    outcome: str  # the reward that says right or wrong: a group in which it is constant is flat
    skipped: dict  # sums over flat groups that the sampler left out before this one; see tally()
    reward_names: list[str]
    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    completion_lengths: torch.Tensor
    sampler_logps: torch.Tensor
    truncated: torch.Tensor
    rewards: torch.Tensor
    ref_logps: torch.Tensor | None = None

    @property
    def flat(self):
        """Whether all are right, or all wrong: there is nothing to compare."""
        outcomes = self.rewards[:, self.reward_names.index(self.outcome)]
        return is_flat(outcomes.tolist())

    def completions(self, flat):
        """Splits a flat (N,) tensor into its G completions. Example: lengths 2, 1 -> [ab, c]"""
        return list(flat.split(self.completion_lengths.tolist()))


def is_flat(values):
    """Example: [1, 1, 1] -> True; [1, -1, 1] -> False"""
    return max(values) - min(values) < 1e-6


TENSORS = {
    "prompt_ids": torch.int32,
    "completion_ids": torch.int32,
    "completion_lengths": torch.int32,
    "sampler_logps": torch.float32,
    "truncated": torch.bool,
    "rewards": torch.float32,
    "ref_logps": torch.float32,
}
METADATA = {"id": str, "run": str, "policy_version": int, "item": int}
METADATA |= {"sampler": str, "outcome": str, "skipped": dict, "reward_names": list}
# What reading a blob raises; RuntimeError: JSON nested too deeply, torch's view of 4-bit dtypes
UNREADABLE = (safetensors.SafetensorError, struct.error)
UNREADABLE += (ValueError, KeyError, TypeError, RuntimeError)


def pack_group(group):
    """-> the group as one safetensors blob (bytes)."""
    fields = vars(group)  # not asdict, which copies every tensor with its whole storage
    tensors = {k: fields[k].contiguous().numpy() for k in TENSORS if fields[k] is not None}
    meta = {"protocol": GROUP_PROTOCOL} | {k: fields[k] for k in METADATA}
    return safetensors.numpy.save(tensors, {"grpo": json.dumps(meta)})  # a third of torch's time


def pack_bodies(bodies):
    """-> {id: body} as the parts of one safetensors blob: each body a uint8 tensor under its id.

    By hand: safetensors.torch.save copies 16 MB several times, and meanwhile no thread can run.
    """
    header, end = {}, 0
    for id, body in bodies.items():
        begin, end = end, end + len(body)
        header[id] = {"dtype": "U8", "shape": [len(body)], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *bodies.values()]


def unpack_bodies(blob, *, max_header_bytes=MAX_HEADER_BYTES):
    """-> {id: body} of a blob of pack_bodies, in its order. Raises ValueError when it is none."""
    try:
        header_bytes = check_header(blob, max_header_bytes)
        bodies = safetensors.torch.load(blob)  # in an order of its own
        names = [name for name in json.loads(blob[8 : 8 + header_bytes]) if name in bodies]
    except UNREADABLE as error:
        raise ValueError(f"not a safetensors blob of groups: {error!r}") from error
    if not bodies or any(x.dtype != torch.uint8 or x.dim() != 1 for x in bodies.values()):
        raise ValueError("a blob of groups must hold them as uint8 tensors of one dimension")
    return {id: bodies[id].numpy().tobytes() for id in names}


def check_header(blob, most):
    """-> the bytes of its header. Raises ValueError, or struct.error, if they can't be right."""
    (header_bytes,) = struct.unpack_from("<Q", blob)
    if header_bytes > most:
        raise ValueError(f"its header claims {header_bytes} bytes")
    return header_bytes


def unpack_group(body, *, vocab_size=None, max_tokens=None):
    """-> the Group in a blob, checked. Raises ValueError with the reason when it is malformed.

    `vocab_size` bounds the ids, `max_tokens` the length of prompt plus completion.
    """
    try:
        header_bytes = check_header(body, MAX_HEADER_BYTES)
        tensors = safetensors.torch.load(body)
        meta = json.loads(json.loads(body[8 : 8 + header_bytes])["__metadata__"]["grpo"])
    except UNREADABLE as error:
        raise ValueError(f"not a safetensors blob with a group in it: {error!r}") from error
    if type(meta) is not dict:
        raise ValueError(f"the metadata must be a JSON object, got {type(meta).__name__}")
    if type(meta.get("protocol")) is not int or meta["protocol"] != GROUP_PROTOCOL:
        raise ValueError(f"its protocol must be {GROUP_PROTOCOL}; update the older side")
    for name, kind in METADATA.items():
        if type(meta.get(name)) is not kind:
            raise ValueError(f"metadata {name!r} must be {kind.__name__}, got {meta.get(name)!r}")
    missing = TENSORS.keys() - tensors.keys() - {"ref_logps"}
    if missing or tensors.keys() - TENSORS.keys():
        raise ValueError(f"tensors must be {sorted(TENSORS)}, got {sorted(tensors)}")
    for name, tensor in tensors.items():
        if tensor.dtype != TENSORS[name]:
            raise ValueError(f"{name} must be {TENSORS[name]}, got {tensor.dtype}")
    group = Group(**{k: meta[k] for k in METADATA}, **tensors)
    check_group(group, vocab_size, max_tokens)
    return group


def check_group(g, vocab_size, max_tokens):
    """Raises ValueError with the reason if the group's tensors do not fit one another."""
    if not 0 < len(g.id) <= 200 or not 0 < len(g.run) <= 200:
        raise ValueError("id and run must have 1 to 200 characters")
    # SQLite can't take half a surrogate pair, nor safetensors this name for a tensor (lease)
    if not (g.id + g.run + g.sampler).isprintable() or g.id == "__metadata__":
        raise ValueError("id, run and sampler must be printable, and id not __metadata__")
    if not 0 <= g.policy_version < 2**63 or not 0 <= g.item < 2**63:
        raise ValueError("policy_version and item must not be negative, nor need over 64 bits")
    if not g.reward_names or not all(isinstance(name, str) for name in g.reward_names):
        raise ValueError(f"reward_names must be a list of names, got {g.reward_names!r}")
    if len(set(g.reward_names)) < len(g.reward_names):
        raise ValueError(f"reward_names must differ, got {g.reward_names!r}")
    if g.outcome not in g.reward_names or not 0 < len(g.sampler) <= 200:
        raise ValueError("outcome must be one of reward_names, sampler 1 to 200 characters")
    numbers = all(type(x) in (int, float) and abs(x) < 1e15 for x in g.skipped.values())
    if len(g.skipped) > 100 or not numbers:
        raise ValueError("skipped must be at most 100 finite numbers by name")
    # The trainer prints and logs them
    if not all(0 < len(x) <= 200 and x.isprintable() for x in [*g.reward_names, *g.skipped]):
        raise ValueError("names in reward_names and skipped must be printable, 1 to 200 characters")
    if g.completion_lengths.dim() != 1 or g.completion_lengths.numel() == 0:
        raise ValueError("completion_lengths must be (G,) with G of 1 or more")
    if len(g.completion_lengths) > MAX_COMPLETIONS:
        raise ValueError(f"a group has at most {MAX_COMPLETIONS} completions")
    if g.completion_lengths.min() < 1:
        raise ValueError("every completion must have at least one token (EOS counts)")
    size, tokens = len(g.completion_lengths), int(g.completion_lengths.sum(dtype=torch.int64))
    shapes = {
        "completion_ids": (tokens,),
        "sampler_logps": (tokens,),
        "truncated": (size,),
        "rewards": (size, len(g.reward_names)),
    } | ({"ref_logps": (tokens,)} if g.ref_logps is not None else {})
    for name, shape in shapes.items():
        if tuple(getattr(g, name).shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(getattr(g, name).shape)}")
    if g.truncated.view(torch.uint8).max() > 1:  # torch takes any byte for a bool
        raise ValueError("truncated must be of bytes 0 and 1")
    if g.prompt_ids.dim() != 1 or g.prompt_ids.numel() == 0:
        raise ValueError("prompt_ids must be (P,) with P of 1 or more")
    ids = torch.cat([g.prompt_ids, g.completion_ids])
    if ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size):
        bound = "up" if vocab_size is None else vocab_size - 1
        raise ValueError(f"token ids must lie in 0..{bound}, got {ids.min()}..{ids.max()}")
    if not torch.isfinite(g.rewards).all():
        raise ValueError("rewards must be finite")
    if not torch.isfinite(g.sampler_logps).all() or g.sampler_logps.max() > 1e-3:
        raise ValueError("sampler_logps must be finite and not positive")
    if g.ref_logps is not None and not torch.isfinite(g.ref_logps).all():
        raise ValueError("ref_logps must be finite")
    longest = len(g.prompt_ids) + int(g.completion_lengths.max())
    if max_tokens is not None and longest > max_tokens:
        raise ValueError(f"{longest} tokens exceed the reference model's context of {max_tokens}")


def sha256_of(path):
    """-> the file's SHA-256, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def tokenizer_facts(tokenizer):
    """-> {"vocab_size", "tokenizer"}: ids that the tokenizer can emit, and its fingerprint.

    A model's embedding may have more rows than that, as padding (Qwen2.5: 151 936 or 152 064 rows
    for 151 665 ids). Only the tokenizer's ids are sampled and counted in the softmax, on both
    sides, so that a policy and a reference with different padding define the same distribution's
    support.
    """
    vocab = tokenizer.get_vocab()
    digest = hashlib.sha256(json.dumps(sorted(vocab.items())).encode()).hexdigest()
    return {"vocab_size": max(vocab.values()) + 1, "tokenizer": digest[:16]}
