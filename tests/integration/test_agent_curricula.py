"""Curricula, budgets and numbers of rollouts where a trajectory has several turns, also where some trajectories are lost."""
import dataclasses

import chatter
import numpy as np
import pytest
from test_curricula_runs import steps_of

from jaxrl_llm.environments import Environment
from jaxrl_llm.setup import setup

P, G, MOST = 4, 2, 6
CONTROL = {"siri": "period=2", "dart_curation": "threshold=0.0"}
METHODS = ("vade", "dars", "speed_rl", "gdro_rollout", "siri", "reinforce_ada", "dart_curation", "v0")


def fragile(one_in: int = 4) -> Environment:
    """`chatter.letters`, where the second turn raises in one trajectory of `one_in`, by its key."""
    inner = chatter.letters()

    def step(state, message):
        if state["turn"] == 1 and state["key"] % one_in == 0:
            raise KeyError("no such letter")
        return inner.step(state, message)

    return dataclasses.replace(inner, step=step)


def build(method, **changes):
    return setup.build(chatter.get_config(**{
        "method": method, "controllers": CONTROL.get(method, ""), "model.num_layers": 1, "sampling.group": G,
        "sampling.max_group": MOST, "sampling.max_draws": 2, **changes}))


def check(knobs, done):
    """The proposals of a step are those of its trajectories; returns the trajectories of each training problem."""
    finished, metrics = done.finished, done.finished.metrics | done.learned.metrics
    tried, right = (finished.counts[name] for name in ("tried", "right"))
    assert all(np.isfinite(value) for value in metrics.values()) and metrics["environment/turns"] >= 1
    assert (right <= tried).all() and metrics.get("skipped_updates", 0) == 0
    if "prompt_ids" in knobs:
        assert {*np.flatnonzero(tried)} <= {*knobs["prompt_ids"].tolist()}
    if finished.rollouts is not None:
        chosen = [problem.id for problem in finished.forest.problems]
        rollouts = finished.rollouts
        assert rollouts.valid.sum() == len(finished.forest.ends) <= tried.sum()
        assert {*rollouts.prompt_ids[rollouts.valid.any(1)].tolist()} <= {*chosen}
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_steps_by_name(method):
    run, params = build(method)
    seen = []
    for knobs, done in steps_of(run, params, 2):
        tried = check(knobs, done)
        seen.append(tried.sum())
        sizes = tried[tried > 0]
        assert sizes.min() >= G and sizes.max() <= MOST and not done.finished.metrics["environment/invalid"]
        if "group_sizes" in knobs:
            assert tried[knobs["prompt_ids"]].tolist() == knobs["group_sizes"].tolist()
        if "max_tokens" in knobs:
            assert done.finished.rollouts.present.sum(-1).max() <= knobs["max_tokens"]
        if "token_limits" in knobs:
            lengths = done.finished.rollouts.present.sum(-1).max(1)
            assert (lengths <= knobs["token_limits"][done.finished.rollouts.prompt_ids]).all()
    assert seen[0] > P * G or method not in ("dars", "gdro_rollout", "reinforce_ada")  # some got further trajectories


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gdro_rollout", "dars", "speed_rl"])
def test_groups_are_smaller_where_trajectories_are_lost(method):
    """One in four breaks in its second turn: it counts neither as tried nor in the batch, and its group is not filled up."""
    run, params = build(method, environment="test_agent_curricula:fragile", environment_invalid=0.9)
    lost = 0
    for knobs, done in steps_of(run, params, 2):
        tried = check(knobs, done)
        lost += done.finished.metrics["environment/invalid"]
        if method == "gdro_rollout":
            missing = knobs["group_sizes"] - tried[knobs["prompt_ids"]]
            assert (missing >= 0).all() and missing.sum() == done.finished.metrics["environment/invalid"]
    assert lost > 0


@pytest.mark.slow
def test_a_problem_s_own_limit_cuts_its_trajectories():
    """The same trajectories, cut where the limit of their problem is reached; at least one turn is begun."""
    run, params = build("dart_curation")
    state = setup.initial_state(run, params)
    knobs = run.learner.controls.proposed(state.control)
    place = run.source.position()
    whole = run.source.next(run.learner.publish(state)._replace(knobs=knobs)).rollouts
    limits = np.arange(2, 2 + len(run.source.task.train))
    run.source.set_position(place)
    cut = run.source.next(run.learner.publish(state)._replace(knobs={**knobs, "token_limits": limits})).rollouts
    np.testing.assert_array_equal(cut.prompt_ids, whole.prompt_ids)
    most = limits[cut.prompt_ids][:, None]
    lengths, before = cut.present.sum(-1), whole.present.sum(-1)
    assert (lengths <= most).all() and (lengths == before)[before <= most].all() and (lengths < before).any()
    both = np.arange(min(cut.tokens.shape[2], whole.tokens.shape[2])) < lengths[..., None]
    T = both.shape[2]
    np.testing.assert_array_equal(cut.tokens[..., :T][both], whole.tokens[..., :T][both])
