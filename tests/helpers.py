"""What tests of the wire and of any WSGI app share: groups, canned replies, a call of an app."""

import io
import json
import socket
import threading

import torch

from grpo.sample import Group, Sample

VOCAB = 395  # the tiny tokenizer's
LIMITS = {"vocab_size": VOCAB, "max_tokens": 256}


def make_group(lengths=(3, 1, 2), *, seed=0, prompt=4, **changes):
    """-> a random valid Group with completions of these lengths; `changes` replace its fields."""
    draw, samples = torch.Generator().manual_seed(seed), []
    ids = lambda size: torch.randint(0, VOCAB, (size,), generator=draw).tolist()
    numbers = lambda size: torch.rand(size, generator=draw).tolist()
    prompt = ids(prompt)
    for size in lengths:
        truncated, *rewards = numbers(3)
        named = dict(zip(("correct", "format"), rewards, strict=True))
        logps = [-p for p in numbers(size)]
        samples.append(Sample(ids(size), logps, truncated < 0.5, rewards=named))
    facts = {"id": f"group-{seed:03d}", "run": "run", "version": 7, "outcome": "correct"}
    return Group(3, None, prompt, samples, **facts | changes)


class Replies:
    """A server on a free port that sends one canned reply to each connection in turn."""

    def __init__(self, *replies):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.requests = []
        threading.Thread(target=self.run, args=(replies,), daemon=True).start()

    def run(self, replies):
        for reply in replies:
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as request:
                head = list(iter(request.readline, b"\r\n"))
                lines = [line.lower().partition(b"content-length:") for line in head]
                length = [int(value) for _, name, value in lines if name]
                self.requests.append(b"".join(head) + request.read(sum(length)))
                connection.sendall(reply)
        self.socket.close()


def reply(status, body, length=None, headers=""):
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
    return head.encode() + body


def call(app, method, path, body=b"", **environ):
    """Calls the WSGI function without a socket; -> (status, headers, body)."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    answer, errors = {}, io.StringIO()

    def start_response(status, headers, exc_info=None):
        answer.update(status=int(status[:3]), headers=dict(headers))

    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "SERVER_NAME": "test",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "QUERY_STRING": "",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": errors,
        "CONTENT_LENGTH": str(len(body)),
    } | environ
    data = b"".join(app(environ, start_response))
    return answer["status"], answer["headers"], data


def refused(answer, status):
    """-> the reason in a JSON refusal with this status."""
    assert (answer[0], answer[1]["Content-Type"]) == (status, "application/json"), answer
    return json.loads(answer[2])["error"]
