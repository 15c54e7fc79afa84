"""The frozen reference model behind HTTP: groups go in, and come back with its log-probs.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py     # on a spare GPU, on a CPU, on another machine
    python ref_server.py presets/3b_2x80gb.py       # with the constants of a preset

What a group goes through:

    POST /upload      a rank of grpo_ref_split.py, or a worker, has sampled it: it is stored
    (main thread)     it is scored: log-probs of its tokens under the reference model
    POST /lease       the trainer gets it with them; for LEASE_SECONDS nobody else does
    POST /ack /drop   an optimiser step has used it; or the trainer can't use it
    POST /checkpoint  a checkpoint holds what was learned from it: its body is deleted
    POST /resume      the run resumes from a checkpoint: what later steps used is leased again
    POST /end         the run is over: what is left is dropped

Workers ask for prompts (POST /work) and fetch the policy (GET /policy) that the trainer published
(PUT, POST /policy). It may become the reference (POST /reference). GET /info /stats /health are for
programs, GET / is for people: it shows GET /live, and what trainers POST to /log. A KL penalty
needs no gradient of the reference, so it can live on an old card or another machine.
"""

import os
import signal
import sqlite3
import sys
import time
from urllib.parse import quote

# Before torch: see grpo_ref_split.py
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", allocator)

from grpo.constants import command_line, settle

if __name__ == "__main__":  # here, so that a mistake is told before torch is imported
    _, given = command_line("ref_server.py", __doc__)

import bottle

from grpo.log import in_background
from grpo.models import load_tokenizer
from grpo.serving.checks import check_server_constants
from grpo.serving.dashboard import Live, add_page
from grpo.serving.gate import Gate, listen
from grpo.serving.pacing import Pacing
from grpo.serving.policies import Policies
from grpo.serving.runs import Runs
from grpo.serving.scoring import Reference, score_groups
from grpo.serving.store import Store
from grpo.wire import pack_bodies, unpack_bodies, unpack_group

# --- What to serve ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # hub name or folder; may be larger than the policy, same tokenizer
TEMPERATURE = 1.0  # log-probs are those of softmax(logits / TEMPERATURE); the trainer must agree
DTYPE = "auto"  # bfloat16 on a GPU, float32 on a CPU; softmax is float32 either way
SCORE_BATCH_TOKENS = 8_192  # padded tokens in one forward; halved by itself when out of memory
SHARE_PROMPTS = True  # a group's prompt runs once; same log-probs

# --- Where to serve -----------------------------------------------------------------
HOST = "127.0.0.1"  # another address needs a shared secret in the environment: GRPO_TOKEN=...
PORT = 59875
THREADS = 16  # requests served at once; a lease that waits holds one, up to LEASE_WAIT_SECONDS

# --- The store ----------------------------------------------------------------------
STORE = "runs/ref_store.sqlite"  # what was answered with 200 is here, and survives kill -9
MAX_STORE_BYTES = 1 << 30  # beyond it an upload is answered 503: clients wait, disk stays bounded
MAX_BODY_BYTES = 16 << 20  # of a request: 64 completions of 8192 tokens are 4 MB; 1 MB at least
MAX_POLICY_BYTES = 64 << 30  # of one published policy; the two newest of each run are kept
LEASE_SECONDS = 120  # unacknowledged, leased again; below the trainer's WAIT_LIMIT_SECONDS
LEASE_WAIT_SECONDS = 5  # a lease waits this long for the first scored group before its 204


# --- Routes -------------------------------------------------------------------------
def make_app(store, policies, reference, *, token, max_body_bytes, lease_seconds, lease_wait):
    """Returns the WSGI app; `token` is None or the shared secret."""
    live, runs = Live(), Runs(store.db)
    pacing = Pacing(store, policies, lease_wait)
    app = Gate(live.error, store.path, token=token, max_body_bytes=max_body_bytes)
    add_uploads(app, store, policies, pacing, live, reference)
    add_training(app, store, policies, runs, reference, lease_seconds, lease_wait)
    add_policies(app, policies, pacing, reference)
    add_views(app, store, policies, pacing, live, runs, reference)
    return app


def add_uploads(app, store, policies, pacing, live, reference):
    @app.post("/upload")
    def upload():
        body, query = app.read_body(), bottle.request.query
        several = query.get("several") == "1"
        if query.get("pool") == "1":  # an older client's flat group, which must not be trained
            raise ValueError("regrouping (?pool=1) was removed: update this client")
        bodies = unpack_bodies(body).values() if several else [body]
        groups = [unpack_group(b, **reference.limits) for b in bodies]  # all valid, or none stored
        with store.transaction():  # or scoring would begin with a part of them
            answers = [take(*pair) for pair in zip(groups, bodies, strict=True)]
        for group, answer in zip(groups, answers, strict=True):  # only now: a full store undoes all
            if answer["stored"]:
                count(group, dropped="dropped" in answer)
        return {"groups": answers} if several else answers[0]

    def take(group, body):
        """Stores a group; returns the answer to its client."""
        record = policies.record(group.run) or {"oldest": 0, "scored": True}
        if policies.ended(group.run):
            return {"stored": store.refuse(group, "the run was over"), "dropped": True}
        if group.policy_version < record["oldest"]:
            return {"stored": store.refuse(group, "too old"), "dropped": True}
        # The ranks upload only what they want scored, whatever they published before
        wanted = record["scored"] or group.sampler == "trainer"
        return {"stored": store.put(group, body, "waiting" if wanted else "scored")}

    def count(group, dropped):
        if dropped:
            store.count_dropped(group.run)
        else:
            pacing.uploaded(group.sampler)
            live.uploaded(len(group.completion_ids))


def add_training(app, store, policies, runs, reference, lease_seconds, lease_wait):
    @app.takes_json("/lease")
    def lease(run: str, limit: int, oldest: int = 0, wait: bool = True):
        store.drop_old(run, oldest)
        bottle.response.set_header("X-Dropped", str(store.report_dropped(run)))
        limit, patience = max(1, min(limit, 4096)), lease_wait if wait else 0
        bodies = store.lease(run, limit, seconds=lease_seconds, patience=patience)
        if not bodies:
            bottle.response.status = 204
            return b""
        bottle.response.content_type = "application/octet-stream"
        bottle.response.set_header("X-Facts", reference.info["facts"])  # who scores now
        parts = pack_bodies(bodies)
        bottle.response.content_length = sum(map(len, parts))
        return iter(parts)  # bottle would join a list

    @app.takes_json("/ack")
    def ack(run: str, ids: list, step: int):
        count = store.ack(run, [str(id) for id in ids], step)
        # What no checkpoint covers yet: the trainer saves one before the store is full of it
        return {"acknowledged": count, "kept_bytes": store.kept(run), "max_bytes": store.max_bytes}

    @app.takes_json("/drop")
    def drop(run: str, ids: list, reason: str):
        return {"dropped": store.drop(run, [str(id) for id in ids], reason[:200])}

    @app.takes_json("/checkpoint")
    def checkpoint(run: str, step: int):
        store.cover(run, step)

    @app.takes_json("/resume")
    def resume(run: str, step: int):
        policies.resume(run, step)
        runs.end(run, ended=False)
        return store.resume(run, step)

    @app.takes_json("/end")
    def end(run: str):
        policies.end(run)
        store.forget(run)
        runs.end(run)


def add_policies(app, policies, pacing, reference):
    @app.put("/policy")
    def put_policy():
        run, at = app.read_query("version", "offset")
        return {"bytes": policies.write(run, at["version"], at["offset"], app.read_body())}

    @app.takes_json("/policy")
    def post_policy(record: dict):
        policies.publish(record)
        return {"version": record["version"]}

    @app.takes_json("/work")
    def work(
        worker: str, held: int, want: int, run: str, version: int, sha256: str, pulled: bool = False
    ):
        return pacing.work(worker, held, want, run, version, sha256, pulled)

    @app.get("/policy")
    def get_policy():
        run, at = app.read_query()
        path = policies.path(run, at.get("version", -1))
        # It answers Range requests: a download resumes where it broke off
        file = bottle.static_file(path.name, root=path.parent, mimetype="application/octet-stream")
        file.set_header("X-Path", quote(str(path.resolve())))  # on this machine it need not be sent
        return file

    @app.takes_json("/reference")
    def post_reference(run: str, version: int):
        path = policies.path(run, version) if version >= 0 else None
        reference.replace(path, f"{run}@{version}" if path else "")
        return reference.info


def add_views(app, store, policies, pacing, live, runs, reference):
    app.get("/info", callback=lambda: reference.info)

    @app.get("/stats")
    def stats():
        run = app.read_query()[0] or store.newest_run()
        ledger = {"ledger": store.ledger(run)} if run else {}
        return store.stats() | {"run": run, "workers": pacing.stats()} | ledger

    app.get("/health", callback=lambda: {"ok": True})

    @app.takes_json("/log")
    def log(run: str, records: list, samples: list, steps: int = 0):
        runs.log(run, records, samples, steps)

    add_page(app, runs, lambda run: live.view(run, store, policies, pacing, reference.info))


# --- Scoring ------------------------------------------------------------------------
def score_while(alive, store, reference):
    """Scores what is uploaded for as long as alive(), and prints how much once a minute."""
    said, total = time.monotonic(), 0
    while alive():
        reference.load_requested()
        # a few batches at a time; a token takes about 8 bytes
        groups = store.waiting(limit=64, patience=1, size=32 * SCORE_BATCH_TOKENS)
        try:
            score_groups(store, groups, reference.score, **reference.limits)
            total += len(groups)
        except sqlite3.OperationalError as error:
            print(f"{STORE}: {error}; make room on its disk. Trying again", flush=True)
            time.sleep(5)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} scored {total} groups; {store.stats()}", flush=True)


# --- Main ---------------------------------------------------------------------------
known = frozenset(filter(str.isupper, globals()))  # a preset that sets another has misspelt it


def main(**preset):
    check_server_constants(settle(globals(), known, preset))
    token = os.environ.get("GRPO_TOKEN")
    if HOST not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.exit(f"HOST = {HOST!r} is reachable by others: set GRPO_TOKEN here and at the trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"loading the reference model {MODEL} ...", flush=True)
    load_tokenizer(MODEL)  # a wrong MODEL ends here, before there is a store
    store = Store(STORE, MAX_STORE_BYTES)
    policies = Policies(store, f"{STORE}.policies", MAX_POLICY_BYTES)
    reference = Reference(
        store, policies.folder, model=MODEL, dtype=DTYPE, temperature=TEMPERATURE,
        budget=SCORE_BATCH_TOKENS, share_prompts=SHARE_PROMPTS,
    )  # fmt: skip
    app = make_app(
        store, policies, reference, token=token, max_body_bytes=MAX_BODY_BYTES,
        lease_seconds=LEASE_SECONDS, lease_wait=LEASE_WAIT_SECONDS,
    )  # fmt: skip
    server = listen(app, HOST, PORT, THREADS, MAX_BODY_BYTES)
    http = in_background(server.run)
    dtype = reference.info["dtype"]
    print(f"serving {MODEL} ({dtype}) on http://{HOST}:{server.effective_port}", flush=True)
    # In the main thread: if scoring fails, the process ends, and clients notice
    score_while(http.is_alive, store, reference)
    sys.exit("the HTTP server ended, so this process does")


if __name__ == "__main__":
    try:
        main(**given)
    except KeyboardInterrupt:
        sys.exit("ended by Ctrl-C")
