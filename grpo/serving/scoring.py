"""The reference model of ref_server.py: scores stored groups, and may become a run's policy.

Log-probs of the sampled tokens are all that a KL penalty needs of it. Completions are scored in
batches sorted by length, and the prompt of a group runs once.
"""

import hashlib
import os
import queue
import shutil
import traceback
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from grpo.forward import CompletionModel
from grpo.models import load_model, load_tokenizer
from grpo.packing import number_prompts, pack_by_tokens, whole_groups
from grpo.weights import load_weights, merge_adapters
from grpo.wire import PROTOCOL, pack_group, tokenizer_facts, unpack_group
from grpo_loss_triton import linear_logps


# --- Scoring ------------------------------------------------------------------------
@torch.no_grad()
def score_rows(model, prompts, completions, *, budget, temperature, vocab_size):
    """Yields {row: log-probs (T,)} of some rows after the others, float32 and on the CPU, the
    shortest first: what ends first is uploaded first, and the trainer wants it first.

    `model` is a CompletionModel; rows with the same prompt, next to each other, share it.

    A batch that does not fit the GPU is halved until it does; one row that does not fit raises.
    """

    def forward(rows):  # a function of its own: what it holds is gone when it has raised
        p, c = [prompts[r] for r in rows], [completions[r] for r in rows]
        hidden, ids = model(p, c)
        logps = linear_logps(
            hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size
        )
        return logps.cpu().split([len(x) for x in c])

    def score(rows):
        try:
            # not views, which would keep the batch alive
            parts = [part.clone() for part in forward(rows)]
            return dict(zip(rows, parts, strict=True))
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        print(
            f"out of memory with {len(rows)} rows: halving (lower SCORE_BATCH_TOKENS)", flush=True
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return score(rows[: len(rows) // 2]) | score(rows[len(rows) // 2 :])

    numbers = number_prompts(prompts, model.shares)
    rows = zip(numbers, prompts, completions, strict=True)
    sizes = [(number, len(p), len(c)) for number, p, c in rows]
    batches = pack_by_tokens(sizes, whole_groups(sizes, budget), budget)
    yield from map(score, reversed(batches))


def score_groups(store, stored, score, **limits):
    """Scores stored groups, [(seq, body)], and stores the log-probs of each as soon as it has them:
    the trainer begins with those.

    `score(prompts, completions)` is score_rows with its settings, `limits` are unpack_group's: the
    groups may have come under another model. A group that can't be scored is marked as failed with
    its error, which the run's next lease raises; the others go on.
    """
    left, parts = dict(stored), scored_parts(stored, score, limits)
    while left:
        try:
            part = next(parts, None)
            assert part, f"{len(left)} of {len(stored)} groups were not scored"
        except Exception as error:  # noqa: BLE001 (printed, stored, raised in the trainer)
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises if CUDA is broken for good: end, don't fail all
            break
        store.scored(part)
        left = {seq: body for seq, body in left.items() if seq not in part}
    if left and len(stored) == 1:
        store.failed(stored[0][0], failure)
        return
    for one in left.items():  # which was it? Out here, where the error no longer holds its tensors
        score_groups(store, [one], score, **limits)


def scored_parts(stored, score, limits):
    """Yields {seq: body with log-probs} of the groups that are whole after each batch."""
    groups = {seq: unpack_group(body, **limits) for seq, body in stored}
    prompts, completions, rows, logps = [], [], {}, {}
    for seq, group in groups.items():
        rows[seq] = range(len(prompts), len(prompts) + len(group.completion_lengths))
        prompts += [group.prompt_ids.tolist()] * len(group.completion_lengths)
        completions += [ids.tolist() for ids in group.completions(group.completion_ids)]
    for batch in score(prompts, completions):
        logps |= batch
        part = {}
        for seq in [seq for seq in rows if all(row in logps for row in rows[seq])]:
            groups[seq].ref_logps = torch.cat([logps[row] for row in rows.pop(seq)])
            if not torch.isfinite(groups[seq].ref_logps).all():
                raise ValueError("the reference model gave log-probs that are not finite")
            part[seq] = pack_group(groups[seq])
        if part:
            yield part


class Reference:
    """The frozen model, and `info`, what GET /info says of it. POST /reference gives it the weights
    of a run's policy (iterative GRPO), between two picks; they outlast a restart of the server.
    """

    def __init__(self, store, folder, *, model, dtype, temperature, share_prompts):
        self.name, self.store = model, store
        facts = tokenizer_facts(load_tokenizer(model))
        loaded, dtype = load_model(model, dtype, facts["vocab_size"])
        loaded.requires_grad_(False)
        self.max_tokens = getattr(loaded.config, "max_position_embeddings", None)
        self.model = CompletionModel(loaded, share_prompts=share_prompts)
        for note in self.model.notes:
            print(note, flush=True)
        self.facts = {"protocol": PROTOCOL, "model": model, "temperature": temperature}
        self.facts |= {"dtype": dtype} | facts
        self.kept, self.orders = Path(folder, "reference.safetensors"), queue.Queue()
        weights = store.reference_weights() if self.kept.exists() else ""
        if weights:
            self._load(self.kept)
            print(f"the reference is still {weights}, as before the restart", flush=True)
        self._now(weights)

    def _now(self, weights):
        """The weights are now those named `weights`; "" stands for the model's own."""
        info = self.facts | {"weights": weights}
        info["facts"] = hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest()[:16]
        self.store.use_reference(info)  # what the former one scored is scored again
        self.info = info

    def replace(self, path, weights):
        """Asks the scoring thread for the weights in `path` (None: the model's own), called
        `weights`, and waits until it has them. ValueError if they are of another model."""
        answer = queue.Queue()
        self.orders.put((path, weights, answer))
        if error := answer.get():
            raise ValueError(error)

    def obey(self):
        """Carries out what replace() asks for; called between two picks from the store."""
        while not self.orders.empty():
            path, weights, answer = self.orders.get()
            name = weights or self.name
            try:
                if weights != self.info["weights"]:
                    self._load(path)
                    if path:  # a copy: only the newest policies of a run are kept
                        shutil.copy(path, self.kept.with_suffix(".part"))
                        os.replace(self.kept.with_suffix(".part"), self.kept)
                    self._now(weights)
                    print(f"the reference is now {name}", flush=True)
                answer.put(None)
            except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
                traceback.print_exc()
                answer.put(f"{name} can't be the reference: {error}")

    def _load(self, path):
        tensors = safetensors.torch.load_file(path) if path else None
        if tensors is None or any(".lora_A." in name for name in tensors):
            # on the CPU: a GPU may have no room for a second model
            dtype = getattr(torch, self.facts["dtype"])
            own = AutoModelForCausalLM.from_pretrained(self.name, dtype=dtype)
            tensors = merge_adapters(own, tensors or {})
        load_weights(self.model.model, tensors)
