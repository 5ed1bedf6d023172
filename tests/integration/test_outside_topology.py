"""A topology in a file outside the package: problems of its own, words of an expert, a memory and a last look at the batch."""
import importlib
import json
import sys

import jax
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.objectives.base import OBJECTIVES
from jaxrl_llm.sampling.position import jsonable
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies import TOPOLOGIES

MODULE = '''
import dataclasses

import jax.numpy as jnp

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.objectives.base import objective, token_objective
from jaxrl_llm.topologies import Begin, BeginPart, Plan, Topology, topology
from jaxrl_llm.topologies.base import asked, everyone


def retold(prompts, group):
    """Half of the prompts, and for each the same question in other words, whose first rollout begins with an old mistake."""
    memory = {"mistakes": []}

    def made(problem):
        return dataclasses.replace(problem, prompt=problem.prompt.replace("=", " is "), id=-1 - problem.id)

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts // 2)
        if asked(forest).any():
            return Plan()
        shown = (BeginPart(Role.EXPERT, (memory["mistakes"] or ["?"])[-1]),)
        return Plan(acts=tuple(act for row, problem in enumerate(forest.problems) for act in (
            Begin(row, group), Begin(made(problem), 1, shown), Begin(made(problem), group - 1))))

    def finish(forest):
        memory["mistakes"].append(f"not {len(memory['mistakes'])}")
        rewards = forest.rewards.copy()
        rewards[forest.ends[forest.aided]] = -1
        return forest.with_columns(rewards=rewards)

    return Topology(plan, everyone, finish=finish, memory=memory)


@topology(plants=True)
def declared(prompts, group):
    """The same, which says that others wrote what is trained on."""
    return retold(prompts, group)


@objective
def truncated(*, aggregation: str = "token_mean", max_len: int | None = None, unknown: str = ""):
    """-min(p / q, 2) A, where q is of the sampler."""
    def token_loss(logprobs, rollouts, advantages):
        return -jnp.minimum(jnp.exp(logprobs - rollouts.behavior_logprobs), 2) * advantages, {}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown=unknown)
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "retold_problems.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("retold_problems")
    TOPOLOGIES.pop("declared", None)
    OBJECTIVES.pop("truncated", None)
    sys.modules.pop("retold_problems", None)


def built(topology, **changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({
        "model.num_layers": 1, "topology": topology, "estimator": "xrpo_advantage", **changes})
    run, params = setup.build(config)
    return run, setup.initial_state(run, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("declared", "retold_problems:declared"))
def test_a_topology_with_problems_memory_and_finish_is_one_file(outside, name):
    """Its memory is in the next batch; what its expert says is measured under the policy, for an estimator that reads it."""
    run, state = built(name)
    for number in range(2):
        finished = run.source.next(run.learner.publish(state))
        forest, rollouts = finished.forest, finished.rollouts
        ids = [problem.id for problem in forest.problems]
        assert ids[2:] == [-1 - ids[0], -1 - ids[1]] and all(" is " in one.prompt for one in forest.problems[2:])
        said = {forest.texts[end].startswith("?" if not number else "not 0") for end in forest.ends[forest.aided]}
        assert said == {True} and rollouts.rewards[2:, 0].tolist() == [-1, -1]
        assert np.isnan(rollouts.behavior_logprobs[rollouts.role == Role.EXPERT]).all()
        learned = run.learner.learn(state, rollouts, facts=finished.facts)
        state, batch = learned.state, jax.device_get(learned.rollouts)
        assert np.isfinite(batch.behavior_logprobs[batch.mask]).all() and np.isfinite(np.asarray(learned.advantages)).all()
        assert learned.metrics["skipped_updates"] == 0 and learned.metrics["max/mismatch"] < 1e-4
    assert json.loads(json.dumps(jsonable(run.source.position())))["topology"] == {"mistakes": ["not 0", "not 1"]}


@pytest.mark.parametrize("term", ("", " + kl(0.01, against='behavior')"))
def test_an_objective_of_the_samplers_log_probs_says_what_counts_where_they_are_unknown(outside, term):
    built("declared", objective=f"truncated(unknown='old'){term}")
    built("", objective=f"truncated{term}")  # the sampler draws all tokens
    with pytest.raises(ValueError, match="the objective reads behavior_logprobs, and does not say what counts where they are "
                                         r"unknown, .* state token_objective\(..., unknown='old'\)"):
        built("declared", objective=f"truncated{term}")
    with pytest.raises(ValueError, match="Unknown log-prob in the place of an unknown one 'new'"):
        built("declared", objective="truncated(unknown='new')")


def test_words_of_others_that_no_topology_declares_are_an_error_where_an_estimator_reads_them(outside):
    run, state = built("retold_problems:retold")
    finished = run.source.next(run.learner.publish(state))
    with pytest.raises(ValueError, match="the estimator reads behavior_logprobs, which are unknown for 2 trained tokens of "
                                         r"this batch. Put @topology\(plants=True\) above"):
        run.learner.learn(state, finished.rollouts, facts=finished.facts)
