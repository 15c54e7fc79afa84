"""The reference server: its routes as a WSGI function, and the process."""

import errno
import json
import os
import re

import pytest
import safetensors.torch
import torch
from helpers import INFO, VOCAB, FakeReference, call, make_group, mark_scored, put, refused

import ref_server
from grpo.serving.policies import Policies
from grpo.wire import pack_bodies, pack_group
from ref_server import make_app


# --- Routes ------------------------------------------------------------------------
@pytest.fixture
def policies(store, tmp_path):
    return Policies(store, tmp_path / "policies", max_bytes=10_000)


@pytest.fixture
def app(store, policies):
    """-> app(**changes): the WSGI app around the store."""
    settings = {"token": None, "max_body_bytes": 5000}
    settings |= {"lease_seconds": 60, "lease_wait": 0}
    reference = FakeReference()
    return lambda **changes: make_app(store, policies, reference, **settings | changes)


def test_a_group_goes_round(app, store):
    app, body = app(), pack_group(make_group())
    assert call(app, "POST", "/upload", body)[::2] == (200, b'{"stored": true}')
    assert call(app, "POST", "/upload", body)[::2] == (200, b'{"stored": false}')
    wanted = {"run": "run", "limit": 5}
    assert call(app, "POST", "/lease", wanted)[::2] == (204, b"")
    mark_scored(store)
    status, headers, blobs = call(app, "POST", "/lease", wanted)
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    (blob,) = safetensors.torch.load(blobs).values()
    assert blob.numpy().tobytes() == body + b"scored"
    assert call(app, "POST", "/lease", wanted)[0] == 204
    done = {"run": "run", "ids": ["group-000"], "step": 3}
    assert call(app, "POST", "/ack", done)[::2] == (
        200,
        b'{"acknowledged": 1, "kept_bytes": 0, "max_bytes": 100000}',
    )
    assert json.loads(call(app, "POST", "/ack", done)[2])["acknowledged"] == 0


def test_several_groups_come_in_one_body_all_or_none(app, store):
    app, groups = app(), [make_group(seed=i) for i in (2, 0, 1)]  # answered in this order
    blob = b"".join(pack_bodies({group.id: pack_group(group) for group in groups}))
    several = {"QUERY_STRING": "several=1"}
    status, _, answer = call(app, "POST", "/upload", blob, **several)
    assert (status, json.loads(answer)) == (200, {"groups": 3 * [{"stored": True}]})
    stored = [row[0] for row in store.db.execute("SELECT id FROM groups ORDER BY seq")]
    assert stored == [group.id for group in groups]
    again = json.loads(call(app, "POST", "/upload", blob, **several)[2])
    assert again == {"groups": 3 * [{"stored": False}]}
    broken = {"new": pack_group(make_group(seed=3)), "broken": b"no group"}
    answer = call(app, "POST", "/upload", b"".join(pack_bodies(broken)), **several)
    assert "not a safetensors blob with a group" in refused(answer, 400)
    for none in (b"no blob", pack_group(groups[0]), b"".join(pack_bodies({}))):
        assert "blob of groups" in refused(call(app, "POST", "/upload", none, **several), 400)
    assert store.stats()["waiting"] == 3


def test_several_groups_that_do_not_fit_are_none_of_them_stored(app, store):
    """Not the first of them, and the others when the client asks again."""
    app, bodies = app(), {f"{i}": pack_group(make_group(seed=i)) for i in range(3)}
    store.max_bytes = 2 * len(bodies["0"])
    blob = b"".join(pack_bodies(bodies))
    answer = call(app, "POST", "/upload", blob, QUERY_STRING="several=1")
    assert "the store holds its" in refused(answer, 503)
    assert store.stats()["waiting"] == store.bytes == 0
    store.max_bytes *= 2
    assert call(app, "POST", "/upload", blob, QUERY_STRING="several=1")[0] == 200
    assert len(store.waiting(9, 0)) == 3


@pytest.mark.parametrize("path", ["/stats", "/live", "/policy"])
def test_a_query_that_is_no_text_is_refused_with_a_sentence(app, path):
    status, _, body = call(app(), "GET", path, QUERY_STRING="run=%ff")
    assert status == 400 and b"a query of text" in body


def test_info_and_stats(app, store):
    app = app()
    put(store, 0)
    assert json.loads(call(app, "GET", "/info")[2]) == INFO
    stats = json.loads(call(app, "GET", "/stats")[2])
    assert stats["waiting"] == 1 and stats["workers"] == {}


def test_a_malformed_upload_is_refused_with_the_reason(app, store):
    """It must not be answered as a good one is."""
    app = app()
    infinite = pack_group(make_group(rewards=torch.full((3, 2), torch.inf)))
    assert "rewards must be finite" in refused(call(app, "POST", "/upload", infinite), 400)
    foreign = pack_group(make_group(prompt_ids=torch.tensor([VOCAB], dtype=torch.int32)))
    assert "0..394" in refused(call(app, "POST", "/upload", foreign), 400)
    long = pack_group(make_group(prompt=254))
    assert "context of 256" in refused(call(app, "POST", "/upload", long), 400)
    assert "safetensors" in refused(call(app, "POST", "/upload", b"\x80\x04pickle"), 400)
    assert sum(store.stats()[state] for state in ("waiting", "failed")) == 0


def test_lengths_are_checked_before_anything_is_read(app):
    app = app(max_body_bytes=100)
    assert "1 to 100 bytes" in refused(call(app, "POST", "/upload", b"x" * 101), 413)
    assert "1 to 100 bytes" in refused(call(app, "POST", "/lease", b" " * 101), 413)
    assert refused(call(app, "POST", "/upload", b"x", CONTENT_LENGTH=None), 411)
    assert refused(call(app, "POST", "/upload", b"", CONTENT_LENGTH="0"), 411)


@pytest.mark.parametrize("length", ["x", "1e3", "-1", "+5", " ", "9" * 5000])
def test_a_length_that_is_no_number_is_refused(app, length):
    status, _, body = call(app(), "POST", "/upload", b"x", CONTENT_LENGTH=length)
    assert status in (400, 411) and json.loads(body)["error"]


def test_a_reason_that_quotes_the_body_is_cut(app):
    long = pack_group(make_group(outcome="x" * 2000))
    reason = refused(call(app(), "POST", "/upload", long), 400)
    assert reason.startswith("outcome must be one of") and len(reason) == 1000


def test_a_full_store_says_when_to_come_back(app, store):
    """Without back-pressure half of all groups would stay in memory for ever."""
    store.max_bytes = 10
    answer = call(app(), "POST", "/upload", pack_group(make_group()))
    assert "10 bytes" in refused(answer, 503) and answer[1]["Retry-After"] == "1"


def test_a_full_disk_is_told_and_harms_nothing(app, store):
    """It was a 500, and the end of the scoring thread. SQLite says "full" of a page count, too."""
    app, bodies = app(max_body_bytes=500_000), put(store, 0)
    store.max_bytes = 1_000_000
    (pages,) = store.db.execute("PRAGMA page_count").fetchone()
    store.db.execute(f"PRAGMA max_page_count={pages}")
    before, large = store.stats()["bytes"], pack_group(make_group((200,) * 200, seed=1))
    answer = call(app, "POST", "/upload", large)
    assert f"{store.path} is full" in refused(answer, 503) and answer[1]["Retry-After"] == "5"
    assert store.stats()["bytes"] == before and not store.db.connection.in_transaction
    assert [body for _, body in store.waiting(9, 0)] == list(bodies.values())
    store.db.execute("PRAGMA max_page_count=100000")
    assert call(app, "POST", "/upload", large)[0] == 200


@pytest.mark.parametrize("code, status", [(errno.ENOSPC, 503), (errno.EACCES, 500)])
def test_a_disk_without_room_for_a_policy_is_told_too(app, policies, monkeypatch, code, status):
    def write(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(policies, "write", write)
    query = "run=run&version=0&offset=0"
    assert os.strerror(code) in refused(
        call(app(), "PUT", "/policy", b"x", QUERY_STRING=query), status
    )


BAD_JSON = [
    b"not json",
    b"\xff\xfe",
    b"[]",
    b"1",
    b'"run"',
    b"null",
    b"[" * 4000,
    b'{"run": "run"}',
    b'{"limit": 1, "ids": []}',
    b'{"run": 1, "limit": 1, "ids": []}',
    b'{"run": ["run"], "limit": 1, "ids": []}',
    b'{"run": "run", "limit": true, "ids": {}}',
    b'{"run": "run", "limit": 1.0, "ids": "group-000"}',
    b'{"run": "run", "limit": "1", "ids": null}',
    b'{"run": "run", "limit": NaN, "ids": NaN}',
    b'{"run": "run", "limit": Infinity, "ids": 1}',
    b'{"run": "\\ud800", "limit": 1, "ids": ["a"]}',
    b'{"run": "run", "limit": 1, "ids": 1, "oldest": "0"}',
    b'{"run": "run", "limit": 1, "ids": 1, "oldest": 9223372036854775808}',
    b'{"run": "run", "limit": 1, "ids": 1, "wait": 1}',
]


@pytest.mark.parametrize("route", ["/lease", "/ack"])
@pytest.mark.parametrize("body", BAD_JSON)
def test_bad_json_is_refused_with_the_reason(app, store, route, body):
    put(store, 0)
    mark_scored(store)
    assert refused(call(app(), "POST", route, body), 400)
    assert store.stats()["scored"] == 1


def test_ids_of_any_kind_end_no_lease_but_their_own(app, store):
    put(store, 0)
    odd = {
        "run": "run",
        "ids": [None, {}, [], 1e400, "'; DROP TABLE groups; --", 10**30],
        "step": 1,
    }
    assert json.loads(call(app(), "POST", "/ack", odd)[2])["acknowledged"] == 0
    half = {"run": "run", "ids": ["\ud800"], "step": 0, "reason": "half a letter"}
    assert refused(call(app(), "POST", "/ack", half), 400)
    assert refused(call(app(), "POST", "/drop", half), 400)
    assert store.stats()["waiting"] == 1


@pytest.mark.parametrize("limit", [0, -1, -(10**6), 10**6])
def test_a_strange_limit_is_brought_into_range(app, store, limit):
    put(store, 0, 1)
    mark_scored(store)
    _, _, blobs = call(app(), "POST", "/lease", {"run": "run", "limit": limit})
    assert len(safetensors.torch.load(blobs)) == (2 if limit > 0 else 1)


def test_a_failed_group_ends_its_runs_lease_with_500(app, store):
    """After an error in scoring the lease must not answer "nothing yet" for ever."""
    put(store, 0)
    store.failed(1, "ValueError: no")
    answer = call(app(), "POST", "/lease", {"run": "run", "limit": 1})
    assert refused(answer, 500) == "scoring group group-000 failed: ValueError: no"


def test_what_nobody_foresaw_is_told_in_json_too(app, store):
    app = app()
    assert "Not found" in refused(call(app, "GET", "/nothing"), 404)
    assert "not allowed" in refused(call(app, "GET", "/upload"), 405)
    store.db.close()  # as a disk that fails would
    reason = refused(call(app, "POST", "/upload", pack_group(make_group())), 500)
    assert "ProgrammingError" in reason


ROUTES = "GET /info,GET /stats,GET /,GET /no,POST /upload,POST /lease,POST /ack,POST /reference"
ROUTES += ",PUT /policy,POST /policy,GET /policy,POST /work,POST /end,GET /live,POST /log"
ROUTES += ",GET /group"


@pytest.mark.parametrize("route", ROUTES.split(","))
def test_every_route_asks_for_the_token(app, route):
    """Or whoever finds the port could read and write."""
    app = app(token="sécret")
    for sent in (None, "", "Bearer ", "Bearer secret", "Bearer sécret2", "sécret"):
        answer = call(app, *route.split(), b"x", HTTP_AUTHORIZATION=sent)
        assert "GRPO_TOKEN" in refused(answer, 401)
    assert call(app, *route.split(), b"x", HTTP_AUTHORIZATION="Bearer sécret")[0] != 401


# --- The process -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("TEMPERATURE", 0),
        ("TEMPERATURE", "1"),
        ("DTYPE", "float16"),
        ("SCORE_BATCH_TOKENS", 0),
        ("SHARE_PROMPTS", "yes"),
        ("MODEL", None),
        ("STORE", ""),
        ("PORT", 65536),
        ("PORT", "59875"),
        ("THREADS", 0),
        ("LEASE_WAIT_SECONDS", 120),
        ("LEASE_SECONDS", float("nan")),
        ("MAX_BODY_BYTES", 1 << 10),
        ("MAX_STORE_BYTES", 1 << 20),
        ("MAX_POLICY_BYTES", 1e9),
    ],
)
def test_a_bad_constant_of_the_server_is_named_with_its_value(
    constant, value, monkeypatch, tmp_path
):
    monkeypatch.setattr(ref_server, "MODEL", str(tmp_path / "none"))
    monkeypatch.setattr(ref_server, constant, value)
    with pytest.raises(SystemExit, match=re.escape(f"{constant} = {value!r} must be")):
        ref_server.main()


def test_a_server_that_can_not_start_says_why_and_ends(tiny, tmp_path, monkeypatch):
    """On 0.0.0.0 it must not serve without authentication."""
    monkeypatch.delenv("GRPO_TOKEN", raising=False)
    monkeypatch.setattr(ref_server.signal, "signal", lambda *_: None)
    cases = [
        ({"MODEL": str(tiny), "HOST": "0.0.0.0"}, "set GRPO_TOKEN here and at the trainer$"),
        ({"MODEL": str(tmp_path / "no_model"), "HOST": "127.0.0.1"}, "no_model"),
    ]
    monkeypatch.setattr(ref_server, "STORE", str(tmp_path / "store.sqlite"))
    for constants, sentence in cases:
        for name, value in constants.items():
            monkeypatch.setattr(ref_server, name, value)
        with pytest.raises(SystemExit, match=sentence):
            ref_server.main()
    assert not list(tmp_path.iterdir())
