"""The frozen reference model behind HTTP: takes in sampled groups, gives them back with log-probs.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py     # on a spare GPU, on a CPU, on another machine

A producer (a rank of grpo_ref_split.py, or a worker) POSTs one group (wire.py) to /upload. It is
stored (store.py), scored with the reference model (scoring.py), leased to the trainer, and
acknowledged when the optimiser step that used it is done. Where workers sample, the trainer
publishes its policy here and they fetch it (hub.py). Routes: POST /upload /lease /ack /drop
/checkpoint /resume /end, PUT, POST and GET /policy, POST /work /reference, GET /info /stats
/health; for people GET /, which shows GET /live and what trainers send to POST /log (live.py). A KL
penalty needs log-probs of the reference for the sampled tokens only, and no gradient: that is why
the reference can live in another process, on an old card or another machine, and sampling hides it.
"""

import errno
import hmac
import json
import os
import signal
import sqlite3
import sys
import threading
import time

import bottle
import waitress

from hub import Hub
from live import PLAIN, Live, load_page
from policy import load_tokenizer
from scoring import Reference, score_groups, score_rows
from store import Store, StoreFull
from wire import pack_bodies, unpack_group

# --- What to serve ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # hub name or folder; may be larger than the policy, same tokenizer
TEMPERATURE = 1.0  # log-probs are those of softmax(logits / TEMPERATURE); the trainer must agree
DTYPE = "auto"  # bfloat16 on a GPU, float32 on a CPU; softmax is float32 either way
SCORE_BATCH_TOKENS = 8_192  # padded tokens in one forward; halved by itself when out of memory
SHARE_PROMPTS = True  # a group's prompt runs once; same log-probs
REGROUP = True  # flat groups wait for one of the same prompt that fits, and both are trained

# --- Where to serve -----------------------------------------------------------------
HOST = "127.0.0.1"  # another address needs a shared secret in the environment: GRPO_TOKEN=...
PORT = 59875
THREADS = 16  # requests served at once; a waiting lease holds one for up to LEASE_WAIT_SECONDS

# --- The store ----------------------------------------------------------------------
STORE = "runs/ref_store.sqlite"  # what was answered with 200 is here, and survives kill -9
MAX_STORE_BYTES = 1 << 30  # beyond it an upload is answered 503: producers wait, disk stays bounded
MAX_BODY_BYTES = 16 << 20  # of one group: 64 completions of 8192 tokens are 4 MB
MAX_POLICY_BYTES = 64 << 30  # of one published policy; the two newest of each run are kept
LEASE_SECONDS = 120  # unless acknowledged, handed out again; below the trainer's WAIT_LIMIT_SECONDS
LEASE_WAIT_SECONDS = 5  # a lease request waits this long for the first scored group before its 204

NO_DISK = (sqlite3.OperationalError, OSError)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# --- Routes -------------------------------------------------------------------------
def make_app(store, hub, reference, *, token, max_body_bytes, lease_seconds, lease_wait, regroup):
    """The WSGI app. `reference` has `info`, what GET /info answers, `max_tokens` and `replace`;
    `token` is None or the shared secret."""
    app, live, (html, html_headers) = bottle.Bottle(), Live(store), load_page()

    def refuse(status, reason, **headers):
        headers["Content-Type"] = "application/json"
        reason = reason[:1000]  # it may quote the body
        if status != 401:  # a browser's first request is one, before it asks for the token
            live.error(f"{bottle.request.method} {bottle.request.path}: {reason}")
        raise bottle.HTTPResponse(json.dumps({"error": reason}), status, headers)

    def explain(error):  # 404, 405, and 500 for what nobody foresaw (bottle prints its traceback)
        bottle.response.content_type = "application/json"
        if error.exception:
            live.error(f"{bottle.request.method} {bottle.request.path}: {error.exception!r}")
        return json.dumps({"error": repr(error.exception) if error.exception else error.body})

    app.default_error_handler = explain

    @app.install
    def need_disk(route):
        """A full disk, in any route, is a 503: nothing was stored, and clients wait for room."""

        def answer(*args, **kwargs):
            try:
                return route(*args, **kwargs)
            except NO_DISK as error:
                if isinstance(error, OSError) and error.errno not in NO_SPACE:
                    raise
                reason = f"the disk of the store {store.path} is full, or fails: {error}"
                refuse(503, f"{reason}; make room there, and all goes on", **{"Retry-After": "5"})

        return answer

    def read_body():
        text = bottle.request.environ.get("CONTENT_LENGTH") or ""
        length = int(text) if text.isdecimal() and len(text) < 20 else -1
        if not 0 < length <= max_body_bytes:
            refuse(413 if length > 0 else 411, f"a body of 1 to {max_body_bytes} bytes, please")
        # not request.body, which spills what is over 100 KB to a file
        body = bottle.request.environ["wsgi.input"].read(length)
        if len(body) != length:
            refuse(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def read_json(defaults=None, **kinds):
        """-> the values of the body's JSON, which must have these names and types; those in
        `defaults` may be missing."""
        try:
            asked = json.loads(read_body())
            values = [(defaults or {} if n not in asked else asked)[n] for n in kinds]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            refuse(400, f"the body must be JSON with {', '.join(kinds)}: {error!r}")
        for value, (name, kind) in zip(values, kinds.items(), strict=True):
            if type(value) is not kind:
                refuse(400, f"{name} must be of type {kind.__name__}")
            if kind is int and not -(2**62) < value < 2**62 and name != "limit":
                refuse(400, f"{name} is too large")
        return values

    def read_query():
        """-> run and the numbers of the query string."""
        query = bottle.request.query
        try:
            numbers = {k: int(v) for k, v in query.items() if k in ("version", "offset")}
            if not all(abs(n) < 2**62 for n in numbers.values()):
                raise ValueError("too large")
            return query.decode().run or "", numbers
        except ValueError as error:
            refuse(400, f"version and offset must be numbers: {error}")

    @app.hook("before_request")
    def authorise():
        path, get = bottle.request.path, bottle.request.method in ("GET", "HEAD")
        if not get and "HTTP_ORIGIN" in bottle.request.environ:  # a web page's; no client of ours
            refuse(403, "this is no address for web pages to send to")
        if not token or (get and path == "/health"):
            return
        # not get_header, which raises if a header is no UTF-8
        sent = bottle.request.environ.get("HTTP_AUTHORIZATION", "")
        if hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            return
        # Basic is for people, whose browser adds it to what any site has it send: so only to look
        _, password = bottle.parse_auth(sent) or ("", "")
        if get and hmac.compare_digest(password.encode(), token.encode()):
            return
        ask = {"WWW-Authenticate": 'Basic realm="grpo-split"'} if path in ("/", "/live") else {}
        refuse(401, "no or wrong token: set GRPO_TOKEN to the server's on this machine", **ask)

    @app.post("/upload")
    def upload():
        body, info = read_body(), reference.info
        try:
            group = unpack_group(
                body, vocab_size=info["vocab_size"], max_tokens=reference.max_tokens
            )
            run = hub.record(group.run) or {"oldest": 0, "scored": True}
            if group.policy_version < run["oldest"] or hub.ended(group.run):
                reason = "the run was over" if hub.ended(group.run) else "too old"
                new = store.put(group, b"", "dropped", reason)
                store.dropped[group.run] += new
                return {"stored": new, "dropped": True}
            asked = bottle.request.query
            if asked.get("pool") == "1" and group.flat:
                oldest = max(run["oldest"], min(int(asked.get("oldest") or 0), 2**62))
                if not regroup:
                    store.put(group, b"", "dropped", "flat")
                    return {"stored": False, "joined": []}
                live.uploaded(len(group.completion_ids))
                return {"stored": True, "joined": store.pool(group, body, oldest)}
            stored = store.put(group, body, "waiting" if run["scored"] else "scored")
            if stored:
                hub.uploaded(group.sampler)
                live.uploaded(len(group.completion_ids))
            return {"stored": stored}
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
        kinds = {"run": str, "limit": int, "oldest": int, "wait": bool, "step": int}
        run, limit, oldest, wait, step = read_json({"oldest": 0, "wait": True, "step": 0}, **kinds)
        limit = max(1, min(limit, 4096))
        try:
            store.drop_old(run, oldest, step)
            bottle.response.set_header("X-Dropped", str(store.dropped.pop(run, 0)))
            patience = lease_wait if wait else 0
            bodies = store.lease(run, limit, seconds=lease_seconds, patience=patience)
        except RuntimeError as error:
            refuse(500, str(error))
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))
        if not bodies:
            bottle.response.status = 204
            return b""
        bottle.response.content_type = "application/octet-stream"
        bottle.response.set_header("X-Facts", reference.info["facts"])  # who scores now
        parts = pack_bodies(bodies)
        bottle.response.content_length = sum(map(len, parts))
        return iter(parts)  # bottle would join a list

    @app.post("/ack")
    def ack():
        run, ids, step = read_json(run=str, ids=list, step=int)
        try:
            count = store.ack(run, [str(id) for id in ids], step)
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))
        # what no checkpoint covers yet: the trainer saves one before the store is full of it
        return {"acknowledged": count, "kept_bytes": store.kept(run), "max_bytes": store.max_bytes}

    @app.post("/drop")
    def drop():
        run, ids, reason = read_json(run=str, ids=list, reason=str)
        try:
            return {"dropped": store.drop(run, [str(id) for id in ids], reason[:200])}
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))

    @app.post("/checkpoint")
    def checkpoint():
        run, step = read_json(run=str, step=int)
        try:
            store.cover(run, step)
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))
        return {}

    @app.post("/resume")
    def resume():
        run, step = read_json(run=str, step=int)
        try:
            hub.resume(run, step)
            return store.resume(run, step)
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))

    @app.put("/policy")
    def put_policy():
        run, at = read_query()
        try:
            return {"bytes": hub.write(run, at["version"], at["offset"], read_body())}
        except (ValueError, KeyError) as error:
            refuse(400, f"a part of a policy with run, version and offset, please: {error}")

    @app.post("/policy")
    def post_policy():
        (record,) = read_json(record=dict)
        try:
            hub.publish(record)
        except ValueError as error:
            refuse(400, str(error))
        return {"version": record["version"]}

    @app.get("/policy")
    def get_policy():
        run, at = read_query()
        path = hub.path(run, at.get("version", -1))
        # with Range, Content-Length and Last-Modified
        return bottle.static_file(path.name, root=path.parent, mimetype="application/octet-stream")

    @app.post("/work")
    def work():
        kinds = {"held": int, "want": int, "run": str, "version": int, "sha256": str}
        kinds |= {"pulled": bool}
        worker, *rest = read_json({"pulled": False}, worker=str, **kinds)
        asked = dict(zip(kinds, rest, strict=True))
        try:
            return hub.work(worker, **asked, patience=0 if asked["held"] else lease_wait)
        except ValueError as error:
            refuse(400, str(error))

    @app.post("/reference")
    def post_reference():
        run, version = read_json(run=str, version=int)
        try:
            if version < 0:
                reference.replace(None, "")
            else:
                reference.replace(hub.path(run, version), f"{run}@{version}")
        except ValueError as error:
            refuse(400, str(error))
        return reference.info

    @app.post("/end")
    def end():
        (run,) = read_json(run=str)
        try:
            hub.end(run)
            store.forget(run)
        except ValueError as error:  # a text that is no UTF-8
            refuse(400, str(error))
        return {}

    @app.get("/info")
    def get_info():
        return reference.info | {"regroup": regroup}

    @app.get("/stats")
    def stats():
        run = bottle.request.query.decode().run or store.newest_run()
        ledger = {"ledger": store.ledger(run)} if run else {}
        return store.stats() | {"run": run, "workers": hub.stats()} | ledger

    @app.get("/health")
    def health():
        return {"ok": True}

    @app.post("/log")
    def log():
        run, records, samples = read_json(run=str, records=list, samples=list)
        try:
            live.log(run, records, samples)
        except ValueError as error:
            refuse(400, str(error))
        return {}

    @app.get("/live")
    def get_live():
        run, _ = read_query()
        bottle.response.headers.update(PLAIN)
        return live.snapshot(run, hub, get_info())

    @app.get("/")
    def page():
        bottle.response.headers.update(html_headers)
        return html

    return app


# --- Main ---------------------------------------------------------------------------
def main():
    token = os.environ.get("GRPO_TOKEN")
    if HOST not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.exit(f"HOST = {HOST!r} is reachable by others: set GRPO_TOKEN here and at the trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"loading the reference model {MODEL} ...", flush=True)
    load_tokenizer(MODEL)  # a wrong MODEL ends here, before there is a store
    store = Store(STORE, MAX_STORE_BYTES)
    hub = Hub(store, f"{STORE}.policies", MAX_POLICY_BYTES)
    reference = Reference(
        store,
        hub.folder,
        model=MODEL,
        dtype=DTYPE,
        temperature=TEMPERATURE,
        share_prompts=SHARE_PROMPTS,
    )
    app = make_app(
        store,
        hub,
        reference,
        token=token,
        max_body_bytes=MAX_BODY_BYTES,
        lease_seconds=LEASE_SECONDS,
        lease_wait=LEASE_WAIT_SECONDS,
        regroup=REGROUP,
    )
    # inbuf_overflow and recv_bytes: bodies stay in memory and come in few reads (2.8x the uploads);
    # outbuf_overflow: so do the answers to leases. Of clients that stall, 100 would shut out others
    try:
        server = waitress.create_server(
            app,
            host=HOST,
            port=PORT,
            threads=THREADS,
            inbuf_overflow=64 << 20,
            outbuf_overflow=64 << 20,
            recv_bytes=262_144,
            connection_limit=1000,
            asyncore_use_poll=True,  # select() ends at 1024 files
            max_request_body_size=MAX_BODY_BYTES + 1,  # refuses from this many bytes on
        )
    except (OSError, ValueError, OverflowError) as error:
        sys.exit(f"HOST = {HOST!r}, PORT = {PORT!r} can't be served: {error}; another server's?")
    http = threading.Thread(target=server.run, daemon=True)
    http.start()
    info = reference.info
    print(f"serving {MODEL} ({info['dtype']}) on http://{HOST}:{server.effective_port}", flush=True)

    def score(prompts, completions):
        return score_rows(
            reference.model,
            prompts,
            completions,
            budget=SCORE_BATCH_TOKENS,
            temperature=TEMPERATURE,
            vocab_size=info["vocab_size"],
        )

    # Scoring is the main thread: if it dies, the process dies, and nobody waits for a dead loop.
    said, total = time.monotonic(), 0
    while http.is_alive():
        reference.obey()
        # a batch or so at a time, as what is scored can be leased; a token takes about 8 bytes
        rows = store.waiting(limit=64, patience=1, size=8 * SCORE_BATCH_TOKENS)
        if rows:
            limits = {"vocab_size": info["vocab_size"], "max_tokens": reference.max_tokens}
            try:
                score_groups(store, rows, score, **limits)
                total += len(rows)
            except sqlite3.OperationalError as error:
                print(f"{STORE}: {error}; make room on its disk. Trying again", flush=True)
                time.sleep(5)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{time.strftime('%H:%M:%S')} scored {total} groups; {store.stats()}", flush=True)
    sys.exit("the HTTP server ended, so this process does")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("ended by Ctrl-C")
