"""The reference model of ref_server.py: it scores stored groups, and may become a run's policy.

A score is the log-prob of a sampled token: all that a KL penalty needs of the reference.
"""

import hashlib
import queue
import shutil
import sqlite3
import traceback
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from grpo.devices import accelerator, release_memory
from grpo.forward import CompletionModel
from grpo.models import load_model, load_tokenizer
from grpo.packing import number_prompts, pack_by_tokens, whole_groups
from grpo.serving.database import NO_SPACE
from grpo.weights import load_weights, merge_adapters
from grpo.wire import PROTOCOL, pack_group, tokenizer_facts, unpack_group
from grpo_loss_triton import linear_logps


# --- Scoring ------------------------------------------------------------------------
def score_sequences(model, prompts, completions, *, budget, temperature, vocab_size):
    """Yields {index of a sequence: its log-probs (T,)}, a batch at a time, float32 on the CPU; the
    shortest first: what is scored first is trained first.

    `model` is a CompletionModel, which runs a prompt once for neighbours that have the same. A
    batch has at most `budget` padded tokens, and is halved while it does not fit the GPU. Raises
    OutOfMemoryError if a single sequence does not fit.
    """
    numbers = number_prompts(prompts, model.shares)
    sizes = [(n, len(p), len(c)) for n, p, c in zip(numbers, prompts, completions, strict=True)]
    batches = pack_by_tokens(sizes, whole_groups(sizes, budget), budget)
    while batches:
        batch = batches.pop()  # the last has the shortest
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            logps = None
        if logps:
            yield dict(zip(batch, logps, strict=True))
        else:  # out here, where the error no longer holds the batch's tensors
            release_memory()
            half = len(batch) // 2
            print(
                f"out of memory: halving {len(batch)} sequences (lower SCORE_BATCH_TOKENS)",
                flush=True,
            )
            batches += [batch[half:], batch[:half]]


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    parts = logps.cpu().split([len(c) for c in completions])
    return [part.clone() for part in parts]  # not views, which would keep the batch alive


def score_groups(store, stored, score, **limits):
    """Scores stored groups, [(seq, body)], and stores the log-probs of each as soon as it has them:
    the trainer begins with those.

    `score(prompts, completions)` is score_sequences with its constants, `limits` are
    unpack_group's: the groups may have come under another model. A group that can't be scored is
    marked as failed with its error, which the run's next lease raises; the others are scored.
    """
    left, failure = dict(stored), "it was not scored"
    try:
        for part in scored_parts(stored, score, limits):
            store.scored(part)
            left = {seq: body for seq, body in left.items() if seq not in part}
    except sqlite3.Error:  # not the groups' fault: the disk is full
        raise
    except Exception as error:  # noqa: BLE001 (printed, stored, raised in the trainer)
        failure = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        if accelerator():
            torch.accelerator.synchronize()  # raises if it is broken for good: end, don't fail all
    if left and len(stored) == 1:
        store.failed(stored[0][0], failure)
        return
    for one in left.items():  # which was it? Out here, where the error no longer holds its tensors
        score_groups(store, [one], score, **limits)


def scored_parts(stored, score, limits):
    """Yields {seq: body with log-probs} of the groups that each batch completes."""
    groups = {seq: unpack_group(body, **limits) for seq, body in stored}
    prompts, completions, indices, logps = [], [], {}, {}
    for seq, group in groups.items():
        indices[seq] = range(len(prompts), len(prompts) + len(group.completion_lengths))
        prompts += [group.prompt_ids.tolist()] * len(group.completion_lengths)
        completions += [ids.tolist() for ids in group.completions(group.completion_ids)]
    for batch in score(prompts, completions):
        logps |= batch
        part = {}
        for seq in [seq for seq in indices if all(i in logps for i in indices[seq])]:
            groups[seq].ref_logps = torch.cat([logps[i] for i in indices.pop(seq)])
            if not torch.isfinite(groups[seq].ref_logps).all():
                raise ValueError("the reference model gave log-probs that are not finite")
            part[seq] = pack_group(groups[seq])
        if part:
            yield part


# --- The model ----------------------------------------------------------------------
class Reference:
    """The frozen model, and `info`, the answer to GET /info. POST /reference gives it the weights
    of a published policy, between two batches of groups; they outlast a restart of the server."""

    def __init__(self, store, folder, *, model, dtype, temperature, budget, share_prompts):
        """`folder` is where a copy of the weights is kept; `budget` is SCORE_BATCH_TOKENS."""
        self.name, self.store = model, store
        facts = tokenizer_facts(load_tokenizer(model))
        loaded, dtype = load_model(model, dtype, facts["vocab_size"])
        loaded.requires_grad_(False)
        self.limits = {"vocab_size": facts["vocab_size"]}  # of groups, for unpack_group
        self.limits["max_tokens"] = getattr(loaded.config, "max_position_embeddings", None)
        self.model = CompletionModel(loaded, share_prompts=share_prompts)
        self.score = partial(
            score_sequences,
            self.model,
            budget=budget,
            temperature=temperature,
            vocab_size=facts["vocab_size"],
        )
        for note in self.model.notes:
            print(note, flush=True)
        self.fixed = facts | {"protocol": PROTOCOL, "model": model, "dtype": dtype}
        self.fixed["temperature"] = temperature
        self.folder, self.requests = Path(folder), queue.Queue()
        weights = store.reference_weights()
        if weights and not self._copy(weights).exists():
            print(f"the weights of {weights} are gone: the reference is {model} itself", flush=True)
            weights = ""
        if weights:
            self._load(self._copy(weights))
            print(f"the reference is still {weights}, as before the restart", flush=True)
        self.info = self._announce(weights)

    def replace(self, path, weights):
        """Waits until the scoring thread has loaded the file `path` (None: the model's own), called
        `weights`. Raises ValueError if it is of another model."""
        done = Future()
        self.requests.put((path, weights, done))
        done.result()

    def load_requested(self):
        """Does what replace() asks for; called by the scoring thread between batches of groups."""
        while not self.requests.empty():
            path, weights, done = self.requests.get()
            name = weights or self.name
            try:
                if weights != self.info["weights"]:
                    self._change(path, weights)
                    print(f"the reference is now {name}", flush=True)
                done.set_result(None)
            except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
                traceback.print_exc()
                full = isinstance(error, OSError) and error.errno in NO_SPACE  # the client waits
                done.set_exception(
                    error if full else ValueError(f"{name} can't be the reference: {error}")
                )
            except sqlite3.OperationalError as error:  # the disk is full, says SQLite
                done.set_exception(error)

    def _change(self, path, weights):
        """Loads and announces these weights; raises, and keeps the former ones, if it can't."""
        before, copy = self.info["weights"], self._copy(weights)
        try:
            if path:  # a copy: only the newest policies of a run are kept
                shutil.copy(path, copy)
            self._load(path and copy)
            self.info = self._announce(weights)  # now a restart finds the new copy
        except Exception as error:
            copy.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error):  # they are loaded, under the former ones' name
                self._load(self._copy(before) if before else None)
            raise
        for other in set(self.folder.glob("reference-*")) - {copy}:
            other.unlink()

    def _copy(self, weights):
        """Returns the path of these weights' copy; its name contains no text from a client."""
        digest = hashlib.sha256(weights.encode()).hexdigest()[:16]
        return self.folder / f"reference-{digest}.safetensors"

    def _announce(self, weights):
        """Tells the store that these weights score now; returns their info."""
        info = self.fixed | {"weights": weights}
        # "facts" on the wire is a hash of the rest, which a lease repeats
        info["facts"] = hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest()[:16]
        self.store.use_reference(info)  # what the former one scored is scored again
        return info

    def _load(self, path):
        tensors = safetensors.torch.load_file(path) if path else None
        if tensors is None or any(".lora_A." in name for name in tensors):
            # on the CPU: a GPU may have no room for a second model
            dtype = getattr(torch, self.fixed["dtype"])
            own = AutoModelForCausalLM.from_pretrained(self.name, dtype=dtype)
            tensors = merge_adapters(own, tensors or {})
        load_weights(self.model.model, tensors)
