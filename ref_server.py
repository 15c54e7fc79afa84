"""The frozen reference model behind HTTP: it answers token ids with their log-probs.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py     # on a spare GPU, on a CPU, on another machine
    python ref_server.py presets/7b_2x80gb.py       # with the constants of a preset

    POST /score?wait=S&temperature=T    ids of groups -> the log-probs of their completions
    GET  /info      the model, which the trainer compares with its model
    GET  /health    shows that the server answers

The server stores nothing. If it dies, the trainer still has the ids and asks again once the server
is back. A KL penalty needs no gradient of the reference, so the reference can run on an old GPU or
on another machine. grpo/wire.py describes the bodies.
"""

import json
import math
import signal
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

from grpo import constants

# --- What to serve ------------------------------------------------------------------
# Hub name or folder of the reference model. It may be larger than the trained model, but must have
# the same tokenizer.
MODEL = "Qwen/Qwen2.5-3B"
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
    (constants.TEXT, "MODEL HOST"),
    (constants.DTYPE, "DTYPE"),
    (constants.one_of(16, 4), "BASE_BITS"),
]
RELATIONS = [
    ("PORT", "65535 at most; 0 takes any free port", lambda c: c.PORT <= 65535),
    ("THREADS", "8 or more", lambda c: c.THREADS >= 8),
    ("MAX_BODY_BYTES", "1 MB or more: 1 << 20", lambda c: c.MAX_BODY_BYTES >= 1 << 20),
]


def server_constants(given):
    """Returns the server's Constants; SystemExit with a line for each wrong one."""
    return constants.checked("ref_server.py", DEFAULTS, given, KINDS, RELATIONS)


constants.before_torch()
if __name__ == "__main__":  # reports a mistake before torch is imported
    _, given = constants.command_line(DEFAULTS, __doc__)
    server_constants(given)

import torch

from grpo.devices import accelerator
from grpo.forward import CompletionModel
from grpo.gate import Busy, Gate, listen, token_for, url_of
from grpo.models import context_of, load_model, load_tokenizer
from grpo.prepare import loader_of
from grpo.reference import score_groups
from grpo.stop import ANNOUNCE, STOPS, leave
from grpo.wire import facts_of, ids_by_sequence, pack_logps, unpack_ids, weights_of


# --- Scoring ------------------------------------------------------------------------
class Reference:
    """The frozen model. `info` is the answer to /info, `limits` are arguments of unpack_ids."""

    def __init__(self, c):
        facts = facts_of(load_tokenizer(c.MODEL))
        model, dtype = load_model(c.MODEL, c.DTYPE, facts["vocab_size"], loader_of(c.BASE_BITS))
        self.model = CompletionModel(model.requires_grad_(False))
        for note in self.model.notes:
            print(note, flush=True)
        vocab_size = min(facts["vocab_size"], len(model.get_input_embeddings().weight))
        self.limits = {"vocab_size": vocab_size, "max_tokens": context_of(model.config)}
        self.info = facts | {"model": c.MODEL, "dtype": dtype, "bits": c.BASE_BITS}
        self.info |= {"weights": weights_of(model), "context": self.limits["max_tokens"]}
        self.settings = {"vocab_size": vocab_size, "budget": c.SCORE_BATCH_TOKENS}

    def score(self, tensors, temperature):
        """Returns the completions' log-probs (N,), float32, of the tensors of unpack_ids. Raises
        RuntimeError with the reason; a device that is broken ends the process."""
        groups = [ids_by_sequence(tensors)]
        try:
            return score_groups(self.model, groups, temperature=temperature, **self.settings)[0]
        except Exception as error:  # noqa: BLE001 (printed here, and raised in the trainer)
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"  # the error would keep tensors alive
        try:
            if accelerator():
                torch.accelerator.synchronize()
        except RuntimeError as error:
            leave(f"the device is broken: {error}")
        raise RuntimeError(f"can't score the sequences: {failure}")


# --- Routes -------------------------------------------------------------------------
def make_app(score, info, limits, threads, token):
    """Returns the WSGI app. `score` is Reference.score, which one thread calls for one request
    after the other; `token` is None or the shared secret."""
    app, scorer = Gate(token=token), ThreadPoolExecutor(1)
    app.get("/info", callback=lambda: info)
    places = threading.Semaphore(threads - 4)  # 4 threads always serve /info and /health

    @app.post("/score")
    def answer():
        seconds, temperature = float(app.query("wait")), float(app.query("temperature"))
        if not 0 <= seconds <= threading.TIMEOUT_MAX:  # NaN is refused, too
            raise ValueError(f"wait must be seconds, 0 or more, got {seconds}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if not places.acquire(blocking=False):
            raise Busy(f"{threads - 4} requests wait for an answer")
        try:
            scored = scorer.submit(score, unpack_ids(app.read_body(), **limits), temperature)
            logps = scored.result(seconds)
        except TimeoutError:
            scored.cancel()
            raise Busy(f"there is no result after {seconds:.0f} s") from None
        finally:
            places.release()
        # X-Info: after a restart this may be another model, and the client must notice
        return app.blob(pack_logps(logps), **{"X-Info": json.dumps(info, sort_keys=True)})

    return app


# --- Main ---------------------------------------------------------------------------
def main(**given):
    c = server_constants(given)
    host = c.HOST.strip("[]")  # of [::1]
    token = token_for(host, "HOST")
    ends = signal.SIG_DFL, signal.default_int_handler  # not ignored (nohup)
    for number in (*STOPS, *ANNOUNCE):
        if signal.getsignal(number) in ends:  # ends also while torch computes
            signal.signal(number, lambda n, _: leave(f"ended by {signal.Signals(n).name}"))
    print(f"loading the reference model {c.MODEL} ...", flush=True)
    reference = Reference(c)
    app = make_app(reference.score, reference.info, reference.limits, c.THREADS, token)
    server = listen(app, host, c.PORT, c.THREADS, c.MAX_BODY_BYTES)
    kind = reference.info["dtype"] + ", linear layers in 4 bits" * (c.BASE_BITS == 4)
    print(f"serving {c.MODEL} ({kind}) on {url_of(host, server.effective_port)}", flush=True)
    server.run()
    sys.exit("the HTTP server has ended, so this process ends")


if __name__ == "__main__":
    main(**given)
