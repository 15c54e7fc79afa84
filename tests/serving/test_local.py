"""The live page of a trainer that has no server: it is there, and never in the way."""

import ast
import inspect
import json
import socket
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from helpers import call

from demo import free_port
from grpo.serving import local

RECORDS = [{"step": step, "reward": step / 2, "kl": 0.1} for step in range(3)]
SAMPLE = {"step": 2, "question": "?", "completion": "four", "rewards": {"format": 1.0}}


def constants(folder, port):
    return SimpleNamespace(RUN_DIR=str(folder), PAGE_PORT=port, MODEL="Qwen/Qwen2.5-3B")


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return reply.read()


def test_the_page_shows_what_is_logged_on_the_next_port_if_its_own_is_taken(tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        page = local.serve_page(constants(tmp_path, port))
    (line,) = capsys.readouterr().out.splitlines()
    assert f"(PAGE_PORT = {port} is taken)" in line
    served = int(line.split("127.0.0.1:")[1].split("/")[0])
    assert port < served < port + local.PORTS
    page.copy().log("demo-1", RECORDS, [SAMPLE])
    live = json.loads(get(served, "/live?metric=reward"))
    assert live["run"] == "demo-1" and live["curves"]["demo-1"]["reward"]["values"] == [0, 0.5, 1]
    group = json.loads(get(served, f"/group?id={live['groups'][0][0]}"))
    assert group["completions"][0]["completion"] == "four"
    assert "server" not in live  # nor what else page.html shows of one
    assert b"<script>" in get(served, "/")
    page.log("demo-1", [{"step": "x"}], [])  # refused: it is said, and nothing raises
    assert "not on the page: a record must be" in capsys.readouterr().out


def test_the_page_knows_what_was_logged_before_and_takes_nothing_from_others(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    c = constants(tmp_path, int(free_port()))
    live, server = local.start_page(c)
    live.log("demo-1", RECORDS, [])
    live.db.close()
    server.close()
    live, server = local.start_page(c)
    try:
        app, peer = server.application, {"REMOTE_ADDR": "127.0.0.1"}
        assert call(app, "GET", "/live", **peer)[0] == 401
        token = peer | {"HTTP_AUTHORIZATION": "Bearer secret"}
        found = json.loads(call(app, "GET", "/live", **token)[2])
        assert found["step"] == 2 and server.effective_host == "127.0.0.1"
        body = {"run": "demo-1", "records": [{"step": 9}], "samples": []}
        assert call(app, "POST", "/log", body, **token)[0] == 404
    finally:
        live.db.close()
        server.close()


@pytest.mark.parametrize("fault", ["database", "ports", "package"])
def test_without_a_page_the_run_goes_on(fault, tmp_path, monkeypatch, capsys):
    c = constants(tmp_path, int(free_port()))
    if fault == "database":
        (tmp_path / "page.sqlite").mkdir()
    elif fault == "ports":
        monkeypatch.setattr(local, "PORTS", 0)
    else:
        monkeypatch.setitem(sys.modules, "grpo.serving.gate", None)
    assert local.serve_page(c) is None
    assert "there is no live page, and the run goes on without: " in capsys.readouterr().out
    assert local.serve_page(constants(tmp_path, 0)) is None and not capsys.readouterr().out


def test_a_trainer_imports_no_web_server_before_it_serves_a_page():
    imports = [n for n in ast.parse(inspect.getsource(local)).body if hasattr(n, "names")]
    modules = {getattr(node, "module", node.names[0].name) for node in imports}
    assert "grpo.log" in modules
    assert not {m for m in modules if m.startswith(("grpo.serving", "bottle", "waitress"))}
