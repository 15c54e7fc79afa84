"""A run resumes with another number of ranks: its optimiser and its place in the data."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo.options.recut import ADAM, WEIGHTS, recut
from grpo.rollout import Stream


# --- Joined and cut ---------------------------------------------------------------------
def row_of(rank, world, number):
    """-> a rank's part of `number` parameters, 1 2 3 ..., in ZeRO-2: padded to an even size."""
    size = -(-number // (2 * world)) * 2
    row = torch.arange(1.0, size * world + 1)
    return (row * (row <= number))[rank * size : (rank + 1) * size]


def moments_of(row):
    return {"step": torch.tensor(3.0), "exp_avg": row * 10, "exp_avg_sq": row * 100}


def save(folder, world, number, *, updated=True, positions=None):
    """Writes what the ranks of a run save, in DeepSpeed's form."""
    for rank in range(world):
        row = row_of(rank, world, number)
        adam = {"state": {0: moments_of(row)} if updated else {}, "param_groups": "as they were"}
        weights = row[row > 0]  # DeepSpeed saves them without the padding
        torch.save({ADAM: adam, WEIGHTS: [weights], "more": 1}, folder / f"optimizer_{rank}.pt")
        own = {"position": (positions or range(world))[rank], "random": random.getstate()}
        own["torch"] = torch.get_rng_state().tolist()
        Path(folder, f"rank_{rank}.json").write_text(json.dumps(own))


def become(monkeypatch, rank, world):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)


@pytest.mark.parametrize("number, updated", [(3, True), (3, False), (41, True)])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_rank_gets_what_it_would_have_had_in_a_run_of_that_many_ranks(
    before, number, updated, tmp_path, monkeypatch
):
    """Also if a rank's part is all padding."""
    save(tmp_path, before, number, updated=updated)
    for world, rank in [(1, 0), (2, 0), (2, 1), (3, 2), (4, 1)]:
        become(monkeypatch, rank, world)
        row = row_of(rank, world, number)
        part, _ = recut(tmp_path, before, [len(row)], seed=0)
        assert part[WEIGHTS][0].equal(row) and part["more"] == 1
        assert part[ADAM]["param_groups"] == "as they were"
        found, expected = part[ADAM]["state"][0], moments_of(row) if updated else {}
        assert found.keys() == expected.keys()
        assert all(found[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("steps, world", [((3, 5), 1), ((4,), 2), ((3, 5), 3), ((6, 2, 4), 2)])
def test_the_data_goes_on_at_the_lowest_position(steps, world, tmp_path, monkeypatch, capsys):
    """`steps` are the prompts that each rank has seen. What lies before the lowest position has
    been seen by all; the log counts what is seen again."""
    prompts, before = list(range(50)), len(steps)
    order = list(zip(range(50), Stream(prompts, 0)))
    streams = [Stream(prompts, 0, rank, before) for rank in range(before)]
    seen = {next(stream) for stream, number in zip(streams, steps) for _ in range(number)}
    save(tmp_path, before, 24, positions=[stream.position for stream in streams])
    again, states = [], []
    for rank in range(world):
        become(monkeypatch, rank, world)
        _, own = recut(tmp_path, before, [24], seed=0)
        states.append(own["torch"])
        stream = Stream(prompts, 0, rank, world)
        stream.position = own["position"]
        again += [next(stream) for _ in range(12 // world)]
    lowest = min(stream.position for stream in streams)
    assert {prompt for _, prompt in order[:lowest]} <= seen
    assert sorted(again) == sorted(prompt for _, prompt in order[lowest : lowest + 12])
    out = capsys.readouterr().out
    assert f"number {lowest};" in out and f" {len(seen & set(again))} prompts after" in out
    saved, new = states[:before], states[before:]
    assert all(state == torch.get_rng_state().tolist() for state in saved)
    assert all(state not in saved for state in new) and len(set(map(str, new))) == len(new)
