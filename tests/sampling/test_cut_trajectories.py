"""Trajectories that a limit of the run ends before their environment: the reward of an object, in every way of running."""
import dataclasses

import chatter
import numpy as np
import pytest
from faulty_environments import TASK, Drawers

from jaxrl_llm.environments import Environment, base, of_methods
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies import groups

HIDDEN = dataclasses.replace(TASK, train=[dataclasses.replace(TASK.train[i], extra={"hidden": 1 + i % 2}) for i in range(20)])
CALL = '<tool_call>{"name": "open_drawer", "arguments": {"number": 1}}</tool_call>'


def opened(*, replayable: bool = True, waits: bool = False, broken: bool = False) -> Environment:
    """Drawers, of which every message opens the first one, whatever it says; the policy never says that it is done.

    A `broken` one cannot say its reward.
    """
    inner = of_methods(Drawers, HIDDEN, turns=16, replayable=replayable)
    return dataclasses.replace(
        inner, step=lambda state, message: inner.step(state, {**message, "content": CALL}), waits=waits,
        cut=(lambda state: float("nan")) if broken else inner.cut)


def rewards(**changes):
    run, params = setup.build(chatter.get_config(**{
        "prompts.max_tokens": 96, "sampling.max_tokens": 128, "sampling.turn_tokens": 8, **changes}))
    forest = run.source.next(run.learner.publish(setup.initial_state(run, params))).forest
    return run, forest


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"environment": "test_cut_trajectories:opened"}, {"environment": "test_cut_trajectories:opened(replayable=False)"},
    {"environment": "test_cut_trajectories:opened(replayable=False, waits=True)"},
    {"environment": "test_cut_trajectories:opened", "sampling.max_turns": 30, "sampling.max_tokens": 40}],
    ids=["turns, processes", "turns, threads", "turns, beside the engine", "tokens"])
def test_a_trajectory_that_is_cut_gets_the_reward_of_its_object(changes):
    """Problem i hides the coin in drawer 1 + i mod 2; all trajectories open the first drawer until they are cut."""
    run, forest = rewards(**changes)
    owner = forest.prompt[forest.ends]
    expected = np.array([forest.problems[row].extra["hidden"] == 1 for row in owner], np.float32)
    assert len(owner) == 16 and not forest.failures and set(expected) == {0.0, 1.0}
    np.testing.assert_array_equal(forest.rewards[forest.ends], expected)
    assert forest.turn_rewards is not None and forest.turn_rewards.sum() == expected.sum()
    assert not run.source.stream.partner.runner._running and not run.source.stream.partner.runner._sent


@pytest.mark.slow
def test_trajectories_that_wait_for_their_last_reward_are_not_taken():
    run, params = setup.build(chatter.get_config(**{
        "environment": "test_cut_trajectories:opened(replayable=False, waits=True)", "prompts.max_tokens": 96,
        "sampling.max_tokens": 128, "sampling.turn_tokens": 8}))
    stream, problem = run.source.stream, run.source.task.train[0]
    forest = run.source.planted([(problem, stream.partner.encode([problem], stream.tokenizer)[0])], 0)
    stream.publish(run.learner.publish(setup.initial_state(run, params)))
    stream.apply(forest, groups([0], stream.group), 0)
    while stream._held or stream._queue:
        stream.advance()
    with pytest.raises(ValueError, match="wait for their last reward"):
        stream.take(forest)
    while stream.advance():
        pass
    assert len(stream.take(forest).ends) == stream.group


@pytest.mark.slow
def test_a_trajectory_whose_last_reward_fails_is_lost():
    from jaxrl_llm.environments.runner import TooManyInvalid
    with pytest.raises(TooManyInvalid, match="cut returned nan.*allowed is a finite number"):
        rewards(environment="test_cut_trajectories:opened(broken=True)")


def test_a_cut_can_be_replayed():
    environment = opened()
    state, turns = base.replay(environment, HIDDEN.train[0], 0, [{"role": "assistant", "content": ""}, base.CUT])
    assert turns[-1] == base.Turn(reward=1.0, done=True) and state.turns == 1
