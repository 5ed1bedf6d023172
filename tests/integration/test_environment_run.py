"""Runs in an environment: learning, resume bit for bit, lost trajectories, and refusals."""
import json

import chatter
import numpy as np
import pytest
import run_files

from jaxrl_llm.environments.runner import TooManyInvalid
from jaxrl_llm.rollouts import Role
from jaxrl_llm.training import loop, parts, setup
from jaxrl_llm.training.metrics import PhaseTimer


@pytest.fixture(scope="module", params=["grpo", "gigpo"])
def straight(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp(request.param)
    loop.train(chatter.get_config(method=request.param), workdir)
    return request.param, workdir


def test_a_run_learns_from_turns(straight):
    lines = run_files.lines(straight[1])
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["skipped_updates"] == 0 and line["grad_norm"] > 0 and abs(line["max/ratio"] - 1) < 1e-4
        assert line["max/mismatch"] < 1e-4  # the engine and the learner read the same conversation
        assert 1 <= line["environment/turns"] <= 3 and line["environment/invalid"] == 0
        assert line["completion/present"] > line["completion/length"] > 0
        assert {"time/rollout", "time/wait", "time/template"} <= line.keys()
        assert 0 < line["environment/seconds"] <= line["environment/slowest"]
    assert 0 <= lines[-1]["eval/score"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("straight", ["gigpo"], indirect=True)
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    method, workdir = straight
    loop.train(chatter.get_config(method=method, steps=2), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(chatter.get_config(method=method), tmp_path, resume=True)
    run_files.assert_same(*(run_files.saved(one, chatter.get_config(method=method)) for one in (tmp_path, workdir)))


def test_pages_show_the_speakers(straight):
    rows = [json.loads(line) for line in (straight[1] / "samples/step_000002.jsonl").read_text().splitlines()]
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"] and len(roles) > 1
        assert row["messages"][1]["content"] in ("Good.", "No.")
    assert "[user]\nGood." in (straight[1] / "samples/step_000002.txt").read_text() or all(
        "Good." not in message["content"] for row in rows for message in row["messages"])


def test_lost_trajectories_are_counted_and_not_learned_from(tmp_path):
    run, params = setup.build(chatter.get_config(environment="chatter:letters(broken=0)", environment_invalid=0.5))
    state = setup.initial_state(run, params)
    problems = [run.source.task.train[i] for i in range(4)]
    run.source.data = iter([problems])
    finished = run.source.next(state)
    lost = [problem.id == 0 for problem in finished.forest.problems]
    assert sum(lost) == 1 and finished.metrics["environment/invalid"] == 4
    assert finished.metrics["environment/invalid/letters/error"] == 4
    np.testing.assert_array_equal(finished.rollouts.valid, ~np.array(lost)[:, None] & np.ones((4, 4), bool))
    learned = run.learner.learn(state, finished.rollouts)
    assert not np.any(np.asarray(learned.advantages)[np.array(lost)]) and learned.metrics["skipped_updates"] == 0


@pytest.mark.parametrize("waits", [False, True])
def test_a_slow_call_is_seen(waits):
    run, params = setup.build(chatter.get_config(environment=f"chatter:letters(slow=0.5, waits={waits})"))
    timer = PhaseTimer()
    finished = run.source.next(setup.initial_state(run, params), timer)
    turns = int((finished.forest.role == Role.POLICY).sum())
    assert len(finished.forest.seconds) == 4 + 16 + turns, "the openings of 4 problems and 16 trajectories, and all turns"
    assert finished.metrics["environment/slowest"] >= 0.5
    assert finished.metrics["environment/seconds"] >= 0.5 / (20 + turns)
    waited = timer.collect()["time/wait"]
    assert waited >= (0 if waits else 0.5)


def test_answers_that_wait_change_no_trajectory():
    """The engine continues with the other rows meanwhile; samples do not depend on them."""
    result = []
    for waits in (False, True):
        run, params = setup.build(chatter.get_config(environment=f"chatter:letters(waits={waits})"))
        finished = run.source.next(setup.initial_state(run, params))
        assert 0.9 < finished.metrics["completion/computed"] <= 1.0  # no prefix is computed twice
        result.append(finished.rollouts)
    for name in ("tokens", "mask", "role", "rewards", "step_ids"):
        np.testing.assert_array_equal(getattr(result[0], name), getattr(result[1], name), err_msg=name)
    np.testing.assert_allclose(*(np.where(one.mask, one.behavior_logprobs, 0) for one in result), atol=1e-5)


def test_too_many_lost_trajectories_end_the_run(tmp_path):
    config = chatter.get_config(environment="chatter:letters(broken=0)", environment_invalid=0.1)
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    run.source.data = iter([[run.source.task.train[i] for i in range(4)]])
    with pytest.raises(TooManyInvalid, match="letters/error"):
        run.source.next(state)


@pytest.mark.parametrize(("changes", "reason"), (
    ({"model.chat_template": ""}, "config.model.chat_template"),
    ({"prompts.overlong": "truncate"}, "overlong='truncate'"),
    ({"environment": "guess"}, "Did you mean"),
    ({"environment": "a, b"}, "names 2 environments"),
    ({"environment": "chatter:letters(returns=(0.0, 1e999))"}, r"returns=\(0.0, inf\), .*give two finite numbers"),
    ({"environment": "chatter:letters(returns=(0.5, 0.5))"}, r"returns=\(0.5, 0.5\), .*give two finite numbers"),
    ({"method": "ttrl"}, "compares the answers"),
    ({"sampling.max_turns": 0}, "sampling.max_turns"),
    ({"environment_invalid": 1.5}, "environment_invalid"),
))
def test_impossible_settings_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        setup.build(chatter.get_config(**changes))


def test_methods_of_turns_name_the_missing_environment():
    config = chatter.get_config(method="gigpo")
    config.environment = ""
    with pytest.raises(NotImplementedError, match="config.environment"):
        setup.build(config)


@pytest.mark.slow
def test_a_controller_limits_the_turns(monkeypatch, tmp_path):
    from jaxrl_llm import control
    monkeypatch.setattr(parts.control, "make", lambda name: control.base.CONTROLLERS[name](rounds=(1, 2), every=1))
    run, params = setup.build(chatter.get_config(method="scaling_inter_rl"))
    state, turns = setup.initial_state(run, params), []
    frozen = run.learner.frozen(state.params)
    for _ in range(2):
        finished = run.source.next(state, settings=run.learner.controls.settings(state.control))
        turns.append((finished.metrics["environment/turns"], finished.metrics["control/max_turns"]))
        state = run.learner.learn(state, finished.rollouts, frozen).state
    assert turns == [(1, 1), (2, 2)]


@pytest.mark.parametrize("method", [pytest.param(name, marks=pytest.mark.slow) for name in ("hgpo", "salt")])
def test_other_methods_of_turns_learn_too(method):
    run, params = setup.build(chatter.get_config(method=method))
    state = setup.initial_state(run, params)
    finished = run.source.next(state)
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    advantages, mask = np.asarray(learned.advantages), finished.rollouts.mask
    assert np.isfinite(advantages).all() and not advantages[~mask].any() and learned.metrics["grad_norm"] > 0
    step = finished.rollouts.step_ids
    for p, g in np.ndindex(finished.rollouts.valid.shape):  # one advantage for all tokens of a turn
        assert all(len({*advantages[p, g][mask[p, g] & (step[p, g] == k)].tolist()}) <= 1 for k in range(3))
