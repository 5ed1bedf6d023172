"""Methods of agents by name: environments' facts of turns reach them, and filters of single rollouts reach the loss."""
import json
import sys

import chatter
import jax
import numpy as np
import pytest
import run_files
import streams

from jaxrl_llm import environments, methods
from jaxrl_llm.control.base import without
from jaxrl_llm.learning import optimizers, schedules
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.tools.written import calls

BOTH_SIDES = {"environment": "chatter:duel", "sampling.max_tokens": 64, "sampling.max_turns": 4}
CONTEXTS = {"environment": "chatter:forgetful", "sampling.max_turns": 6, "method": "multi_context_grpo"}
CORRECTED = {"environment": "purified(environment='chatter:letters', mark='')", "sampling.max_turns": 4}
WINDOWS = {"environment": "recent(environment='chatter:letters', turns=1, contexts=3)"}
ROWS = {
    "simpletir_filter": {}, "simpletir": {"sampling.max_draws": 2}, "verltool": {"sampling.observation_tokens": 3},
    "echo": {},
    "agentgym_rl": {}, "tti": {"controllers": "least=1, most=3"}, "turn_control": {}, "table_gpt_r1": {},
    "cleaner_saar": CORRECTED, "rapo_steps": {"environment": "chatter:seeking"},
    "dr_mas": BOTH_SIDES, "advevo_baseline": BOTH_SIDES, "spiral": BOTH_SIDES, "sage_skills": BOTH_SIDES,
    "rank_grpo": {"environment": "ranked_list(brief=True)", "sampling.turn_tokens": 24, "prompts.max_tokens": 40},
    "multi_context_grpo": CONTEXTS, "memsearcher": {**CONTEXTS, "method": "memsearcher"}, "markov_multi_turn": WINDOWS,
    "archer": {"critic.pretrain_steps": 1, "estimator": "critic_epochs=4, baseline=True"},
    "rstar2_roc": {"estimator": "train_rollouts=2, min_negative=1, min_positive=1"},
}


def scale(learned, rollouts):
    """The factor that removes turns with advantage 0 from the mean over tokens."""
    tokens = rollouts.mask & rollouts.valid[..., None]
    return tokens.sum() / (np.asarray(learned.advantages) != 0)[tokens].sum()


@pytest.fixture(scope="module")
def filtered():
    run, params = setup.build(chatter.get_config(method="simpletir_filter"))
    state = setup.initial_state(run, params)
    return run, run.source.next(run.learner.publish(state))


def fresh(run):
    return setup.initial_state(run, run.learner.policy.model.init(jax.random.key(0)))


@pytest.mark.slow
def test_rollouts_with_a_void_turn_count_in_advantages_alone(filtered):
    run, finished = filtered
    rollouts = finished.rollouts
    void = (rollouts.extras["void"] & rollouts.mask).any(-1)
    assert 0 < void[rollouts.valid].mean() < 1
    plain, _ = setup.build(chatter.get_config(method="grpo", objective="clip_high=0.28, dual_clip=3.0"))
    learned, other = run.learner.learn(fresh(run), rollouts), plain.learner.learn(fresh(plain), rollouts)
    np.testing.assert_array_equal(learned.advantages, other.advantages)
    np.testing.assert_array_equal(learned.rollouts.mask, rollouts.mask & ~void[..., None])
    tokens = rollouts.mask & rollouts.valid[..., None]
    assert learned.metrics["filter/simpletir_filter/dropped"] == pytest.approx(void[rollouts.valid].mean())
    assert learned.metrics["filter/simpletir_filter/dropped_tokens"] == pytest.approx(
        tokens[void].sum() / tokens.sum())
    hand = without(learned.rollouts, ~void)  # the update is that of the remaining rollouts, with these advantages
    state, _ = plain.learner.layout.update(fresh(plain), plain.learner.place(hand), learned.advantages, None)
    for mine, theirs in zip(jax.tree.leaves(learned.state.params), jax.tree.leaves(state.params)):
        np.testing.assert_allclose(mine, theirs, atol=1e-7)


def test_a_batch_of_void_turns_changes_nothing(filtered):
    run, finished = filtered
    rollouts = finished.rollouts
    rollouts = rollouts.replace(extras={**rollouts.extras, "void": np.ones_like(rollouts.extras["void"])})
    before = fresh(run)
    kept = jax.tree.map(np.asarray, (before.params, before.opt_state))
    learned = run.learner.learn(before, rollouts)
    assert int(learned.state.step) == 1 and learned.metrics["filter/simpletir_filter/dropped"] == 1
    assert optimizers.updates_planned(learned.state.opt_state) == 1  # and it was not made
    after = learned.state.params, optimizers.at_update(learned.state.opt_state, 0)
    jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, after))


@pytest.mark.slow
def test_the_policy_reads_how_many_turns_are_left(filtered):
    run, finished = filtered
    stream, forest = run.source.stream, finished.forest
    state = fresh(run)
    limits = stream.partner.limits(None, 3, 2)
    assert limits.turns == 3 and [limits.left(turn) for turn in (1, 2)] == [1, 1]
    rows = stream.partner.plant([forest.problems[0]], [forest.prompt_ids(0).tolist()], 0)
    played = streams.grow(stream, state.params, rows, np.array([0]), 0, state.key, max_turns=3, announced_turns=2)
    shown = [text for text, role in zip(played.texts, played.role) if role == 2]
    assert shown and all(text.endswith("\nTurns left: 1.") for text in shown)
    assert stream.partner.limits(None, 3, 0).announced == 0


@pytest.mark.skipif(sys.platform != "linux", reason="programs run in the sandbox of Linux")
def test_the_environments_of_papers_can_be_made():
    named = {row.slug: calls(row.defaults["environment"]) for row in methods.METHODS.values() if "environment" in row.defaults}
    walked = named.pop("ui_s1")
    assert walked == [("walked", {"environment": "treasure"})] and named.keys() == {"simpletir", "simpletir_filter"}
    for (name, options), in named.values():
        made = environments.make(name, **options)
        state, _ = made.reset(made.task.train[0], 0)
        turn = made.step(state, {"role": "assistant", "content": "```python\nprint('a' * 600)\n```"})
        assert turn.messages[0]["content"] == f"{'a' * 256}\n[88 characters left out]\n{'a' * 256}" and made.last


@pytest.mark.slow
def test_simpletir_goes_from_short_to_long_trajectories_and_reads_that_the_last_turn_comes(tmp_path):
    """Trajectories of three turns are cut after the second in the first phase, the first of three steps."""
    config = chatter.get_config(method="simpletir", environment="chatter:letters(last='Last.')", **{"sampling.max_draws": 2})
    loop.train(config, tmp_path)
    lines = [line for line in run_files.lines(tmp_path) if "environment/turns" in line]
    assert [(line["phase"], line["environment/turns"]) for line in lines] == [(1, 2), (2, 3), (2, 3)]
    run, params = setup.build(config)
    forest = run.source.next(run.learner.publish(setup.initial_state(run, params))).forest
    heard = {text for text, role in zip(forest.texts, forest.role) if role == 2}
    assert heard <= {"Good.", "No.", "Good.\nLast.", "No.\nLast."} and any(text.endswith("Last.") for text in heard)
    shown = [text for text, role in zip(forest.texts, forest.role) if role in (1, 2)]
    assert sum(text.endswith("Last.") for text in shown) * 2 == sum(text.startswith(("Good.", "No.")) for text in shown)


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS)
def test_rows_run_by_name(method):
    run, params = setup.build(chatter.get_config(**{"method": method, **ROWS[method]}))
    state = setup.initial_state(run, params)
    steps = schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))
    learned, turns = 0, []
    for _, step in zip(range(3), steps):
        turns.append(step.finished.metrics.get("control/max_turns"))
        learned += step.learned.metrics.get("grad_norm", 0) > 0
        assert step.learned.metrics.get("skipped_updates", 0) == 0 and step.finished.metrics["environment/turns"] >= 1
    assert learned or method == "simpletir"  # an untrained policy may fill no batch of these
    assert method != "tti" or turns == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("method, task, tokens, warmup", [
    ("gui_g1_weights", "grounding(elements=1, size=64)", 16, 150),
    ("swe_rl_reward", "edits(files=1, size=64, heldout=16, brief=True)", 16, 0)])
def test_rows_of_tasks_run_by_name(method, task, tokens, warmup, tmp_path):
    shape = {"sampling.max_tokens": tokens, "prompts.max_tokens": 96, "warmup.steps": warmup, "warmup.batch": 8,
             "warmup.learning_rate": 1e-2}
    loop.train(chatter.get_config(environment="", task=task, method=method, **shape), tmp_path)
    lines = run_files.lines(tmp_path)[1:]
    assert len(lines) == 3 and all(line["skipped_updates"] == 0 for line in lines)
    if warmup:
        assert any(line["grad_norm"] > 0 for line in lines)
    else:  # a policy that does not know the format: the lowest reward for all
        assert all(line["reward/mean"] == -1 and line["groups/all_equal"] == 1 for line in lines)
    refused = chatter.get_config(environment="", task="arithmetic", method=method)
    with pytest.raises(NotImplementedError, match=f"config.task={task.partition('(')[0]}"):
        setup.build(refused)


@pytest.fixture(scope="module")
def game():
    run, params = setup.build(chatter.get_config(method="spiral", **BOTH_SIDES))
    return run, run.source.next(run.learner.publish(setup.initial_state(run, params)))


@pytest.mark.parametrize("cut", [False, True])
def test_both_sides_of_a_game_are_credited_with_what_they_get(game, cut):
    """With every second game cut, these get nothing and move no baseline."""
    run, finished = game
    rollouts = finished.rollouts
    assert rollouts.extras["settled"][rollouts.valid].all()
    settled = np.ones(rollouts.valid.shape, bool)
    settled[:, ::2] = not cut
    rollouts = rollouts.replace(extras={**rollouts.extras, "settled": settled})
    learned = run.learner.learn(fresh(run), rollouts)
    agent, returns, turns = (rollouts.extras[name] for name in ("agent", "agent_returns", "turns"))
    assert not rollouts.rewards.any() and turns.max() == 4 and {-1, 1} <= {*np.unique(returns)} <= {-1, 0, 1}
    baseline = np.zeros(2)
    for p, g in np.ndindex(rollouts.valid.shape):  # games in order of arrival, each side's baseline after each game
        assert agent[p, g, :turns[p, g]].tolist() == [0, 1, 0, 1][:turns[p, g]]
        outcome = returns[p, g, 0] * np.array([1, -1])
        if not settled[p, g]:
            assert not np.asarray(learned.advantages[p, g]).any()
            continue
        for k in range(turns[p, g]):
            tokens = rollouts.mask[p, g] & (rollouts.step_ids[p, g] == k)
            expected = outcome[agent[p, g, k]] - baseline[agent[p, g, k]]
            np.testing.assert_allclose(learned.advantages[p, g][tokens], expected * scale(learned, rollouts), rtol=1e-4,
                                       atol=1e-6)
        baseline = 0.95 * baseline + 0.05 * outcome
    np.testing.assert_allclose(learned.state.estimator_state[0], baseline, rtol=1e-5)


@pytest.mark.slow
def test_a_run_whose_limits_end_no_game_learns_nothing():
    run, params = setup.build(chatter.get_config(method="spiral", **{**BOTH_SIDES, "sampling.max_turns": 3}))
    rollouts = run.source.next(run.learner.publish(setup.initial_state(run, params))).rollouts
    assert rollouts.mask.any() and rollouts.extras["truncated"][rollouts.valid].all()
    assert not rollouts.extras["settled"].any() and not rollouts.extras["agent_returns"].any()
    learned = run.learner.learn(fresh(run), rollouts)
    assert not np.asarray(learned.advantages).any() and not np.asarray(learned.state.estimator_state[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [CONTEXTS, {"method": "spiral", **BOTH_SIDES}, {"method": "cleaner_saar", **CORRECTED}],
                         ids=["contexts", "agents", "rewritten"])
def test_resumed_runs_are_the_same_runs(changes, tmp_path):
    config = chatter.get_config(**changes)
    loop.train(config, tmp_path / "straight")
    loop.train(chatter.get_config(**changes, steps=2), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(config, tmp_path / "resumed", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config) for name in ("resumed", "straight")))
    rows = [json.loads(line) for line in (tmp_path / "straight/samples/step_000002.jsonl").read_text().splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows) and len(rows) >= 16


def test_methods_of_agents_name_the_missing_environment():
    with pytest.raises(NotImplementedError, match="agent .from an environment of several agents"):
        setup.build(chatter.get_config(method="dr_mas"))
