"""64 clients post 1 MB each to ref_server.py: how long does /health take meanwhile?

    python tests/load.py benchmarks/results/load.md     # a minute and a half

The server is a process with a tiny model. Each client posts the same body again and again, as soon
as it is answered; the process of the probe asks for /health every 20 ms, on a new connection.

    long      256 completions of 1000 tokens: the model scores what it can, others wait or get a 503
    short     8000 completions of 30 tokens: most to unpack and to pack into batches
    refused   an id at the very end that the tokenizer does not have: unpacking alone, flat out
    stalled   half a body, and then nothing: connections that take no thread
"""

import collections
import http.client
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import psutil
import torch
from helpers import VOCAB, make_group
from measure import facts
from processes import server_process
from tiny import make_tiny

from grpo.client import RefServer
from grpo.wire import pack_ids

CLIENTS = 64
SECONDS = 20  # of each scenario
WAIT_SECONDS = 10  # a client's, for an answer; then it asks again
MOST_SECONDS = 0.1  # for /health
HEAD = "bodies | answers to 64 clients | /health asked | p50 ms | p99 ms | max ms"
HEAD += " | server's memory at first, MB | at most"


def body_of(scenario):
    completions, tokens = (8000, 30) if scenario == "short" else (256, 1000)
    group = make_group([tokens] * completions, prompt=20)
    if scenario == "refused":
        group.completion_ids[-1] = VOCAB
    return pack_ids([group])


def post(host, body, end, statuses, stalls):
    """A client: posts until the time `end`."""
    length = {"Content-Length": str(len(body))}
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(host, timeout=120)
        part = body[: len(body) // 2] if stalls else body
        try:
            connection.request("POST", f"/score?wait={WAIT_SECONDS}", part, length)
            connection.sock.settimeout(max(0.1, end - time.monotonic()) if stalls else 120)
            reply = connection.getresponse()
            reply.read()
            statuses[reply.status] += 1
            if reply.status == 503:
                time.sleep(float(reply.headers["Retry-After"]))
        except (OSError, http.client.HTTPException) as error:
            statuses["stalled" if stalls else type(error).__name__] += 1
        connection.close()


def probe(host, end):
    """-> how long each GET /health took, until the time `end`."""
    seconds = []
    while time.monotonic() < end:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        seconds.append(time.perf_counter() - begin)
        connection.close()
        time.sleep(0.02)
    return seconds


def measure(scenario, model, pool):
    """-> (what each GET /health took, the clients' statuses, the server's memory in MB)."""
    folder = Path(model.parent, scenario)
    folder.mkdir()
    with server_process(folder, model, DTYPE="float32") as (process, url):
        RefServer(url, 60).call("GET", "/info")
        host, body, statuses = urlsplit(url).netloc, body_of(scenario), collections.Counter()
        pool.submit(probe, host, 0).result()  # its imports are done
        end, memory = time.monotonic() + SECONDS, []
        found = pool.submit(probe, host, end)
        arguments = (host, body, end, statuses, scenario == "stalled")
        clients = [threading.Thread(target=post, args=arguments) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        while not found.done():
            memory.append(psutil.Process(process.pid).memory_info().rss >> 20)
            time.sleep(0.2)
        for client in clients:
            client.join()
        assert RefServer(url, 60).call("GET", "/health").ok
    return found.result(), statuses, memory


def main(table):
    torch.set_num_threads(1)
    rows, slow = [f"| {HEAD} |", "|---" * 8 + "|"], []
    spawn = multiprocessing.get_context("spawn")  # not forked: other threads may hold locks
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn) as pool:
        model = make_tiny(Path(folder, "model"), max_tokens=8192)
        for scenario in ("long", "short", "refused", "stalled"):
            found, statuses, memory = measure(scenario, model, pool)
            p50, *_, p99 = statistics.quantiles(found, n=100)[49:]
            times = [f"{1e3 * t:.1f}" for t in (p50, p99, max(found))]
            answers = ", ".join(f"{n} x {s}" for s, n in sorted(statuses.items(), key=str))
            row = [scenario, answers, len(found), *times, memory[0], max(memory)]
            rows.append("| " + " | ".join(map(str, row)) + " |")
            print(rows[-1], flush=True)
            slow += [f"{scenario}: /health took {max(found):.3f} s"] * (max(found) > MOST_SECONDS)
    what = facts("waitress", "bottle").replace("benchmarks/load.py", "tests/load.py")
    Path(table).write_text("\n".join([what, "", *rows, ""]))
    sys.exit("\n".join(slow) or None)


if __name__ == "__main__":
    main(sys.argv[1])
