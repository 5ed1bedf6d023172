"""Runs whose completions begin with solutions: the batch, the counted metrics, refusals, and a resume."""

import chatter
import jax
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm import methods
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning import schedules
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.setup import setup
from jaxrl_llm.topologies import FromTrace

NAMES = ["adhint_advantage", "adhint_schedule", "b_coder", "luffy", "rl_plus"]


def tiny(method, **changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "task": "arithmetic(level=add3)",
                                       "rewards": "exact", **changes})
    return config


def batch(config, steps=1):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    for step in schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params)):
        if step.finished is not None:
            steps -= 1
        if not steps:
            return run, step


def test_they_run_by_name():
    assert {*NAMES} == {row.slug for row in methods.METHODS.values() if row.guidance} <= {*methods.runnable()}


@pytest.mark.slow
def test_an_expert_is_in_every_group_and_others_are_counted_without_it():
    run, step = batch(tiny("luffy", guidance="traces=2"))
    rollouts, forest, metrics = step.finished.rollouts, step.finished.forest, step.finished.metrics
    tokenizer = run.source.stream.tokenizer
    for p, problem in enumerate(forest.problems):
        solution = [*tokenizer.encode(problem.answer), tokenizer.eos_id]
        for g in (0, 1):
            assert rollouts.tokens[p, g, :len(solution)].tolist() == solution and rollouts.mask[p, g].sum() == len(solution)
            assert rollouts.extras["expert"][p, g].sum() == len(solution)
    assert (rollouts.rewards[:, :2] == 1).all() and not rollouts.rewards[:, 2:].any()  # a new model solves nothing
    np.testing.assert_array_equal(rollouts.extras["hinted"], [[True, True, False, False]] * 4)
    np.testing.assert_array_equal(rollouts.extras["expert"], rollouts.role == Role.EXPERT)
    assert metrics["reward/mean"] == 0 and metrics["guide/reward"] == 1 and metrics["guide/share"] == 0.5
    assert metrics["completion/tokens"] == rollouts.mask[:, 2:].sum() and 4 <= metrics["guide/tokens"] <= 5
    assert step.finished.counts["tried"].sum() == 8 and not step.finished.counts["right"].any()
    advantages = np.asarray(step.learned.advantages)[..., 0]
    np.testing.assert_allclose(advantages, [[0.5, 0.5, -0.5, -0.5]] * 4)
    assert step.learned.metrics["max/mismatch"] < 1e-4  # of the policy's tokens


@pytest.mark.slow
def test_hints_are_prefixes_that_the_policy_completes():
    """The policy solves nothing alone: hints are .8 of the answer's digits, followed by the policy's own tokens."""
    run, step = batch(tiny("adhint_schedule", guidance="noise=0.0"))
    rollouts, forest = jax.device_get(step.finished.rollouts), step.finished.forest
    tokenizer = run.source.stream.tokenizer
    assert rollouts.valid.shape == (4, 8) and not rollouts.extras["hinted"][:, :4].any()
    for p, problem in enumerate(forest.problems):
        answer = tokenizer.encode(problem.answer)
        given = int(0.8 * len(answer) + 1e-4)
        for g in range(4, 8):
            assert rollouts.tokens[p, g, :given].tolist() == answer[:given]
            assert rollouts.extras["hint_mask"][p, g].sum() == given < rollouts.mask[p, g].sum()
    assert (rollouts.extras["hinted"].sum(1) == 4).all()
    assert step.finished.metrics["guide/unfit"] == 0 and step.finished.metrics["guide/answer"] == 0  # all lack the last digits
    texts = [forest.texts[end] for end in forest.ends[forest.aided]]
    assert all(text.startswith(problem.answer[:2]) for problem, text in zip(np.repeat(forest.problems, 4), texts))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="config.guidance='traces=2': these are numbers or terms, and method 'grpo' has"):
        setup.build(tiny("grpo", guidance="traces=2"))
    with pytest.raises(ValueError, match="experts begin all of the 1 completions"):
        setup.build(tiny("luffy", **{"sampling.group": 1}))
    with pytest.raises(ValueError, match="environment 'spelled' has neither an oracle nor a solution of problem 0; give it an"):
        setup.build(chatter.get_config(method="luffy", environment="chatter:spelled"))


@pytest.mark.slow
def test_an_expert_says_what_top_k_would_not_let_the_policy_draw():
    run, params = setup.build(tiny("luffy", **{"sampling.top_k": 5}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    behaviour, expert = finished.rollouts.behavior_logprobs, finished.rollouts.extras["expert"]
    assert np.isnan(behaviour[expert & finished.rollouts.mask]).all() and not np.isnan(behaviour[~expert]).any()
    assert np.isfinite([*learned.metrics.values()]).all() and learned.metrics["max/mismatch"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"method": "adhint_advantage"},
    {"method": "adhint_advantage", "schedule": "pipelined(lag=1)"},
    {"method": "luffy", "estimator": "xrpo_advantage", "schedule": "pipelined(lag=1)"}], ids=str)
def test_an_estimator_reads_what_the_policy_makes_of_what_an_expert_says(changes):
    """Entropies of hints, and log-probs of experts: of the policy before its update; its own tokens keep those of sampling."""
    run, params = setup.build(tiny(**changes))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    batch, sampled = jax.device_get(learned.rollouts), finished.rollouts
    begun, drawn = (batch.mask & batch.valid[..., None] & (batch.role == role) for role in (Role.EXPERT, Role.POLICY))
    own = sampled.mask & (sampled.role == Role.POLICY)
    assert begun.any() and (batch.entropies[begun] > 1).all() and learned.metrics["skipped_updates"] == 0
    assert np.isfinite(batch.behavior_logprobs[batch.mask]).all() and np.isfinite(np.asarray(learned.advantages)).all()
    np.testing.assert_array_equal(np.sort(batch.behavior_logprobs[drawn]), np.sort(sampled.behavior_logprobs[own]))
    assert (batch.old_logprobs[drawn] == batch.behavior_logprobs[drawn]).all() == run.learner.as_sampled


@pytest.mark.slow
def test_experts_begin_rollouts_of_a_budget():
    """Twelve rollouts for two problems: the first of each is an expert's, however many it gets."""
    run, step = batch(tiny("luffy", **{"budget.utility": "per_rollout", "sampling.group": 3, "sampling.max_group": 9}))
    rollouts, forest = step.finished.rollouts, step.finished.forest
    assert rollouts.valid.sum() == 12 and rollouts.valid.shape == (4, 9) and len(forest.problems) == 2
    np.testing.assert_array_equal(rollouts.extras["hinted"].sum(1)[:2], [1, 1])
    assert rollouts.extras["hinted"][:2, 0].all() and (rollouts.rewards[:2, 0] == 1).all()


HALF = '<tool_call>{"name": "calculator", "argument'  # of 87 bytes of a call with two numbers of three digits
TOOLS = {"environment": "tool_use(options={'level': 'add3', 'chat': True}, turns=3)", "model.num_layers": 1,
         "sampling.turn_tokens": 96, "sampling.max_tokens": 160, "prompts.max_tokens": 0}


def turns_of(forest, end):
    """`(role, tokens, text, reward)` of the nodes of a trajectory after the prompt."""
    nodes, offset = [], forest.offset
    while forest.role[end] != Role.PROMPT:
        ids = forest.tokens[offset[end]:offset[end] + forest.length[end]].tolist()
        nodes.append((Role(int(forest.role[end])), ids, forest.texts[end], float(forest.turn_rewards[end])))
        end = forest.parent[end]
    return nodes[::-1]


@pytest.mark.slow
def test_an_oracle_writes_the_first_turn_of_an_environment():
    """It says "a", which earns a quarter; two turns of the policy follow, and all three are turns of the trajectory."""
    run, step = batch(chatter.get_config(method="luffy", guidance="traces=2"))
    rollouts, forest, metrics = step.finished.rollouts, step.finished.forest, step.finished.metrics
    for end, aided in zip(forest.ends, forest.aided):
        first, *others = turns_of(forest, end)
        assert (first == (Role.EXPERT, [ord("a"), 258], "a", 0.25)) == aided
        assert [role for role, *_ in others] == [Role.ENVIRONMENT, Role.POLICY] * 2
    np.testing.assert_array_equal(rollouts.extras["hinted"], [[True, True, False, False]] * 4)
    np.testing.assert_array_equal(rollouts.extras["expert"][:, :2, :3], [[[True, True, False]] * 2] * 4)
    np.testing.assert_array_equal(rollouts.extras["step"], [[[0, 1, 2]] * 4] * 4)
    assert (rollouts.extras["step_rewards"][:, :2, 0] == 0.25).all()
    assert (rollouts.step_ids[:, :2, :2] == 0).all() and (rollouts.step_ids[:, :2, 2] == 1).all()
    assert metrics["guide/share"] == 0.5 and metrics["guide/tokens"] == 2 and metrics["environment/turns"] == 3
    assert metrics["reward/mean"] == pytest.approx(rollouts.rewards[:, 2:].mean())
    assert metrics["guide/reward"] == pytest.approx(rollouts.rewards[:, :2].mean())
    assert {*zip(forest.role.tolist(), forest.writer.tolist())} == {
        (Role.PROMPT, ""), (Role.EXPERT, "oracle"), (Role.ENVIRONMENT, ""), (Role.POLICY, "")}
    assert (metrics["writer/oracle/share"], metrics["writer/oracle/tokens"]) == (0.5, 2)
    assert metrics["writer/oracle/reward"] == metrics["guide/reward"]
    assert step.learned.metrics["max/mismatch"] < 1e-4


@pytest.mark.slow
def test_a_turn_that_an_expert_begins_is_one_turn_of_two_authors():
    """The expert's is half of a call of the calculator, which the policy completes."""
    _, step = batch(chatter.get_config(method="luffy", guidance="share=0.5", **TOOLS))
    rollouts, forest = step.finished.rollouts, step.finished.forest
    for end in forest.ends[forest.aided]:
        first, (role, rest, text, _), *_ = turns_of(forest, end)
        assert first == (Role.EXPERT, [*HALF.encode()], "", 0.0)
        assert role == Role.POLICY and len(rest) <= 96 - 43 and text.startswith(HALF)
    np.testing.assert_array_equal(rollouts.extras["expert"][:, 0].sum(-1), [43] * 4)
    assert (rollouts.step_ids[:, 0, :60] == 0).all() and (rollouts.mask[:, 0, :60]).all()
    np.testing.assert_array_equal(rollouts.extras["hinted"], [[True, False, False, False]] * 4)
    assert step.learned.metrics["max/mismatch"] < 1e-4


@pytest.mark.slow
def test_a_solution_that_does_not_fit_is_not_cut_short():
    _, step = batch(tiny("luffy", **{"sampling.max_tokens": 4}))
    rollouts, forest = step.finished.rollouts, step.finished.forest
    long = np.array([len(problem.answer) + 1 > 4 for problem in forest.problems])
    np.testing.assert_array_equal(rollouts.extras["hinted"][:, 0], ~long)
    assert step.finished.metrics["guide/unfit"] == long.sum() > 0 and "guide/answer" not in step.finished.metrics


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adhint_schedule", "luffy"])
def test_a_resumed_run_is_the_straight_one(tmp_path, method):
    options = {"checkpoint.every": 2, "eval.every": 3, "samples_every": 1, "eval.problems": 2, "steps": 3}
    run_files.assert_resumes_exactly(tmp_path, lambda: tiny(method, **options), step=3)


@pytest.mark.slow
def test_a_policy_that_solves_nothing_learns_from_experts():
    """Only the expert is right; its tokens become e times as likely in forty steps."""
    run, params = setup.build(tiny("luffy", **{"optimizer.learning_rate": 1e-2, "task": "arithmetic(level=digit)",
                                               "prompts.per_step": 16, "sampling.max_tokens": 4}))
    state, likely = setup.initial_state(run, params), []
    for step in schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params)):
        rollouts = step.learned.rollouts
        logprobs, _ = run.learner.layout.logprobs(step.learned.state.params, None, texts_of(rollouts))
        likely.append(float(logprobs[rollouts.extras["expert"] & rollouts.valid[..., None]].mean()))
        if len(likely) == 40:
            break
    assert np.mean(likely[-5:]) > np.mean(likely[:5]) + 1, likely


def test_an_expert_of_an_environment_is_the_problems_solution_where_it_has_one():
    run, _ = setup.build(chatter.get_config(method="luffy", **{
        **TOOLS, "sampling.max_tokens": 256, "sampling.turn_tokens": 128, "environment": "tool_use(task=word_problems)"}))
    problem, tokenizer = run.source.task.train[0], run.source.stream.tokenizer
    solution = [*tokenizer.encode(problem.extra["solution"]), tokenizer.eos_id]
    begun = [run.source.stream.partner.beginning(problem, uid, Role.EXPERT, FromTrace(0, share))[0].ids
             for uid, share in enumerate((1.0, 0.5))]
    assert begun == [solution, solution[:(len(solution) - 1) // 2]]
