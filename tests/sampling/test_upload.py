"""Uploads: in order, several at once, and an error where the groups come from."""

from types import SimpleNamespace

import pytest
from fakes import ALL_RIGHT, ALL_WRONG, a_group

from grpo.sampling import upload


def test_an_upload_that_fails_is_raised_where_the_groups_come_from():
    """If its thread died in silence, the trainer would wait for ever."""
    refusal = RuntimeError("refused (400): rewards must be finite")

    def call(*_, **__):
        raise refusal

    uploader = upload.Uploader(SimpleNamespace(call=call))
    group = a_group([[1.0, -1.0], [-1.0, -1.0]])
    uploader.put(group, pool=False)
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.finish()
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.put(group, pool=False)


def test_uploads_say_whether_they_are_flat_and_are_answered_in_order(server):
    uploader = upload.Uploader(server)
    uploader.put(a_group([[1.0, -1.0], [-1.0, -1.0]], id="a"), pool=False)
    for id, outcome in (("b", ALL_WRONG), ("c", ALL_RIGHT)):
        uploader.put(a_group(outcome, id=id), pool=True)
    assert uploader.finish() == [
        {"stored": True},
        {"stored": True, "joined": []},
        {"stored": True, "joined": ["c+0", "c+1"]},
    ]


def test_groups_that_end_together_go_in_one_request(server, monkeypatch):
    """A flat one is asked about otherwise, and a large one might not fit with others."""
    monkeypatch.setattr(upload, "TOGETHER_SECONDS", 5)  # all that is put before finish()
    requests, call = [], server.call

    def counted(method, path, **request):
        requests.append(request["params"])
        return call(method, path, **request)

    server.call, answered = counted, []
    uploader = upload.Uploader(server, lambda: answered.append(len(requests)))
    groups = [a_group([[1.0, -1.0], [-1.0, -1.0]], id=f"{i}") for i in range(5)]
    for group in groups[:3]:
        uploader.put(group, pool=False)
    uploader.put(a_group(ALL_WRONG, id="flat"), pool=True, oldest=2)
    for group in groups[3:]:
        uploader.put(group, pool=False)
    assert [reply["stored"] for reply in uploader.finish()] == 6 * [True]
    assert requests == [
        {"pool": 0, "oldest": 0, "several": 1},
        {"pool": 1, "oldest": 2},
    ]
    assert answered == [1, 1, 1, 1, 1, 2]  # what a worker has in hand
    monkeypatch.setattr(upload, "UPLOAD_BYTES", 10)
    alone = upload.Uploader(server)
    for i in range(2):
        alone.put(a_group([[1.0, -1.0], [-1.0, -1.0]], id=f"large {i}"), pool=False)
    assert len(alone.finish()) == 2 and requests[2:] == 2 * [{"pool": 0, "oldest": 0}]
