"""Replay of trajectories in environments, and the reward for turns that call tools, in runs by name."""
import json
import math
import shutil

import chatter
import numpy as np
import optax
import pytest
import run_files

from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning import schedules
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling.position import jsonable
from jaxrl_llm.setup import setup
from jaxrl_llm.values import turn_critic

DECAY = 4
REUSE = {"remix": "reuse=1.0", "spear_clip": "fill=0.2"}
NAMES = ["arpo_replay", "dots_rr", "r2vpo_replay", "rapo", "remix", "sil", "spear_clip"]


def begun(method, **changes):
    """A run, and its steps."""
    run, params = setup.build(chatter.get_config(method=method, **changes))
    state = setup.initial_state(run, params)
    return run, schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))


def rows_of(rollouts):
    """What each trajectory of a batch consists of, by its log-probs."""
    result = {}
    for p, g in np.argwhere(rollouts.valid & rollouts.mask.any(-1)):
        there = rollouts.role[p, g] > 0
        row = [getattr(rollouts, name)[p, g][there].tolist() for name in (
            "tokens", "mask", "role", "step_ids", "behavior_logprobs", "policy_version")]
        facts = [rollouts.extras[name][p, g].tolist() for name in ("step", "step_rewards", "turns", "tool_calls")]
        result[str(row[4])] = {"row": row, "facts": facts, "acts": len(set(rollouts.extras["act"][p, g].tolist())),
                               "reward": float(rollouts.rewards[p, g])}
    return result


@pytest.fixture(scope="module")
def replayed():
    """The run of `spear`, its first three steps, and the trajectories that they sampled."""
    run, steps = begun("spear", controllers=f"decay={DECAY}", replay="fill=0.2", replay_objective="warmup=0")
    batches = [next(steps) for _ in range(3)]
    return run, batches, {uid: one for done in batches for uid, one in rows_of(done.finished.rollouts).items()}


@pytest.mark.slow
def test_a_trajectory_returns_with_all_its_turns(replayed):
    _, batches, sampled = replayed
    again = [(done, rollouts) for done in batches for rollouts in done.finished.replayed]
    assert again and not any(done.finished.rollouts.extras["replayed"].any() for done in batches)
    for done, rollouts in again:
        rows = rows_of(rollouts)
        assert rows and rollouts.extras["replayed"][rollouts.valid].all()
        assert all(rows[name] == sampled[name] for name in rows)
        metrics = done.finished.metrics | done.learned.metrics
        assert metrics["replay/share"] == len(rows) / (len(rows) + len(done.finished.forest.ends))
        assert np.isfinite(metrics["replay/loss"]) and metrics["skipped_updates"] == 0


def test_calls_are_rewarded_less_in_each_step(replayed):
    """1 in the first step, then (1 + cos(pi k / 4)) / 2; a replayed trajectory keeps the reward that it had."""
    _, batches, _ = replayed
    means = []
    for step, done in enumerate(batches):
        coef, forest = (1 + math.cos(math.pi * step / DECAY)) / 2, done.finished.forest
        assert done.finished.metrics["control/tool_coef"] == pytest.approx(coef)
        node, row = chains(forest, forest.ends)
        calling = np.array([facts.get("tool_calls", 0) > 0 for facts in forest.turn_info[node]], bool)
        own = np.bincount(row, forest.turn_rewards[node]) + coef * 0.1 * np.bincount(row, calling)
        np.testing.assert_allclose(forest.rewards[forest.ends], own, rtol=1e-5)
        assert (forest.rewards[forest.ends] > forest.components[forest.ends, 0] * 0.75 + 0.05).any()  # success is apart
        assert np.all(forest.components[forest.ends, 0] <= 1)
        for rollouts in done.finished.replayed:  # the baseline of the steps before this one
            np.testing.assert_allclose(rollouts.extras["reward_baseline"], np.median(means) if means else 0, rtol=1e-6)
        trained = done.learned.rollouts
        means += [np.mean(x, where=ok) for x, ok in zip(np.asarray(trained.rewards), np.asarray(trained.valid)) if ok.any()]


def test_a_position_includes_the_stored_conversations():
    run, steps = begun("spear")
    next(steps)
    position = run.source.position()
    stored = json.loads(json.dumps(jsonable(position)))
    run.source.set_position(stored)
    assert len(run.source.memory["buffer"].ends) == len(position["buffer"].ends) > 0
    assert jsonable(run.source.position()) == stored
    stored = run.source.memory["buffer"]
    assert (stored.role == Role.ENVIRONMENT).any() and stored.turn_info.tolist() == position["buffer"].turn_info.tolist()


@pytest.mark.slow
def test_a_critic_of_turns_is_fitted_before_it_is_read_and_learns_from_older_turns():
    """Without a replay the recorded values are those of the critic after the step; with it the policy has as many updates."""
    counts = {}
    for replay in ("none", ""):
        run, steps = begun("archer", replay=replay, estimator="critic_epochs=3", **{"critic.pretrain_steps": 0})
        done = [next(steps) for _ in range(3)][-1]
        critic, rollouts = done.learned.state.beside["turn_critic"], done.learned.rollouts
        q, v = turn_critic.values(critic.params, rollouts.extras["turn_states"])
        same = [np.allclose(one, rollouts.extras[name], atol=1e-6) for one, name in ((q, "turn_q"), (v, "turn_v"))]
        assert same == [replay == "none"] * 2 and done.learned.metrics["value/q_loss"] >= 0
        assert ("replay/value/q_loss" in done.learned.metrics) == (replay == "") == bool(done.finished.replayed)
        counts[replay] = [int(optax.tree.get(opt_state, "ScaleByAdamState").count) for opt_state in (
            done.learned.state.opt_state, critic.opt_state)]
    assert counts == {"none": [3, 9], "": [3, 15]}  # nothing is stored before the first of three steps


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_methods_with_a_replay_run_in_environments(method):
    run, steps = begun(method, replay=REUSE.get(method, ""), controllers="reference=6, width=16" if method == "dots_rr" else "")
    start, share = run.source.data.get_state(), []
    for _ in range(3):
        run.source.set_position(run.source.position() | {"data": start})  # the same problems, for rules that go by problem
        step = next(steps)
        share.append(step.finished.metrics["replay/share"])
        assert all(np.isfinite(value) for value in (step.finished.metrics | step.learned.metrics).values())
    assert share[0] == 0 or run.learner.rehearsal is not None  # such batches may hold what was sampled in this step
    assert max(share) > 0 or method in ("arpo_replay", "rapo")  # these wait for a group that fails


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spear", "sil"])
def test_a_resumed_run_is_the_straight_one(tmp_path, method):
    """Bit for bit, after the loss of all steps behind step 2, the buffer of the last checkpoint included."""
    config = chatter.get_config(method=method, replay="fill=0.2" if method == "spear" else "", steps=4, **{
        "checkpoint.every": 2, "eval.every": 4})
    loop.train(config, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/4")
    loop.train(config, tmp_path / "resumed", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config) for name in ("resumed", "straight")))
    kept = [[run_files.repeatable(line) for line in run_files.lines(tmp_path / name)] for name in ("resumed", "straight")]
    assert kept[0] == kept[1] and max(line.get("replay/share", 0) for line in kept[0]) > 0
    hosts = [next((tmp_path / name / "checkpoints/4/host").glob("*")).read_text() for name in ("resumed", "straight")]
    assert hosts[0] == hosts[1] and '"turn_info"' in hosts[0]
