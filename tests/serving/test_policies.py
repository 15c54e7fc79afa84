"""Policies: uploaded in parts, published atomically, downloaded by range."""

import json
from urllib.parse import urlencode

import pytest
from helpers import (
    MAX_POLICY,
    WEIGHTS,
    ask,
    call,
    files,
    make_group,
    mark_scored,
    publish,
    put,
    record_of,
    refused,
)

from grpo.serving.pacing import Pacing
from grpo.serving.policies import RECORD, Policies
from grpo.serving.store import Store
from grpo.wire import pack_bodies, pack_group


# --- Policies: up ------------------------------------------------------------------
def put_part(app, part, **query):
    query = {"run": "run", "version": 0, "offset": 0} | query
    query = urlencode({k: v for k, v in query.items() if v is not None})
    return call(app, "PUT", "/policy", part, QUERY_STRING=query)


def get_policy(app, run="run", version=0, **headers):
    query = urlencode({"run": run, "version": version})
    return call(app, "GET", "/policy", QUERY_STRING=query, **headers)


def commit(app, record):
    return call(app, "POST", "/policy", {"record": record})


def test_a_policy_goes_up_in_parts_and_is_there_when_all_have_come(app, policies):
    for offset in range(0, len(WEIGHTS), 300):
        part = WEIGHTS[offset : offset + 300]
        status, _, answer = put_part(app, part, offset=offset)
        assert (status, json.loads(answer)) == (200, {"bytes": offset + len(part)})
        assert policies.record() is None and get_policy(app)[0] == 404
    assert commit(app, record_of())[::2] == (200, b'{"version": 0}')
    assert get_policy(app)[::2] == (200, WEIGHTS)
    assert policies.record() == policies.record("run") == record_of()
    assert len(files(policies)) == 1  # no part is left


def test_what_a_full_store_undoes_is_not_counted(app, policies, store):
    """A client repeats such a request twice a second."""
    publish(policies, 5, oldest=5)
    old, new = (pack_group(make_group(id=f"v{v}", policy_version=v)) for v in (1, 5))
    data = b"".join(pack_bodies({"v1": old, "v5": new}))
    store.max_bytes = len(new) - 1
    assert call(app, "POST", "/upload", data, QUERY_STRING="several=1")[0] == 503
    assert store.report_dropped("run") == 0
    store.max_bytes = 10**6
    assert call(app, "POST", "/upload", data, QUERY_STRING="several=1")[0] == 200
    assert store.report_dropped("run") == 1


def test_groups_without_a_reference_are_scored_once_the_run_has_one(policies, store):
    """Else they come without the log-probs that a run with KL_BETA waits for."""
    publish(policies, 0, scored=False)
    put(store, 0)
    mark_scored(store)
    publish(policies, 1, scored=False)
    assert store.stats()["scored"] == 1
    publish(policies, 2, scored=True)
    assert store.stats()["waiting"] == 1
    mark_scored(store)
    publish(policies, 3, scored=True)
    assert store.stats()["scored"] == 1


def test_ranks_upload_what_they_want_scored_whatever_was_published(app, policies, store):
    """A run that published without a KL penalty, and resumes with one and without workers."""
    publish(policies, 0, scored=False)
    for sampler in ("trainer", "worker"):
        body = pack_group(make_group(id=sampler, sampler=sampler))
        assert call(app, "POST", "/upload", body)[0] == 200
    assert (store.stats()["waiting"], store.stats()["scored"]) == (1, 1)


def test_an_upload_that_broke_off_begins_again(app):
    put_part(app, b"of a trainer that died" * 9)
    put_part(app, WEIGHTS[:500])
    put_part(app, WEIGHTS[500:], offset=500)
    assert commit(app, record_of())[0] == 200 and get_policy(app)[2] == WEIGHTS


def test_a_part_whose_answer_was_lost_may_be_sent_again(app):
    """The client repeats a request when the connection breaks: the part is there already."""
    put_part(app, WEIGHTS[:500])
    assert put_part(app, WEIGHTS[500:600], offset=500)[0] == 200
    assert put_part(app, WEIGHTS[500:600], offset=500)[0] == 200
    put_part(app, WEIGHTS[600:], offset=600)
    assert commit(app, record_of())[0] == 200 and get_policy(app)[2] == WEIGHTS


@pytest.mark.parametrize("odd", ["x", "", 2**62, -(10**30), 10**300])
@pytest.mark.parametrize("name", ["version", "offset"])
def test_a_version_or_offset_that_is_no_number_of_ours_is_refused(app, policies, name, odd):
    assert "must be numbers" in refused(put_part(app, WEIGHTS, **{name: odd}), 400)
    assert files(policies) == []


@pytest.mark.parametrize("offset", [501, 10**9, -1])
def test_a_part_that_is_not_next_is_refused(app, offset):
    put_part(app, WEIGHTS[:500])
    reason = refused(put_part(app, WEIGHTS[500:], offset=offset), 400)
    assert f"not at {offset}" in reason
    assert put_part(app, WEIGHTS[500:], offset=500)[0] == 200  # which changed nothing


def test_a_policy_that_is_too_large_is_refused_with_the_constant(app):
    put_part(app, b"x" * 600)
    reason = refused(put_part(app, b"x" * 401, offset=600), 400)
    assert "MAX_POLICY_BYTES = 1000" in reason
    assert put_part(app, b"x" * 400, offset=600)[0] == 200
    assert "1 to 5000 bytes" in refused(put_part(app, b"x" * 5001), 413)
    assert refused(put_part(app, b""), 411)


@pytest.mark.parametrize("query", [
    {"version": None},
    {"offset": None},
    {"version": "one"},
    {"offset": "0x10"},
    {"offset": "9" * 5000},
    {"version": "1.5"},
])  # fmt: skip
def test_a_part_without_its_place_is_refused(app, policies, query):
    assert refused(put_part(app, WEIGHTS, **query), 400)
    assert files(policies) == []


BAD_RECORDS = {
    "a byte is missing": ({"bytes": len(WEIGHTS) + 1}, "769 bytes of policy 0 have not all come"),
    "one too many came": ({"bytes": len(WEIGHTS) - 1}, "767 bytes .* have not all come"),
    "another version": ({"version": 1}, "of policy 1 have not all come"),
    "another run": ({"run": "other"}, "have not all come"),
    "damaged": ({"sha256": "0" * 64}, "SHA-256 differs"),
    "no hash": ({"sha256": None}, "sha256 must be of type str"),
    "hash that is none": ({"sha256": "../" * 21 + "a"}, "64 hex digits"),
    "hash in capitals": ({"sha256": "A" * 64}, "64 hex digits"),
    "no room for anybody": ({"capacity": 0}, "capacity 1 or more"),
    "a flag as number": ({"version": True}, "version must be of type int"),
    "a number as flag": ({"scored": 1}, "scored must be of type bool"),
    "a float": ({"oldest": 0.0}, "oldest must be of type int"),
    "settings as list": ({"settings": []}, "settings must be of type dict"),
    "proof null": ({"proof": None}, "proof must be of type dict"),
    "half a surrogate": ({"run": "\ud800"}, "surrogates not allowed"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_record_that_lies_is_refused_and_nothing_is_published(app, policies, name):
    changes, reason = BAD_RECORDS[name]
    put_part(app, WEIGHTS)
    with pytest.raises(ValueError, match=reason):
        policies.publish(record_of(**changes))
    assert refused(commit(app, record_of(**changes)), 400)
    assert policies.record() is None and get_policy(app)[0] == 404
    assert commit(app, record_of())[0] == 200  # the parts are still there


def test_a_record_is_an_object_with_all_its_fields(app, policies):
    put_part(app, WEIGHTS)
    for body in (b"", b"[]", b'{"record": []}', b'{"record": null}', b"{}", b"no json"):
        assert refused(call(app, "POST", "/policy", body), 400 if body else 411)
    for name in RECORD:
        record = record_of()
        del record[name]
        assert f"{name} must be of type" in refused(commit(app, record), 400)
    assert policies.record() is None


def test_a_commit_whose_answer_was_lost_is_the_same_as_once(app, policies):
    for version in range(3):
        put_part(app, WEIGHTS, version=version)
        assert commit(app, record_of(version))[0] == 200
        assert commit(app, record_of(version))[::2] == (200, b'{"version": %d}' % version)
    assert len(files(policies)) == 2 and get_policy(app, version=2)[2] == WEIGHTS


NAMES = ["../../evil", "..", "/etc/passwd", "a/b", "a\\b", "模型 ü", "a\0b", ".", "x" * 200, " "]


@pytest.mark.parametrize("run", NAMES)
def test_no_name_of_a_run_becomes_a_path(app, policies, tmp_path, run):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert put_part(app, WEIGHTS, run=run)[0] == 200
    assert commit(app, record_of(run=run))[0] == 200
    assert get_policy(app, run)[::2] == (200, WEIGHTS)
    (name,) = files(policies)
    assert name.isascii() and set(name) <= set("0123456789abcdef-.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert policies.record()["run"] == run
    for other in NAMES:
        assert (policies.path(other, 0) == policies.path(run, 0)) == (other == run)


# --- Policies: down ----------------------------------------------------------------
@pytest.mark.parametrize(("asked", "status", "expected"), [
    (None, 200, WEIGHTS),
    ("bytes=0-", 206, WEIGHTS),
    ("bytes=500-", 206, WEIGHTS[500:]),
    ("bytes=10-19", 206, WEIGHTS[10:20]),
    ("bytes=767-", 206, WEIGHTS[767:]),
    ("bytes=768-", 416, None),
])  # fmt: skip
def test_a_policy_comes_in_the_range_that_is_asked_for(app, policies, asked, status, expected):
    publish(policies)
    got, headers, body = get_policy(app, HTTP_RANGE=asked)
    assert got == status
    if expected:
        assert body == expected and int(headers["Content-Length"]) == len(expected)
    if status == 206:
        first = len(WEIGHTS) - len(expected) if asked.endswith("-") else 10
        last = first + len(expected) - 1
        assert headers["Content-Range"] == f"bytes {first}-{last}/{len(WEIGHTS)}"


@pytest.mark.parametrize(
    "query", ["run=run&version=7", "run=no&version=0", "run=run", "", "run=%ff"]
)
def test_a_policy_that_is_gone_is_not_found(app, policies, query):
    publish(policies)
    answer = call(app, "GET", "/policy", QUERY_STRING=query)
    assert refused(answer, 400 if "%ff" in query else 404)


def test_only_the_two_newest_of_a_run_are_kept(app, policies):
    publish(policies, 3, run="other")
    for version in (8, 9, 10, 100, 1000):
        publish(policies, version, b"weights of %d" % version)
    assert [get_policy(app, version=v)[0] for v in (8, 9, 10, 100, 1000)] == [404] * 3 + [200] * 2
    assert get_policy(app, version=1000)[2] == b"weights of 1000"
    assert get_policy(app, "other", 3)[0] == 200 and len(files(policies)) == 3


def test_who_reads_a_policy_may_finish_though_it_is_deleted(app, policies):
    publish(policies, 0)
    with open(policies.path("run", 0), "rb") as file:
        for version in (1, 2):
            publish(policies, version)
        assert get_policy(app, version=0)[0] == 404 and file.read() == WEIGHTS


def test_all_of_it_is_there_when_it_is_opened_again(tmp_path):
    first = Store(tmp_path / "store.sqlite", 10_000)
    policies = Policies(first, tmp_path / "policies", MAX_POLICY)
    publish(policies, 4)
    policies.write("run", 5, 0, WEIGHTS[:100])
    assert ask(Pacing(first, policies, 0), version=4, want=3)["count"] == 3
    first.db.close()
    second = Store(tmp_path / "store.sqlite", 10_000)
    policies = Policies(second, tmp_path / "policies", MAX_POLICY)
    assert policies.record() == record_of(4) and policies.path("run", 4).read_bytes() == WEIGHTS
    answer = ask(Pacing(second, policies, 0), version=4, want=2)
    assert answer == {"policy": record_of(4), "first": 3, "count": 2}
    assert policies.write("run", 5, 100, WEIGHTS[100:]) == len(WEIGHTS)  # goes on where it was
    policies.publish(record_of(5))
    second.db.close()
