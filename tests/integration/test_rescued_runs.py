"""Runs whose topologies sample failed problems again: engines agree, environments, three steps and a resume."""
import dataclasses

import jax
import numpy as np
import planned
import pytest
import run_files
import tiny_config

from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.setup import setup

RARE = "format(pattern='(?s).*[a-d].*')"  # a tenth of the output of an untrained model
NAMES = ("guide_grpo", "prefix_rl", "bepa")


def tiny(method, **changes):
    """Sums with solutions, in which few rollouts are right."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "task": "attempts(level=nocarry3)",
                                       "rewards": RARE, "sampling.max_tokens": 12, "filters": "none", **changes})
    return config


def learned(config):
    """The first batch of a run, with what its learner makes of it."""
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    return run, finished, run.learner.learn(state, finished.rollouts, facts=finished.facts)


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_both_engines_sample_the_same(method):
    run, params = setup.build(tiny(method, **{"sampling.engine": "scan"}))
    other, _ = setup.build(tiny(method, **{"sampling.engine": "slots"}))
    one, two = (which.source.next(Snapshot(0, params, None, jax.random.key(0))).forest for which in (run, other))
    for name in ("uid", "role", "tokens", "length", "rewards"):
        np.testing.assert_array_equal(one.columns[name], two.columns[name], err_msg=name)
    assert one.problems == two.problems and {*one.role.tolist()} - {Role.PROMPT, Role.POLICY}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topology"), [("guide_grpo", "share=0.0"), ("prefix_rl", "share=0.0")])
def test_a_batch_without_words_of_others_has_the_shape_of_those_with_them(method, topology):
    run, params = setup.build(tiny(method, topology=topology))
    rollouts = run.source.next(Snapshot(0, params, None, jax.random.key(0))).rollouts
    np.testing.assert_array_equal(rollouts.role, np.where(rollouts.mask, Role.POLICY, Role.PADDING))


@pytest.mark.slow
def test_what_is_written_under_a_hint_is_scored_under_it_in_an_environment():
    """The prompt of the environment with a hint is read; the loss of these turns has it, and the prompt, in its ratio."""
    run, finished, after = learned(planned.get_config("guide_grpo"))
    forest, rollouts, batch = finished.forest, finished.rollouts, jax.device_get(after.rollouts)
    tokenizer, rows = run.source.stream.tokenizer, [row for row, one in enumerate(forest.problems) if one.id < 0]
    assert rows and finished.metrics["hint/prompts"] == len(rows) / 4 and len(forest.problems) == 4
    for row in rows:
        node, _ = chains(forest, forest.ends[forest.prompt[forest.ends] == row])
        said = node[forest.role[node] == Role.ELSEWHERE]
        assert {tokenizer.decode(forest.reads[one]) for one in said} == {
            f"{forest.problems[row].prompt[0]['content']}\n\nHint: {forest.problems[row].id * -1 - 1} is\n"}
    elsewhere = rollouts.role == Role.ELSEWHERE
    written = batch.extras["written_logprobs"]
    np.testing.assert_allclose(np.sort(written[batch.role == Role.ELSEWHERE]),
                               np.sort(rollouts.behavior_logprobs[elsewhere]), atol=1e-4)
    assert 0 < after.metrics["hinted_fraction"] < 1 and after.metrics["max/mismatch"] < 1e-4
    assert after.metrics["max/hinted_ratio"] != pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["guide_grpo", "bepa"])
def test_an_environment_that_shows_no_hints_is_refused(method):
    config = planned.get_config(method)
    config.environment, config.environment_waits = "planned:deaf", "yes"  # in threads of this process
    run, params = setup.build(config)
    with pytest.raises(ValueError, match="read .*is.* in place of a prompt, and environment 'say' opens both alike; let"):
        for number in range(4):
            run.source.next(Snapshot(number, params, None, jax.random.key(number)))


@pytest.mark.slow
def test_parts_of_traces_are_read_in_an_environment_and_not_trained_on():
    run, finished, after = learned(planned.get_config("prefix_rl", topology="share=1.0", **{"sampling.turn_tokens": 12}))
    forest, rollouts = finished.forest, finished.rollouts
    assert all(one.id < 0 for one in forest.problems) and rollouts.valid.all()
    begun = rollouts.role == Role.HINT
    for row, problem in enumerate(forest.problems):
        number, share, _ = problem.extra["cut"]
        words = problem.extra["solution"].encode()
        count = int(share * len(words) + 1e-4)
        assert number == 0 and 3 <= count <= 8
        assert rollouts.tokens[row, :, :count].tolist() == [[*words[:count]]] * 4 and begun[row].sum(-1).tolist() == [count] * 4
    assert not rollouts.mask[begun].any() and after.metrics["max/mismatch"] < 1e-4
    assert finished.counts["tried"].sum() == 0  # they say nothing of what the policy can from the start


@pytest.mark.slow
def test_a_trace_by_a_plan_is_cached_and_enters_a_later_group_that_fails():
    """In an environment of two turns: the whole conversation is stored, and put back under the prompt without the plan."""
    run, params = setup.build(planned.get_config("bepa"))
    source, snapshot = run.source, run.learner.publish(setup.initial_state(run, params))
    first = source.next(snapshot)
    rescued = np.unique(first.forest.prompt[first.forest.role == Role.ELSEWHERE]).tolist()
    assert rescued and first.rollouts.valid.all() and not first.rollouts.extras["replayed"].any()
    problem = first.forest.problems[rescued[0]]
    end = first.forest.ends[first.forest.prompt[first.forest.ends] == rescued[0]][-1]
    assert first.forest.role[end] == Role.ELSEWHERE and first.forest.rewards[end] == 1

    def failing(forest):
        rewards = forest.rewards.copy()
        rewards[forest.ends] = 0
        return forest.with_columns(rewards=rewards, components=np.zeros_like(forest.components))

    again = dataclasses.replace(source, data=run_files.Given([problem] * 4), topology=source.topology._replace(
        finish=lambda forest: failing(forest)))
    again.memory = source.memory
    later = again.next(snapshot._replace(version=1))
    row = later.rollouts.extras["replayed"].sum(1).argmax()
    assert later.rollouts.extras["replayed"].sum() == 1 and later.rollouts.extras["replayed"][row, -1]
    assert later.rollouts.rewards[row].tolist() == [0, 0, 0, 1] and "plan/solved" not in later.metrics
    np.testing.assert_array_equal(later.rollouts.tokens[row, -1][later.rollouts.mask[row, -1]],
                                  first.rollouts.tokens[rescued[0], -1][first.rollouts.mask[rescued[0], -1]])


@pytest.mark.slow
def test_under_a_lag_old_log_probs_of_what_is_written_elsewhere_are_measured():
    """ACE reads old log-probs, which sampling gives of the other tokens."""
    run, params = setup.build(tiny("guide_grpo", estimator="ace", schedule="pipelined(lag=1)", rewards=(
        "format(pattern='(?s).*[a-f].*')")))
    state = setup.initial_state(run, params)
    steps = [one for _, one in zip(range(2), run.schedule.steps(
        run.source, run.learner, state, run.learner.frozen(state.params)))]
    elsewhere = [one.finished.rollouts.role == Role.ELSEWHERE for one in steps]
    assert any(one.any() for one in elsewhere)
    assert all(one.learned.metrics["skipped_updates"] == 0 and np.isfinite(one.learned.metrics["loss"]) for one in steps)


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_a_resumed_run_is_the_straight_one(tmp_path, method):
    options = {"checkpoint.every": 2, "eval.every": 0, "samples_every": 0, "eval.problems": 2, "steps": 3}
    run_files.assert_resumes_exactly(tmp_path, lambda: tiny(method, **options), step=3)
