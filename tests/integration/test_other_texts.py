"""Runs whose topology lets the policy read other texts than the prompt, and makes problems of its own."""
import dataclasses
import json

import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config

from jaxrl_llm.data.rollouts import Role, from_lists, sampled_logprobs
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.setup import setup
from jaxrl_llm.store import pending
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools.registry import Kind
from jaxrl_llm.topologies import TOPOLOGIES, Begin, BeginPart, Plan, Topology
from jaxrl_llm.topologies.base import asked, everyone

HINTED = [257, *b"An even longer prompt than its own, which is a hint: 3+4="]


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"model.num_layers": 1, **changes})
    return config


def hinted(prompts, group):
    """A group whose last two rollouts are written under a hint, which is longer than every prompt."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        return Plan() if len(forest.ends) else Plan(acts=tuple(act for row in range(prompts) for act in (
            Begin(row, group - 2), Begin(row, 2, reads=HINTED))))

    return Topology(plan, everyone, reads=len(HINTED))


@pytest.mark.slow
@pytest.mark.parametrize("changes", ({"sampling.engine": "scan"}, {"sampling.engine": "slots", "learner.packed_rows": 2}))
def test_what_was_written_under_a_hint_is_scored_again_under_it(changes, monkeypatch):
    """Before the update the policy is the sampler: it gives the same log-probs under the hint, and others under the prompt."""
    monkeypatch.setitem(TOPOLOGIES, "hinted", Kind(hinted))
    run, params = setup.build(tiny(topology="hinted", recorders="written, old", **changes))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    batch, seen = jax.device_get(learned.rollouts), finished.rollouts
    elsewhere = seen.role == Role.ELSEWHERE
    assert elsewhere[:, 2:].any() and not elsewhere[:, :2].any() and (seen.mask == (seen.role != Role.PADDING)).all()
    written = batch.extras["written_logprobs"]
    np.testing.assert_allclose(written[elsewhere], seen.behavior_logprobs[elsewhere], atol=1e-4)
    assert np.isnan(written[~elsewhere]).all()
    assert np.abs(batch.old_logprobs - seen.behavior_logprobs)[elsewhere].max() > 1e-3
    assert learned.metrics["max/mismatch"] < 1e-4 and np.isfinite([*learned.metrics.values()]).all()
    assert finished.counts["tried"].sum() == 8  # those under a hint say nothing of what the policy can


def reading(prompts, group):
    """The last rollout of each prompt is written under another problem, that of the second prompt under a very long one."""
    def shown(problem, times=1):
        first = problem.prompt[0] if problem.prompt and not isinstance(problem.prompt, str) else None
        words = "Hint! " * times + (problem.prompt if first is None else first["content"])
        return dataclasses.replace(problem, prompt=words if first is None else ({**first, "content": words},))

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        return Plan() if len(forest.ends) else Plan(acts=tuple(act for row, problem in enumerate(forest.problems) for act in (
            Begin(row, group - 1), Begin(row, 1, reads=shown(problem, 1 + 99 * (row == 1))))))

    return Topology(plan, everyone, reads=shown)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_a_problem_may_be_read_in_place_of_the_prompt(engine, monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "reading", Kind(reading))
    run, params = setup.build(tiny(topology="reading", **{"sampling.engine": engine, "prompts.overlong": "skip"}))
    forest = run.source.next(Snapshot(0, params, None, jax.random.key(0))).forest
    assert forest.lost.tolist() == [0, 1, 0, 0] and run.source.stream.read_tokens == run.source.stream.prompt_tokens + 8
    for row, problem in enumerate(forest.problems):
        read = [one for one, prompt in zip(forest.reads, forest.prompt) if one is not None and prompt == row]
        assert [bytes(one[1:]).decode() for one in read] == ["Hint! " + problem.prompt] * (row != 1)


@pytest.mark.slow
def test_a_problem_that_is_read_is_what_its_environment_opens_with(monkeypatch):
    """With the words of the environment about its tools."""
    monkeypatch.setitem(TOPOLOGIES, "reading", Kind(reading))
    run, params = setup.build(chatter.get_config(topology="reading", **{
        "model.num_layers": 1, "environment": "tool_use(options={'level': 'add3', 'chat': True}, turns=2)",
        "sampling.turn_tokens": 8, "sampling.max_tokens": 64, "prompts.max_tokens": 0, "prompts.overlong": "skip"}))
    forest = run.source.next(Snapshot(0, params, None, jax.random.key(0))).forest
    tokenizer = run.source.stream.tokenizer
    read = {int(row): tokenizer.decode(ids) for ids, row in zip(forest.reads, forest.prompt) if ids is not None}
    for row, text in read.items():
        asked = forest.problems[row].prompt[-1]["content"]
        own = tokenizer.decode(forest.prompt_ids(row).tolist())
        assert asked in own and text == own.replace(asked, "Hint! " + asked)
    assert {*read} == {0, 2, 3} and (forest.role[forest.ends] == Role.ELSEWHERE).sum() == 3


def test_a_problem_that_no_plan_encoded_has_no_ids():
    with pytest.raises(ValueError, match="Begin reads the problem 'Hint: 3.4=', whose prompt is not encoded; let a plan have"):
        Begin(0, reads=Problem("Hint: 3+4=", "7", 0)).read_ids


def making(prompts, group):
    """Half of the prompts are drawn; each brings a problem that the topology made of it, and the second does not fit."""
    def made(problem):
        words = problem.prompt + "?" if problem.id % 2 else problem.prompt * 50
        return dataclasses.replace(problem, prompt=words, id=-1 - problem.id)

    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts // 2)
        if asked(forest).any():
            return Plan()
        return Plan(acts=tuple(act for row, problem in enumerate(forest.problems) for act in (
            Begin(row, group), Begin(made(problem), group - 1), Begin(made(problem), 1))))

    return Topology(plan, everyone)


@pytest.mark.slow
def test_problems_that_a_topology_made_are_sampled_and_in_no_table(monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "making", Kind(making))
    run, params = setup.build(tiny(topology="making", **{"prompts.overlong": "skip"}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    forest, ids = finished.forest, [problem.id for problem in finished.forest.problems]
    assert len(ids) == 4 and ids[2:] == [-1 - ids[0], -1 - ids[1]]
    fits = [True, True, *(number % 2 == 1 for number in ids[:2])]
    assert np.bincount(forest.prompt[forest.ends], minlength=4).tolist() == [4 * one for one in fits]
    assert forest.lost.tolist() == [4 * (not one) for one in fits] and finished.counts["tried"].sum() == 8
    assert finished.rollouts.valid.sum(1).tolist() == [4 * one for one in fits]
    named = np.where(forest.role == Role.PROMPT, "", "one").astype(object)
    finished = finished._replace(forest=forest.with_columns(writer=named))
    again = pending.decode(json.loads(json.dumps(pending.encode(finished))), run.source)
    assert again.forest.writer.tolist() == named.tolist()
    assert again.forest.problems == forest.problems and again.forest.reads.tolist() == forest.reads.tolist()
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    assert np.isfinite([*learned.metrics.values()]).all()


def test_a_made_problem_that_does_not_fit_is_an_error_where_prompts_may_not_be_left_out(monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "making", Kind(making))
    run, params = setup.build(tiny(topology="making"))
    with pytest.raises(ValueError, match="prompt -.* tokens, the limit is prompts.max_tokens="):
        for number in range(9):
            run.source.next(Snapshot(number, params, None, jax.random.key(0)))


def test_log_probs_of_the_sampler_count_under_its_own_text_alone():
    """Two of the policy, one unknown, then of an expert, of a hint and of the policy under another text."""
    roles = jnp.int8([[[1, 1, 4, 3, 6]]])
    rollouts = from_lists([[1.0]], [[5]], role=roles, behavior_logprobs=jnp.float32([[[-1, jnp.nan, -3, -4, -5]]]))
    old = jnp.float32([[[-6, -7, -8, -9, -10]]])
    np.testing.assert_array_equal(sampled_logprobs(rollouts, old), [[[-1, -7, -8, -9, -10]]])
    np.testing.assert_array_equal(sampled_logprobs(rollouts.replace(role=None), old), [[[-1, -7, -3, -4, -5]]])
    lagged = jnp.where(jnp.arange(5) < 2, old, jnp.nan)  # under a lag nothing else is known of what was written elsewhere
    np.testing.assert_array_equal(sampled_logprobs(rollouts, lagged), [[[-1, -7, -3, -4, -5]]])


def test_acts_at_problems_that_joined_no_forest_have_no_row():
    act = Begin(Problem("1+1=", "2", -1), 1, (BeginPart(Role.EXPERT, "2"),))
    with pytest.raises(ValueError, match="Begin at the problem '1.1=', which is in no forest yet"):
        act.row
