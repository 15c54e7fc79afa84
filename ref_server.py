"""The frozen reference model behind HTTP: takes in sampled groups, gives them back with log-probs.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py     # on a spare GPU, on a CPU, on another machine

A producer (a rank of grpo_ref_split.py) POSTs one group (wire.py) to /upload. It is stored
(store.py), scored with the reference model in length-sorted batches, leased to the trainer, and
acknowledged when the optimiser step that used it is done. Routes: POST /upload /lease /ack,
GET /info /stats /. A KL penalty needs log-probs of the reference for the sampled tokens only, and
no gradient: that is why the reference can live in another process, on an old card or another
machine, and sampling hides it.
"""

import hashlib
import hmac
import json
import os
import signal
import sys
import threading
import time
import traceback

import bottle
import safetensors.torch
import torch
import waitress

from forward import CompletionModel, number_prompts, order_rows, pack_by_tokens
from grpo_loss_triton import linear_logps
from policy import load_model, load_tokenizer
from store import Store, StoreFull
from wire import PROTOCOL, pack_group, tokenizer_facts, unpack_group

# --- What to serve ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # hub name or folder; may be larger than the policy, same tokenizer
TEMPERATURE = 1.0  # log-probs are those of softmax(logits / TEMPERATURE); the trainer must agree
DTYPE = "auto"  # bfloat16 on a GPU, float32 on a CPU; softmax is float32 either way
SCORE_BATCH_TOKENS = 8_192  # padded tokens in one forward; halved by itself when out of memory
SHARE_PROMPTS = True  # a group's prompt runs once; same log-probs

# --- Where to serve -----------------------------------------------------------------
HOST = "127.0.0.1"  # another address needs a shared secret in the environment: GRPO_TOKEN=...
PORT = 59875
THREADS = 16  # requests served at once; a waiting lease holds one for up to LEASE_WAIT_SECONDS

# --- The store ----------------------------------------------------------------------
STORE = "runs/ref_store.sqlite"  # what was answered with 200 is here, and survives kill -9
MAX_STORE_BYTES = 1 << 30  # beyond it an upload is answered 503: producers wait, disk stays bounded
MAX_BODY_BYTES = 16 << 20  # of one group: 64 completions of 8192 tokens are 4 MB
LEASE_SECONDS = 120  # unless acknowledged, handed out again; below the trainer's WAIT_LIMIT_SECONDS
LEASE_WAIT_SECONDS = 5  # a lease request waits this long for the first scored group before its 204


# --- Scoring ------------------------------------------------------------------------
@torch.no_grad()
def score_rows(model, prompts, completions, *, budget, temperature, vocab_size):
    """-> log-probs of every completion, a list of float32 CPU tensors (T_i,), in the order given.

    `model` is a CompletionModel; rows with the same prompt, next to each other, share it.

    A batch that does not fit the GPU is halved until it does; one row that does not fit raises.
    """
    result = [None] * len(prompts)

    def forward(rows):  # a function of its own: what it holds is gone when it has raised
        p, c = [prompts[r] for r in rows], [completions[r] for r in rows]
        hidden, ids = model(p, c)
        logps = linear_logps(
            hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size
        )
        return logps.cpu().split([len(x) for x in c])

    def score(rows):
        try:
            for row, part in zip(rows, forward(rows), strict=True):
                result[row] = part.clone()  # not a view, which would keep the batch alive
            return
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        print(
            f"out of memory with {len(rows)} rows: halving (lower SCORE_BATCH_TOKENS)", flush=True
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        score(rows[: len(rows) // 2])
        score(rows[len(rows) // 2 :])

    numbers = number_prompts(prompts, model.shares)
    rows = zip(numbers, prompts, completions, strict=True)
    sizes = [(number, len(p), len(c)) for number, p, c in rows]
    for batch in pack_by_tokens(sizes, order_rows(sizes), budget):
        score(batch)
    return result


def score_groups(store, rows, score, **limits):
    """Scores stored groups, [(seq, body)], and stores their log-probs.

    `score(prompts, completions)` is score_rows with its settings, `limits` are unpack_group's: the
    groups may have come under another model. A group that can't be scored is marked as failed with
    its error, which the run's next lease raises; the others go on.
    """
    try:
        groups = [unpack_group(body, **limits) for _, body in rows]
        prompts = [p for g in groups for p in [g.prompt_ids.tolist()] * len(g.completion_lengths)]
        completions = [ids.tolist() for g in groups for ids in g.completions(g.completion_ids)]
        logps = iter(score(prompts, completions))
        for group in groups:
            group.ref_logps = torch.cat([next(logps) for _ in group.completion_lengths])
            if not torch.isfinite(group.ref_logps).all():
                raise ValueError("the reference model gave log-probs that are not finite")
    except Exception as error:  # noqa: BLE001 (printed, stored, raised in the trainer)
        failure = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises if CUDA is broken for good: end, don't fail them all
    else:
        for group, (seq, _) in zip(groups, rows, strict=True):
            store.scored(seq, pack_group(group))
        return
    if len(rows) == 1:
        store.failed(rows[0][0], failure)
        return
    for row in rows:  # which one was it? Out here, where the error no longer holds its tensors
        score_groups(store, [row], score, **limits)


# --- Routes -------------------------------------------------------------------------
def make_app(store, info, *, max_tokens, token, max_body_bytes, lease_seconds, lease_wait):
    """The WSGI app. `info` is what GET /info answers; `token` is None or the shared secret."""
    app = bottle.Bottle()

    def refuse(status, reason, **headers):
        headers["Content-Type"] = "application/json"
        raise bottle.HTTPResponse(json.dumps({"error": reason}), status, headers)

    def explain(error):  # 404, 405, and 500 for what nobody foresaw (bottle prints its traceback)
        bottle.response.content_type = "application/json"
        return json.dumps({"error": repr(error.exception) if error.exception else error.body})

    app.default_error_handler = explain

    def read_body():
        length = bottle.request.content_length  # -1 when there is none
        if not 0 < length <= max_body_bytes:
            refuse(413 if length > 0 else 411, f"a body of 1 to {max_body_bytes} bytes, please")
        # not request.body, which spills what is over 100 KB to a file
        body = bottle.request.environ["wsgi.input"].read(length)
        if len(body) != length:
            refuse(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def read_json(**kinds):
        try:
            asked = json.loads(read_body())
            values = [asked[name] for name in kinds]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            refuse(400, f"the body must be JSON with {', '.join(kinds)}: {error!r}")
        for value, (name, kind) in zip(values, kinds.items(), strict=True):
            if type(value) is not kind:
                refuse(400, f"{name} must be of type {kind.__name__}")
        return values

    @app.hook("before_request")
    def authorise():
        # not get_header, which raises if a header is no UTF-8
        sent = bottle.request.environ.get("HTTP_AUTHORIZATION", "")
        if token and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            refuse(401, "no or wrong token: set GRPO_TOKEN to the server's on this machine")

    @app.post("/upload")
    def upload():
        body = read_body()
        try:
            group = unpack_group(body, vocab_size=info["vocab_size"], max_tokens=max_tokens)
            return {"stored": store.put(group, body)}
        except ValueError as error:
            refuse(400, str(error))
        except StoreFull:
            refuse(
                503,
                f"the store holds its {store.max_bytes} bytes; if their runs have ended, stop"
                " the server and delete its STORE",
                **{"Retry-After": "1"},
            )

    @app.post("/lease")
    def lease():
        run, limit = read_json(run=str, limit=int)
        limit = max(1, min(limit, 4096))
        try:
            bodies = store.lease(run, limit, seconds=lease_seconds, patience=lease_wait)
        except RuntimeError as error:
            refuse(500, str(error))
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))
        if not bodies:
            bottle.response.status = 204
            return b""
        bottle.response.content_type = "application/octet-stream"
        bottle.response.set_header("X-Facts", info["facts"])  # the server may have been restarted
        # a blob of blobs: each group's body as a uint8 tensor under the group's id
        blobs = {id: torch.frombuffer(bytearray(b), dtype=torch.uint8) for id, b in bodies.items()}
        return safetensors.torch.save(blobs)

    @app.post("/ack")
    def ack():
        run, ids = read_json(run=str, ids=list)
        try:
            return {"acknowledged": store.ack(run, [str(id) for id in ids])}
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))

    @app.get("/info")
    def get_info():
        return info

    @app.get("/stats")
    def stats():
        return store.stats()

    @app.get("/")
    def page():
        bottle.response.content_type = "text/plain; charset=utf-8"
        lines = [f"{k:>18}  {v}" for k, v in (info | store.stats()).items()]
        return "grpo-split reference server\n\n" + "\n".join(lines) + "\n"

    return app


# --- Main ---------------------------------------------------------------------------
def load_reference():
    """-> (model, info, max_tokens): the frozen model, what /info says, the longest sequence."""
    facts = tokenizer_facts(load_tokenizer(MODEL))
    model, dtype = load_model(MODEL, DTYPE, facts["vocab_size"])
    model.requires_grad_(False)
    info = {
        "protocol": PROTOCOL,
        "model": MODEL,
        "temperature": TEMPERATURE,
        "dtype": dtype,
    } | facts
    info["facts"] = hashlib.sha256(repr(sorted(info.items())).encode()).hexdigest()[:16]
    max_tokens = getattr(model.config, "max_position_embeddings", None)
    model = CompletionModel(model, share_prompts=SHARE_PROMPTS)
    for note in model.notes:
        print(note, flush=True)
    return model, info, max_tokens


def main():
    token = os.environ.get("GRPO_TOKEN")
    if HOST not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.exit(f"HOST = {HOST!r} is reachable by others: set GRPO_TOKEN here and at the trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"loading the reference model {MODEL} ...", flush=True)
    model, info, max_tokens = load_reference()
    store = Store(STORE, MAX_STORE_BYTES)
    store.use_reference(info)
    app = make_app(
        store,
        info,
        max_tokens=max_tokens,
        token=token,
        max_body_bytes=MAX_BODY_BYTES,
        lease_seconds=LEASE_SECONDS,
        lease_wait=LEASE_WAIT_SECONDS,
    )
    # inbuf_overflow and recv_bytes: bodies stay in memory and come in few reads (2.8x the uploads)
    server = waitress.create_server(
        app,
        host=HOST,
        port=PORT,
        threads=THREADS,
        inbuf_overflow=64 << 20,
        recv_bytes=262_144,
        max_request_body_size=MAX_BODY_BYTES + 1,  # refuses from this many bytes on
    )
    http = threading.Thread(target=server.run, daemon=True)
    http.start()
    print(f"serving {MODEL} ({info['dtype']}) on http://{HOST}:{server.effective_port}", flush=True)

    def score(prompts, completions):
        return score_rows(
            model,
            prompts,
            completions,
            budget=SCORE_BATCH_TOKENS,
            temperature=TEMPERATURE,
            vocab_size=info["vocab_size"],
        )

    # Scoring is the main thread: if it dies, the process dies, and nobody waits for a dead loop.
    said, total = time.monotonic(), 0
    while http.is_alive():
        rows = store.waiting(limit=64, patience=10)
        if rows:
            score_groups(store, rows, score, vocab_size=info["vocab_size"], max_tokens=max_tokens)
            total += len(rows)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} scored {total} groups; {store.stats()}", flush=True)
    sys.exit("the HTTP server ended, so this process does")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("ended by Ctrl-C")
