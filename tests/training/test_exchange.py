"""The exchange between ranks, workers and server: order, agreement, waits that end."""

import functools
import time
from types import SimpleNamespace

import pytest
from fakes import Ranks, an_inbox, references

from grpo.training import exchange as exchange_module
from grpo.training import metrics as report
from grpo.training.exchange import ReferenceLogps, take_workers_groups


def test_micro_batches_are_trained_in_the_order_in_which_they_are_scored(monkeypatch):
    ranks, both = Ranks(monkeypatch), references(["c"], ["a", "d"], ["b"])
    needed = [{"a", "b"}, {"c"}, {"d", "worker's"}, {"another worker's"}]
    turns = [SimpleNamespace(groups=groups) for groups in needed]

    def steps(rank):
        both[rank].expect("abcd", oldest=0)
        order = []
        for turn in both[rank].in_order_of_arrival(turns):
            ranks.meet("forward")
            both[rank].wait_for(turn.groups)
            order.append("".join(sorted(turn.groups)))
        return order, both[rank].arrived

    (order, scores), (other, others) = ranks.run(steps)
    assert order == other == ["another worker's", "c", "dworker's", "ab"]
    assert scores.keys() == others.keys() == set("abcd")
    for id in "abcd":
        assert [x.tolist() for x in others[id]] == [[-1, -1, -1], [-1]]


def test_a_lease_that_ran_out_gives_no_group_twice(monkeypatch):
    ranks = Ranks(monkeypatch)
    both = an_inbox(["a"], ["a"], ["b"], ["b", "c"], ["a"], ["d"]), None

    def steps(rank):
        settings = {"oldest": 0, "wait": True}
        return [[g.id for g in take_workers_groups(both[rank], n, **settings)] for n in (1, 1, 2)]

    assert ranks.run(steps) == [[["a"], ["b"], ["c", "d"]]] * 2


@pytest.mark.parametrize("what", ["workers' groups", "log-probs"])
def test_a_wait_for_groups_that_do_not_come_ends_with_a_sentence(alone, what):
    inbox = an_inbox(["a"])
    reference = ReferenceLogps(inbox, report.Clock())
    reference.expect(["b"], oldest=0)
    with pytest.raises(RuntimeError, match="waited 0.3 s for .*http://leases: 1 missing; "):
        if what == "workers' groups":
            take_workers_groups(inbox, 2, oldest=0, wait=True)
        else:
            reference.wait_for({"b"})


def test_what_comes_again_is_no_progress(alone):
    """Leases run out and are handed out again: for ever, if that counted."""
    inbox = an_inbox(*[["a"]] * 10_000)
    inbox.server.lease = functools.partial(slowly, inbox.server.lease)
    with pytest.raises(RuntimeError, match="waited 0.3 s for"):
        take_workers_groups(inbox, 2, oldest=0, wait=True)


def slowly(function, *args, **kwargs):
    time.sleep(0.02)
    return function(*args, **kwargs)


def test_a_wait_for_workers_names_them_or_says_how_to_start_one():
    quiet = {"a": {"held": 3, "seen_s": 99.0}}
    stats = {"workers": quiet, "waiting": 2, "done": 9}
    text = exchange_module.workers_state(SimpleNamespace(stats=lambda: stats))
    assert text == (
        "no worker was heard of for a minute: is `python grpo_ref_split.py worker` running?"
        " Groups at the server: 2 waiting"
    )
    stats = {"workers": quiet | {"b": {"held": 1, "seen_s": 2.0}}, "scored": 0}
    text = exchange_module.workers_state(SimpleNamespace(stats=lambda: stats))
    assert text == "b has 1 outstanding; groups at the server: none"
