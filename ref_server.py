"""The frozen reference model behind HTTP: it answers token ids with their log-probs.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py     # on a spare GPU, on a CPU, on another machine
    python ref_server.py presets/7b_2x80gb.py       # with the constants of a preset

    POST /score?wait=S    ids of one or several groups -> the log-probs of their completions
    GET  /info            the model, which the trainer compares with its model
    GET  /health          shows that the server answers

The server stores nothing. If it dies, the trainer still has the ids and asks again once the server
is back. A KL penalty needs no gradient of the reference, so the reference can run on an old GPU or
on another machine. grpo/wire.py describes the bodies.
"""

import contextlib
import json
import queue
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field

from grpo import constants

# --- What to serve ------------------------------------------------------------------
# Hub name or folder of the reference model. It may be larger than the trained model, but must have
# the same tokenizer.
MODEL = "Qwen/Qwen2.5-3B"
TEMPERATURE = 1.0  # divides the logits; must be the trainer's TEMPERATURE
DTYPE = "auto"  # bfloat16 on a GPU that has it, else float32; the softmax is always float32
BASE_BITS = 16  # 4: rounds the weights as the trainer's BASE_BITS = 4 does (needs .[bits])
# Tokens per forward pass. More are faster and need more memory; if it runs out, the server halves
# the batch and goes on.
SCORE_BATCH_TOKENS = 8_192

# --- Where to serve -----------------------------------------------------------------
# Address that the server listens on. 0.0.0.0 admits other machines and needs a shared secret in the
# environment of both sides: GRPO_TOKEN=...
HOST = "127.0.0.1"
PORT = 59875  # port in the trainer's REF_SERVER; 0 takes any free port
THREADS = 64  # requests served at once; at least the number of ranks + 4
# Largest request accepted; must be at least 1 MB (64 completions of 8192 tokens take 2 MB).
MAX_BODY_BYTES = 16 << 20

DEFAULTS = constants.defaults_in(globals())
KINDS = [
    (constants.WHOLE, "SCORE_BATCH_TOKENS THREADS MAX_BODY_BYTES"),
    (constants.COUNT, "PORT"),
    (constants.POSITIVE, "TEMPERATURE"),
    (constants.TEXT, "MODEL HOST"),
    (constants.DTYPE, "DTYPE"),
    (constants.one_of(16, 4), "BASE_BITS"),
]
RELATIONS = [
    ("PORT", "65535 at most; 0 takes any free port", lambda c: c.PORT <= 65535),
    ("THREADS", "8 or more", lambda c: c.THREADS >= 8),
    ("MAX_BODY_BYTES", "1 MB or more: 1 << 20", lambda c: c.MAX_BODY_BYTES >= 1 << 20),
]


def settled(given):
    """Returns the server's Constants; SystemExit with a line for each wrong one."""
    return constants.settled("ref_server.py", DEFAULTS, given, KINDS, RELATIONS)


constants.before_torch()
if __name__ == "__main__":  # reports a mistake before torch is imported
    _, given = constants.command_line(DEFAULTS, __doc__)
    settled(given)

import torch

from grpo.devices import accelerator
from grpo.forward import CompletionModel
from grpo.log import in_background
from grpo.models import context_of, load_model, load_tokenizer, weights_of
from grpo.options.workers.gate import Busy, Gate, listen, token_for, url_of
from grpo.scoring import score_groups
from grpo.stop import ANNOUNCE, leave
from grpo.wire import facts_of, ids_by_sequence, pack_logps, unpack_ids


# --- Scoring ------------------------------------------------------------------------
@dataclass(eq=False)
class Request:
    """Tensors of unpack_ids; `answer` is the future of their log-probs (N,)."""

    tensors: dict
    answer: Future = field(default_factory=Future)

    def __len__(self):
        return len(self.tensors["completion_ids"])


class Reference:
    """The frozen model. `info` is the answer to /info, `limits` are arguments of unpack_ids."""

    def __init__(self, c):
        facts = facts_of(load_tokenizer(c.MODEL), c.TEMPERATURE)
        model, dtype = load_model(c.MODEL, c.DTYPE, facts["vocab_size"], c.BASE_BITS)
        self.model = CompletionModel(model.requires_grad_(False))
        for note in self.model.notes:
            print(note, flush=True)
        vocab_size = min(facts["vocab_size"], len(model.get_input_embeddings().weight))
        self.limits = {"vocab_size": vocab_size, "max_tokens": context_of(model.config)}
        self.info = facts | {"model": c.MODEL, "dtype": dtype, "bits": c.BASE_BITS}
        self.info |= {"weights": weights_of(model), "context": self.limits["max_tokens"]}
        self.settings = {"temperature": c.TEMPERATURE, "vocab_size": vocab_size}
        self.settings["budget"] = c.SCORE_BATCH_TOKENS

    def score(self, requests):
        """Returns the log-probs (N,) of each request; scores them in common batches."""
        groups = [ids_by_sequence(request.tensors) for request in requests]
        return score_groups(self.model, groups, **self.settings)


def take(waiting, tokens):
    """Returns waiting requests of about so many tokens; [] if there are none for a second."""
    taken = []
    with contextlib.suppress(queue.Empty):
        while sum(map(len, taken)) < tokens:
            request = waiting.get(timeout=0 if taken else 1)
            if request.answer.set_running_or_notify_cancel():
                taken.append(request)
    return taken


def answer_all(requests, score):
    """Scores requests together. If that fails, scores each alone, so only the bad one fails."""
    try:
        answers = score(requests)
    except Exception as error:  # noqa: BLE001 (printed here, and raised in the trainer)
        traceback.print_exc()
        if accelerator():
            torch.accelerator.synchronize()  # raises if the device is broken, and ends the server
        answers = None
        failure = f"{type(error).__name__}: {error}"  # the error itself would keep tensors alive
    if answers:
        for request, logps in zip(requests, answers, strict=True):
            request.answer.set_result(logps)
    elif len(requests) == 1:
        requests[0].answer.set_exception(RuntimeError(f"can't score the sequences: {failure}"))
    else:
        for request in requests:
            answer_all([request], score)


# --- Routes -------------------------------------------------------------------------
def make_app(waiting, info, limits, threads, token):
    """Returns the WSGI app; `token` is None or the shared secret."""
    app = Gate(token=token)
    app.get("/info", callback=lambda: info)
    places = threading.Semaphore(threads - 4)  # 4 threads always serve /info and /health

    @app.post("/score")
    def score():
        seconds = float(app.query("wait"))
        if not 0 <= seconds <= threading.TIMEOUT_MAX:  # NaN is refused, too
            raise ValueError(f"wait must be seconds, 0 or more, got {seconds}")
        if not places.acquire(blocking=False):
            raise Busy(f"{threads - 4} requests wait for an answer")
        try:
            request = Request(unpack_ids(app.read_body(), **limits))
            waiting.put(request)
            logps = request.answer.result(seconds)
        except TimeoutError:
            request.answer.cancel()
            raise Busy(f"there is no result after {seconds:.0f} s") from None
        finally:
            places.release()
        # X-Info: after a restart this may be another model, and the client must notice
        return app.blob(pack_logps(logps), **{"X-Info": json.dumps(info, sort_keys=True)})

    return app


# --- Main ---------------------------------------------------------------------------
def main(**given):
    c = settled(given)
    host = c.HOST.strip("[]")  # of [::1]
    token = token_for(host, "HOST")
    for number in (signal.SIGTERM, *ANNOUNCE):
        if signal.getsignal(number) == signal.SIG_DFL:  # not ignored (nohup); even within torch
            signal.signal(number, lambda n, _: leave(f"ended by {signal.Signals(n).name}"))
    print(f"loading the reference model {c.MODEL} ...", flush=True)
    reference, waiting = Reference(c), queue.SimpleQueue()
    app = make_app(waiting, reference.info, reference.limits, c.THREADS, token)
    server = listen(app, host, c.PORT, c.THREADS, c.MAX_BODY_BYTES)
    http = in_background(server.run)
    address, kind = url_of(host, server.effective_port), reference.info["dtype"]
    kind += ", linear layers in 4 bits" * (c.BASE_BITS == 4)
    print(f"serving {c.MODEL} ({kind}) on {address}", flush=True)
    # Scoring runs in the main thread: if it fails for good, the process ends and clients notice
    while http.is_alive():
        if requests := take(waiting, 8 * c.SCORE_BATCH_TOKENS):
            answer_all(requests, reference.score)
    sys.exit("the HTTP server has ended, so this process ends")


if __name__ == "__main__":
    main(**given)
