"""The messages between processes, as safetensors: ids to score, their log-probs, whole groups.

To score, the ids of one or several groups go to the reference server, which answers with log-probs
(`pack_ids`, `pack_logps`). Workers send their groups to the trainer (`pack_group`). Completions are
concatenated without padding, N tokens in all. Nothing is pickled, so a body is only data. Ids to
score, and groups of workers (rank_0.Workers.check), are checked before use.
"""

import hashlib
import json
import struct

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from grpo.models import vocab_size_of
from grpo.sample import Group, Sample

PROTOCOL = 8  # trainer, server and workers need the same; raise it if routes or blobs change

WEIGHTS = 256  # of each parameter of a model, about, that its hash reads

KINDS = ("prompt", "completion")
IDS = [f"{kind}_{what}" for kind in KINDS for what in ("ids", "lengths")] + ["group_sizes"]
IDS = dict.fromkeys(IDS, torch.int32)  # of a request to score
TENSORS = {  # of a group
    "prompt_ids": torch.int32,  # (P,)
    "completion_ids": torch.int32,  # (N,)
    "completion_lengths": torch.int32,  # (G,)
    "logps": torch.float32,  # (N,): of the policy that sampled, at its temperature
    "is_model_token": torch.bool,  # (N,): False if the task wrote the token
    "truncated": torch.bool,  # (G,)
    "tool_calls": torch.int32,  # (G, 2): calls of TOOLS that were made, that failed
    "rewards": torch.float64,  # (G, K), a column per name in reward_names; NaN: does not apply
}
METADATA = {"id": str, "run": str, "version": int, "index": int, "sampler": str, "outcome": str}
METADATA |= {"reward_names": list}  # K texts


# --- Ids to score -----------------------------------------------------------------------
def pack_ids(groups) -> bytes:
    """Returns the body of POST /score: the ids of K groups, with M completions in all."""

    tensors = {
        "prompt_ids": [id for group in groups for id in group.prompt],  # of the K prompts
        "prompt_lengths": [len(group.prompt) for group in groups],  # (K,)
        "completion_ids": [id for group in groups for id in group.ids],  # (N,)
        "completion_lengths": [len(s.ids) for group in groups for s in group.samples],  # (M,)
        "group_sizes": [len(group.samples) for group in groups],  # (K,), sum M
    }
    return safetensors.numpy.save({name: np.array(x, np.int32) for name, x in tensors.items()})


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


def check_parts(kind, ids, lengths, vocab_size):
    """Raises ValueError unless `lengths` (M,) sum to the number of `ids` (N,), all valid ids."""
    flat = ids.dim() == lengths.dim() == 1 and len(lengths)
    require(flat, f"{kind}_ids and {kind}_lengths must have one dimension, and not be empty")
    total = int(lengths.sum())
    fit = lengths.min() >= 1 and total == len(ids)
    require(fit, f"{kind}_lengths must be 1 or more and sum to {len(ids)} ids, not to {total}")
    last, low, high = vocab_size - 1, int(ids.min()), int(ids.max())
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
    logps, sizes = tensors["logps"], [len(group.ids) for group in groups]
    fit = logps.shape == (sum(sizes),) and logps.isfinite().all()
    require(fit, f"the answer must be {sum(sizes)} finite log-probs")
    return list(logps.split(sizes))


# --- Groups ---------------------------------------------------------------------------
def pack_group(group) -> bytes:
    """Returns a worker's Group as one safetensors blob."""
    samples, names = group.samples, list(group.samples[0].rewards)
    masks = [sample.is_model_token or [True] * len(sample.ids) for sample in samples]
    tensors = {
        "prompt_ids": np.array(group.prompt, np.int32),
        "completion_ids": np.array(group.ids, np.int32),
        "completion_lengths": np.array([len(sample.ids) for sample in samples], np.int32),
        "logps": np.array([p for sample in samples for p in sample.logps], np.float32),
        "is_model_token": np.array([holds for mask in masks for holds in mask]),
        "truncated": np.array([sample.truncated for sample in samples]),
        "tool_calls": np.array([sample.tool_calls for sample in samples], np.int32),
        "rewards": np.array([[s.rewards[name] for name in names] for s in samples], np.float64),
    }
    meta = {"protocol": PROTOCOL, "reward_names": names}
    meta = {name: getattr(group, name, None) for name in METADATA} | meta
    return safetensors.numpy.save(tensors, {"grpo": json.dumps(meta)})  # a third of torch's time


def read_group(body):
    """Returns the metadata and tensors of a group, for group_of. Raises ValueError with the reason
    if a part is missing, or has another type."""
    meta, tensors = read_blob(body, "with a group in it", TENSORS, protocol=PROTOCOL)
    for name, kind in METADATA.items():
        require(type(meta.get(name)) is kind, f"{name} must be of the type {kind.__name__}")
    return meta, tensors


def group_of(meta, tensors):
    """Returns the Group in read_group's result, once that was checked, without its item."""
    names, lengths = meta["reward_names"], tensors["completion_lengths"].tolist()
    parts = (tensors[x].split(lengths) for x in ("completion_ids", "logps", "is_model_token"))
    rows = (tensors[x].tolist() for x in ("truncated", "tool_calls", "rewards"))
    samples = []
    for ids, logps, mask, truncated, calls, rewards in zip(*parts, *rows, strict=True):
        mask = None if mask.all() else mask.tolist()
        named = {"tool_calls": tuple(calls), "rewards": dict(zip(names, rewards, strict=True))}
        samples.append(Sample(ids.tolist(), logps.tolist(), truncated, mask, **named))
    facts = {name: meta[name] for name in METADATA if name != "reward_names"}
    return Group(item=None, prompt=tensors["prompt_ids"].tolist(), samples=samples, **facts)


def read_blob(blob, what, dtypes, protocol=None):
    """Returns a safetensors blob's metadata and its tensors, {name: tensor}, which must have the
    names and `dtypes` given. `protocol` is that of a group; other bodies have none. Raises
    ValueError."""
    try:
        tensors = safetensors.torch.load(blob)  # checks the header
        (size,) = struct.unpack_from("<Q", blob)
        header = json.loads(blob[8 : 8 + size])
        meta = dict(json.loads((header.get("__metadata__") or {}).get("grpo", "{}")))
        json.dumps(meta, ensure_ascii=False).encode()  # half a surrogate pair could not be logged
    # What a made-up header raises in safetensors, torch and json (RecursionError is a RuntimeError)
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ValueError(f"not a safetensors blob {what}: {error!r:.500}") from error
    # Before the tensors, which may have other names
    right = protocol is None or meta.get("protocol") == protocol
    require(right, f"the protocol must be {protocol}: update the older side")
    require(
        tensors.keys() == dtypes.keys(), f"tensors must be {sorted(dtypes)}, got {sorted(tensors)}"
    )
    for name, tensor in tensors.items():
        require(tensor.dtype == dtypes[name], f"{name} must be {dtypes[name]}, got {tensor.dtype}")
    return meta, tensors


# --- Check ----------------------------------------------------------------------------
def require(holds, reason):
    if not holds:
        raise ValueError(reason)


def sha256_of(path) -> str:
    """Returns the file's SHA-256, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_of(model):
    """Returns a hash of a model's configuration, which another version of transformers may complete
    otherwise, and of a sample of its weights. Weights of 4 bits (uint8), which a GPU may round
    otherwise, do not count."""
    config = model.config.to_dict()
    # How it was saved and loaded
    of_file = ("dtype", "torch_dtype", "transformers_version", "quantization_config")
    config = {k: v for k, v in config.items() if not k.startswith("_") and k not in of_file}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for weight in model.parameters():
        if weight.is_floating_point():
            flat = weight.detach().flatten()
            few = flat[:: max(1, len(flat) // WEIGHTS)].to(torch.bfloat16)
            digest.update(few.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def facts_of(tokenizer):
    """Returns the facts, by name, that must be equal on trainer, server and workers."""
    vocab = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    facts = {"protocol": PROTOCOL, "vocab_size": vocab_size_of(tokenizer)}
    return facts | {"tokenizer": hashlib.sha256(vocab).hexdigest()[:16]}


def check_facts(facts, mine, reference, policy):
    """Raises SystemExit if a reference's facts_of differ from the policy's, `mine`, because its
    log-probs would not fit. `reference` and `policy` name the two."""
    wrong = [f"{k} {facts.get(k)} instead of {v}" for k, v in mine.items() if facts.get(k) != v]
    if wrong:
        raise SystemExit(
            f"the reference {reference} does not fit the policy {policy}: it has"
            f" {', '.join(wrong)}. Both sides need models with the same tokenizer, and the same"
            " version of this code"
        )
