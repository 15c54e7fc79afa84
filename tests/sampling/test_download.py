"""A worker's download of a policy: resumed, checked, atomic."""

import hashlib
import random
import socket
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
import requests
from fakes import record_of
from helpers import Replies, reply

from grpo import client as client_module
from grpo.client import RefServer, holds

WEIGHTS = bytes(range(256)) * 40


def policy_record(weights=WEIGHTS, version=3, **changes):
    facts = {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return {"run": "the run", "version": version} | facts | changes


class Cutting:
    """An HTTP server that knows Range, and cuts each connection after so many bytes."""

    def __init__(self, weights, cuts):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.heads = []
        threading.Thread(target=self.run, args=(weights, cuts), daemon=True).start()

    def run(self, weights, cuts):
        for cut in cuts:
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as request:
                head = b"".join(iter(request.readline, b"\r\n")).decode()
                self.heads.append(head)
                first, last = map(int, head.split("Range: bytes=")[1].split()[0].split("-"))
                if cut is not None:  # None: hangs up without a word
                    body = weights[first : last + 1]
                    connection.sendall(reply(206, body[:cut], length=len(body)))
        self.socket.close()


def test_a_part_whose_connection_broke_is_asked_for_again(no_pause, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "PART_BYTES", 2 << 20)
    weights = random.Random(0).randbytes(5 << 20)
    server = Cutting(weights, [5 << 20, None, 0, 1 << 20, 5 << 20, 5 << 20])
    path = tmp_path / "policy"
    path.write_bytes(b"of a former policy")
    assert RefServer(server.url, 20).fetch(policy_record(weights), path) == path
    assert path.read_bytes() == weights
    assert all(head.startswith("GET /policy?run=the+run&version=3 ") for head in server.heads)
    starts = [int(head.split("Range: bytes=")[1].split("-")[0]) >> 20 for head in server.heads]
    assert starts == [0, 2, 2, 2, 2, 4]  # in MiB


def test_a_policy_that_is_gone_is_no_error(tmp_path):
    """A newer one has come: the worker asks for that."""
    server = Replies(reply(404, b"{}"))
    assert RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy") is None


def test_a_damaged_download_is_an_error(tmp_path):
    damaged = bytearray(WEIGHTS)
    damaged[5000] ^= 1
    server = Replies(reply(206, bytes(damaged)))
    with pytest.raises(RuntimeError, match="policy 3 was damaged on its way"):
        RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy")


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_answers_otherwise_is_an_error(tmp_path, status):
    server = Replies(reply(status, b"why"))
    with pytest.raises(RuntimeError, match=rf"/policy refused \({status}\): why"):
        RefServer(server.url, 20).fetch(policy_record(), tmp_path / "policy")


def test_a_download_from_nowhere_ends_with_a_sentence(tmp_path):
    server = Replies()  # listens, and hangs up
    with pytest.raises(RuntimeError, match="waited 0.2 s for .*/policy: no answer"):
        RefServer(server.url, 0.2).fetch(policy_record(), tmp_path / "policy")


def test_a_policy_goes_up_in_parts_and_comes_down_as_it_was(hub_server, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "PART_BYTES", 3000)
    (tmp_path / "sent").write_bytes(WEIGHTS)
    record = record_of({}, version=1)
    hub_server.publish(tmp_path / "sent", record)
    parts = [query["offset"] for method, query in hub_server.asked if method == "PUT"]
    assert parts == [0, 3000, 6000, 9000]
    assert record["bytes"] == len(WEIGHTS) and hub_server.hub.record() == record
    monkeypatch.setattr(client_module, "holds", lambda *_: False)  # as on another machine
    assert hub_server.fetch(record, tmp_path / "got") == tmp_path / "got"
    assert (tmp_path / "got").read_bytes() == WEIGHTS


def test_on_the_servers_machine_its_own_file_is_taken(hub_server, tmp_path):
    (tmp_path / "sent").write_bytes(WEIGHTS)
    record = record_of({}, version=1)
    hub_server.publish(tmp_path / "sent", record)
    assert hub_server.fetch(record, tmp_path / "got") == hub_server.hub.path("run", 1)
    assert (tmp_path / "got").stat().st_size == 0


OTHERS = {"another version": bytes(len(WEIGHTS)), "half of one": WEIGHTS[:-1], "nothing": None}


@pytest.mark.parametrize("here", OTHERS)
def test_a_path_of_another_machine_is_not_trusted(tmp_path, here):
    """The same path may exist here, with other weights, as where both began in the same image."""
    theirs = tmp_path / "a pölicy"
    if OTHERS[here]:
        theirs.write_bytes(OTHERS[here])
    server = Replies(reply(206, WEIGHTS, headers=f"X-Path: {quote(str(theirs))}\r\n"))
    got = RefServer(server.url, 20).fetch(policy_record(), tmp_path / "got")
    assert got == tmp_path / "got" and got.read_bytes() == WEIGHTS


def test_a_file_that_is_no_file_or_not_to_be_read_is_not_the_policy(tmp_path):
    record = policy_record()
    (tmp_path / "folder").mkdir()
    assert not holds(tmp_path / "folder", record) and not holds(Path(), record)
    assert not holds(Path("/dev/zero"), record) and not holds(tmp_path / "missing", record)
    (tmp_path / "policy").write_bytes(WEIGHTS)
    assert holds(tmp_path / "policy", record)


@pytest.mark.parametrize("lost", range(5))
def test_a_policy_arrives_though_an_answer_was_lost(
    hub_server, tmp_path, monkeypatch, no_pause, lost
):
    """Each request in turn is carried out, and its answer does not come."""
    monkeypatch.setattr(client_module, "PART_BYTES", 3000)
    (tmp_path / "sent").write_bytes(WEIGHTS)
    plain, count = hub_server.session.request, iter(range(99))

    def request(*arguments, **named):
        answer = plain(*arguments, **named)
        if next(count) == lost:
            raise requests.ConnectionError
        return answer

    hub_server.session.request = request
    hub_server.publish(tmp_path / "sent", record_of({}, version=1))
    assert hub_server.hub.path("run", 1).read_bytes() == WEIGHTS
