"""An error on one rank ends all of them, at the same place: the run can be saved."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import MIXED, a_recipe, a_run, prompts_of
from rank_threads import Ranks

import grpo_ref_split as trainer
from grpo.metrics import evaluate
from grpo.ranks import RunFailed, all_or_none
from grpo.reference import NoReference
from grpo.rollout import Order
from grpo.run import Progress


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def failure_of(function):
    """-> the RunFailed that the function raises."""
    with pytest.raises(RunFailed) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no"), OSError("full")])
@pytest.mark.parametrize("failing", [{1}, {0, 1}])
def test_an_error_is_raised_by_all_ranks_with_its_cause_where_it_happened(ranks, error, failing):
    def block(rank):
        with all_or_none():
            pass
        with all_or_none():
            if rank in failing:
                raise error

    causes = ranks.run(lambda rank: failure_of(lambda: block(rank)).__cause__)
    assert causes == [error if rank in failing else None for rank in range(2)]


def test_a_rank_that_is_to_stop_at_once_takes_no_part(ranks):
    """A second Ctrl-C is no error of the block, and is not shared."""

    def block(rank):
        with all_or_none():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks.run(block)


def broken_on(rank, recipe, after):
    """-> the recipe, whose rewards raise on rank 1 after so many completions."""
    calls, rewards = [], recipe.task.rewards

    def counted(item, text):
        calls.append(text)
        if rank == 1 and len(calls) > after:
            raise ZeroDivisionError
        return rewards(item, text)

    recipe.task.rewards = counted
    return recipe


def run_of(rank, after):
    recipe = broken_on(rank, a_recipe(prompts_of([MIXED] * 20), PROMPTS_PER_STEP=6), after)
    progress = Progress("run", 3, evaluated=2, groups=9, prompts=40)
    order = Order(recipe.prompts, 0)
    return a_run(recipe, order=order, progress=progress, reference=NoReference())


@pytest.mark.parametrize("after", [3, 99])
def test_a_step_that_fails_on_one_rank_was_not_begun_on_any(ranks, after):
    """A run that resumes from what was saved then samples the same prompts: they were skipped."""

    def step(rank):
        run = run_of(rank, after)
        before = replace(run.progress)
        try:
            groups, _, _, taken = trainer.sample_rollout(run)
        except RunFailed as failure:
            return failure.__cause__
        finally:
            assert run.progress == before
        assert taken == len(groups)
        expected = {run.order[number].index for number in range(40, 46)}
        assert {group.index for group in groups} == expected  # each once, on one of the ranks
        return [group.id for group in groups]

    first, second = ranks.run(step)
    if after == 99:
        assert first == second == sorted(first) and len(first) == 6
    else:  # the cause is raised with the completion
        assert first is None and isinstance(second.__cause__, ZeroDivisionError)


def test_a_step_that_can_not_be_prepared_was_not_begun(alone, monkeypatch):
    run = run_of(0, after=99)
    before = replace(run.progress)
    monkeypatch.setattr(trainer, "evaluate_if_due", lambda run: None)
    monkeypatch.setattr(trainer, "samples_to_train", lambda *_: 1 / 0)
    with pytest.raises(RunFailed):
        trainer.train(run)
    assert run.progress == before


def test_the_place_in_the_data_moves_with_the_first_update_on_a_rollout(alone, monkeypatch):
    """So that a run that fails in the second update goes on with the next prompts."""
    made = iter([{}])
    run = run_of(0, after=99)
    run.c, run.laps = run.c.but(UPDATES_PER_ROLLOUT=2), []
    run.folder = SimpleNamespace(log_samples=lambda *_: None, log=lambda *_: None)
    monkeypatch.setattr(trainer, "samples_to_train", lambda *_: ["a sample"])
    monkeypatch.setattr(trainer, "update", lambda *_: next(made))
    with pytest.raises(StopIteration):
        bar = SimpleNamespace(show=lambda *_: None)
        trainer.train_on(run, bar, [], {"groups_sampled": 7}, [], 6)
    p = run.progress
    assert (p.step, p.prompts, p.groups) == (4, 40 + 6, 9 + 7)


def test_an_evaluation_that_fails_on_one_rank_ends_all(ranks):
    def evaluated(rank):
        run = run_of(rank, after=2)
        failure = failure_of(
            lambda: evaluate(run.sampler, 0, run.recipe.others(GROUP_SIZE=1), run.recipe.prompts)
        )
        return failure.__cause__ is None

    assert ranks.run(evaluated) == [True, False]
