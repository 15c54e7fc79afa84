"""Uploads: in order, several at once, and an error where the groups come from."""

from types import SimpleNamespace

import pytest
from fakes import a_group

from grpo.sampling import upload
from grpo.wire import pack_group, unpack_bodies


def test_an_upload_that_fails_is_raised_where_the_groups_come_from():
    """If its thread died in silence, the trainer would wait for ever."""
    refusal = RuntimeError("refused (400): rewards must be finite")

    def call(*_, **__):
        raise refusal

    uploader = upload.Uploader(SimpleNamespace(call=call))
    group = a_group([[1.0, -1.0], [-1.0, -1.0]])
    uploader.put(group)
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.finish()
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.put(group)


def test_groups_that_end_together_go_in_one_request(server, monkeypatch):
    """A large one goes alone: it might not fit with others."""
    monkeypatch.setattr(upload, "TOGETHER_SECONDS", 5)  # all that is put before finish()
    requests, call = [], server.call

    def counted(method, path, **request):
        requests.append(list(unpack_bodies(request["data"])))
        return call(method, path, **request)

    server.call, answered = counted, []
    uploader = upload.Uploader(server, lambda: answered.append(len(requests)))
    small = [a_group([[1.0, -1.0], [-1.0, -1.0]], id=f"{i}") for i in range(4)]
    large = a_group([[1.0, -1.0], [-1.0, -1.0]], id="large", lengths=(3, 200))
    monkeypatch.setattr(upload, "UPLOAD_BYTES", len(pack_group(large)) - 1)
    for group in (*small[:2], large, *small[2:], large):
        uploader.put(group)
    assert [reply["stored"] for reply in uploader.finish()] == 5 * [True] + [False]
    assert requests == [["0", "1"], ["large"], ["2", "3"], ["large"]]
    assert answered == [1, 1, 2, 3, 3, 4]  # what a worker has in hand
