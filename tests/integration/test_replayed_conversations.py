"""Replay of trajectories in environments, and the reward for turns that call tools, in runs by name."""
import json
import math
import shutil

import chatter
import numpy as np
import pytest
import run_files

from jaxrl_llm.data.forest import chains
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.learning import schedules
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling.source import jsonable
from jaxrl_llm.setup import setup

DECAY = 4
REUSE = {"remix": "reuse=1.0", "r2vpo_replay": "reuse=1.0"}
NAMES = ["arpo_replay", "dots_rr", "r2vpo_replay", "rapo", "remix", "sil", "spear_clip"]


def begun(method, **changes):
    """A run, and its steps."""
    run, params = setup.build(chatter.get_config(method=method, **changes))
    state = setup.initial_state(run, params)
    return run, schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))


def by_uid(forest, rollouts):
    """What each trajectory of a batch consists of: texts and facts of its nodes, and its row of the view."""
    node, row = chains(forest, forest.ends)
    owner = forest.prompt[forest.ends]
    place, result = np.arange(len(owner)) - np.searchsorted(owner, owner), {}
    for number, (uid, p, g) in enumerate(zip(forest.uid[forest.ends].tolist(), owner, place)):
        nodes, there = node[row == number], rollouts.role[p, g] > 0
        result[uid] = {
            "nodes": (forest.texts[nodes].tolist(), forest.turn_info[nodes].tolist(), forest.turn_rewards[nodes].tolist()),
            "row": [getattr(rollouts, name)[p, g][there].tolist() for name in (
                "tokens", "mask", "role", "step_ids", "behavior_logprobs", "policy_version")],
            "facts": [rollouts.extras[name][p, g].tolist() for name in ("step", "step_rewards", "turns", "tool_calls", "act")],
            "reward": float(rollouts.rewards[p, g]), "replayed": bool(rollouts.extras["replayed"][p, g])}
    return result


@pytest.fixture(scope="module")
def replayed():
    """The run of `spear`, two steps of it, and what their trajectories consist of."""
    run, steps = begun("spear", control=f"decay={DECAY}", objective="warmup=0")
    batches = [next(steps) for _ in range(2)]
    return run, batches, [by_uid(one.finished.forest, one.finished.rollouts) for one in batches]


@pytest.mark.slow
def test_a_trajectory_returns_with_all_its_turns(replayed):
    _, batches, (first, second) = replayed
    again = first.keys() & second.keys()
    assert again and not any(one["replayed"] for one in first.values())
    assert {uid for uid, one in second.items() if one["replayed"]} == again
    for uid in again:
        was, now = first[uid], second[uid]
        assert {**was, "replayed": True} == {**now, "facts": [*now["facts"][:-1], was["facts"][-1]]}  # texts count in a group
        assert len(set(now["facts"][-1])) == len(set(was["facts"][-1]))
    metrics = batches[1].finished.metrics | batches[1].learned.metrics
    assert metrics["replay/share"] == len(again) / len(second) and metrics["replay/age"] == 1
    assert metrics["grad_norm"] > 0 and metrics["skipped_updates"] == 0
    old, sampled, tokens = (np.asarray(x) for x in (batches[1].learned.rollouts.old_logprobs,
                                                    batches[1].learned.rollouts.behavior_logprobs,
                                                    batches[1].learned.rollouts.token_mask))
    stored = tokens & np.asarray(batches[1].learned.rollouts.extras["replayed"])[..., None]
    assert (np.abs(old - sampled)[stored] == 0).all() and np.abs(old - sampled)[tokens & ~stored].max() < 1e-4


def test_calls_are_rewarded_less_in_each_step(replayed):
    """1 in the first step, then (1 + cos(pi / 4)) / 2; a replayed trajectory keeps the reward that it had."""
    _, batches, contents = replayed
    coefs = [1.0, (1 + math.cos(math.pi / DECAY)) / 2]
    for step, (batch, content) in enumerate(zip(batches, contents)):
        assert batch.finished.metrics["control/tool_coef"] == pytest.approx(coefs[step])
        for one in content.values():
            _, info, own = one["nodes"]
            calling = sum(facts.get("tool_calls", 0) > 0 for facts in info)
            assert one["reward"] == pytest.approx(sum(own) + coefs[0 if one["replayed"] else step] * 0.1 * calling)
        forest = batch.finished.forest
        ends = forest.ends
        assert (forest.rewards[ends] > forest.components[ends, 0] * 0.75 + 0.05).any()  # success is the environment's own
        assert np.all(forest.components[ends, 0] <= 1)
    baseline = batches[1].finished.rollouts.extras["reward_baseline"]
    means = [np.mean([one["reward"] for uid, one in contents[0].items() if uid // 4 == prompt]) for prompt in range(4)]
    np.testing.assert_allclose(baseline, np.median(means), rtol=1e-6)


def test_a_position_includes_the_stored_conversations(replayed):
    run = replayed[0]
    position = run.source.position()
    stored = json.loads(json.dumps(jsonable(position)))
    run.source.set_position(stored)
    assert len(run.source.memory["buffer"].ends) == len(position["buffer"].ends) > 0
    assert jsonable(run.source.position()) == stored
    stored = run.source.memory["buffer"]
    assert (stored.role == Role.ENVIRONMENT).any() and stored.turn_info.tolist() == position["buffer"].turn_info.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_methods_with_a_replay_run_in_environments(method):
    run, steps = begun(method, replay=REUSE.get(method, ""), control="reference=6, width=16" if method == "dots_rr" else "")
    start, share = run.source.data.get_state(), []
    for _ in range(3):
        run.source.set_position(run.source.position() | {"data": start})  # the same problems, for rules that go by problem
        step = next(steps)
        share.append(step.finished.metrics["replay/share"])
        assert all(np.isfinite(value) for value in (step.finished.metrics | step.learned.metrics).values())
    assert share[0] == 0 and (max(share) > 0 or method in ("arpo_replay", "rapo"))  # these wait for a group that fails


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spear", "sil"])
def test_a_resumed_run_is_the_straight_one(tmp_path, method):
    """Bit for bit, after the loss of all steps behind step 2, the buffer of the last checkpoint included."""
    config = chatter.get_config(method=method, **{"checkpoint.every": 2, "eval.every": 4}, steps=4)
    loop.train(config, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/4")
    loop.train(config, tmp_path / "resumed", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config) for name in ("resumed", "straight")))
    kept = [[run_files.repeatable(line) for line in run_files.lines(tmp_path / name)] for name in ("resumed", "straight")]
    assert kept[0] == kept[1] and kept[0][-1]["replay/share"] > 0
    hosts = [next((tmp_path / name / "checkpoints/4/host").glob("*")).read_text() for name in ("resumed", "straight")]
    assert hosts[0] == hosts[1] and '"turn_info"' in hosts[0]
