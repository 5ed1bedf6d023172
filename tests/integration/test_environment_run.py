"""Runs in an environment: learning, resume bit for bit, lost trajectories, and refusals."""
import dataclasses
import json
import re

import chatter
import jax
import numpy as np
import pytest
import run_files

from jaxrl_llm import sandbox
from jaxrl_llm.audits import replay
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments.answers import Answers
from jaxrl_llm.environments.runner import TooManyInvalid
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.sampling.heldout import sample_held_out
from jaxrl_llm.setup import parts, setup
from jaxrl_llm.setup.judge import make_runner
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.tools.visible import visible
from jaxrl_llm.topologies import refill, rounds, single


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
        assert row["length"] == len(row["tokens"]) == len(row["trained"]) > sum(row["trained"])
    assert "[user]\nGood." in (straight[1] / "samples/step_000002.txt").read_text() or all(
        "Good." not in message["content"] for row in rows for message in row["messages"])


@pytest.mark.slow
def test_lost_trajectories_are_counted_and_not_learned_from(tmp_path):
    run, params = setup.build(chatter.get_config(environment="chatter:letters(broken=0)", environment_invalid=0.5))
    state = setup.initial_state(run, params)
    problems = [run.source.task.train[i] for i in range(4)]
    run.source.data = run_files.Given(problems)
    finished = run.source.next(run.learner.publish(state))
    lost = [problem.id == 0 for problem in finished.forest.problems]
    assert sum(lost) == 1 and finished.metrics["environment/invalid"] == 4
    assert finished.metrics["environment/invalid/letters/error"] == 4
    np.testing.assert_array_equal(finished.rollouts.valid, ~np.array(lost)[:, None] & np.ones((4, 4), bool))
    learned = run.learner.learn(state, finished.rollouts)
    assert not np.any(np.asarray(learned.advantages)[np.array(lost)]) and learned.metrics["skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_slow_call_is_seen(waits):
    run, params = setup.build(chatter.get_config(environment=f"chatter:letters(slow=0.5, waits={waits})"))
    timer = PhaseTimer()
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)), timer)
    turns = int((finished.forest.role == Role.POLICY).sum())
    assert len(finished.forest.seconds) == 4 + 16 + turns, "the openings of 4 problems and 16 trajectories, and all turns"
    assert finished.metrics["environment/slowest"] >= 0.5
    assert finished.metrics["environment/seconds"] >= 0.5 / (20 + turns)
    waited = timer.collect()["time/wait"]
    assert waited >= (0 if waits else 0.5)


@pytest.mark.slow
def test_lost_trajectories_are_written_and_played_again(tmp_path, capsys):
    config = chatter.get_config(environment="chatter:letters(broken=0, replayable=True)", environment_invalid=0.5, steps=5)
    loop.train(config, tmp_path)
    shown, lines = capsys.readouterr().out, run_files.lines(tmp_path)
    (step,) = (line["step"] for line in lines if line.get("environment/invalid"))  # problem 0 is in one batch of five
    records = [json.loads(line) for line in (tmp_path / "invalid.jsonl").read_text().splitlines()]
    first = (step - 1) * 16
    assert len(records) == 4 and {one["uid"] for one in records} <= {*range(first, first + 16)}
    for one in records:
        assert (one["step"], one["problem"], one["kind"], one["turn"]) == (step, 0, "error", 2) and len(one["said"]) == 2
        assert "no such letter" in one["message"]
    uid = records[0]["uid"]
    assert shown.count("the environment lost trajectory") == 1 and f"replay {tmp_path} {uid}` plays it again alone" in shown
    assert replay.main([str(tmp_path), str(uid)]) == 1
    shown = capsys.readouterr().out
    assert f"trajectory {uid} of step {step} in letters, problem 0: error at turn 2" in shown
    for message in records[0]["said"]:
        assert f"[assistant]\n{visible(message['content'])}\n" in shown
    assert "--- turn 0: reward 0," in shown and "[user]\nSay 0.\n" in shown and "KeyError: 'no such letter'" in shown
    assert "not those of the run" not in shown
    for arguments, reason in (([tmp_path, 10**6], f"no trajectory 1000000; the last ones that it has are {records[0]['uid']}"),
                              ([tmp_path / "other", 1], "is no run folder")):
        with pytest.raises(SystemExit, match="2"):
            replay.main([str(argument) for argument in arguments])
        assert reason in capsys.readouterr().err
    (tmp_path / "invalid.jsonl").unlink()
    with pytest.raises(SystemExit, match="2"):
        replay.main([str(tmp_path), str(uid)])
    assert "no trajectory of this run was lost" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("replayable", [True, False])
def test_the_error_that_ends_a_run_names_file_and_command(tmp_path, capsys, replayable):
    config = chatter.get_config(environment=f"chatter:letters(broken=-2, replayable={replayable})")
    with pytest.raises(TooManyInvalid, match="letters/error") as caught:  # in the evaluation before the first step
        loop.train(config, tmp_path)
    note, = (note for note in caught.value.__notes__ if "invalid.jsonl" in note)
    uid = re.search(r"trajectory (\d+): ", note)[1]
    last = json.loads((tmp_path / "invalid.jsonl").read_text().splitlines()[-1])
    assert (last["step"], str(last["uid"])) == (0, uid) and last["problem"] >= 20
    if replayable:
        assert f"`python -m jaxrl_llm.audits.replay {tmp_path} {uid}`" in note
        assert replay.main([str(tmp_path), uid]) == 1 and "KeyError: 'no such letter'" in capsys.readouterr().out
        return
    assert "not replayable" in note and "python -m" not in note
    with pytest.raises(SystemExit, match="2"):
        replay.main([str(tmp_path), uid])
    assert "environment 'letters' is not replayable" in capsys.readouterr().err


def test_answers_that_wait_change_no_trajectory():
    """The engine continues with the other rows meanwhile; samples do not depend on them."""
    result = []
    for waits in (False, True):
        run, params = setup.build(chatter.get_config(environment=f"chatter:letters(waits={waits})"))
        finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
        assert 0.9 < finished.metrics["completion/computed"] <= 1.0  # no prefix is computed twice
        result.append(finished.rollouts)
    for name in ("tokens", "mask", "role", "rewards", "step_ids"):
        np.testing.assert_array_equal(getattr(result[0], name), getattr(result[1], name), err_msg=name)
    np.testing.assert_allclose(*(np.where(one.mask, one.behavior_logprobs, 0) for one in result), atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(bool(sandbox.best().missing), reason="no sandbox with all barriers on this machine")
def test_programs_that_run_beside_the_engine_change_no_trajectory():
    result, shape = [], {"prompts.per_step": 2, "prompts.max_tokens": 128, "sampling.max_tokens": 64}
    for waits in ("no", "auto"):
        run, params = setup.build(chatter.get_config(environment="chatter:programs", environment_waits=waits, **shape))
        runner = run.source.stream.partner.runner
        assert runner.environment.waits == (waits == "auto")
        finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
        runner.close()
        shown = finished.forest.texts[finished.forest.role == Role.ENVIRONMENT]
        assert len(shown) == 2 * 8 and all(text.isdigit() for text in shown) and len(set(shown)) > 4
        result.append(finished.rollouts)
    for name in ("tokens", "mask", "role", "rewards", "step_ids"):
        np.testing.assert_array_equal(getattr(result[0], name), getattr(result[1], name), err_msg=name)
    np.testing.assert_allclose(*(np.where(one.mask, one.behavior_logprobs, 0) for one in result), atol=1e-5)


@pytest.mark.parametrize(("environment", "setting", "beside"), (
    ("letters", "auto", False), ("letters", "yes", True), ("letters(waits=True)", "auto", True),
    ("letters(waits=True)", "no", False), ("alphabet", "auto", False), ("alphabet", "yes", True)))
def test_a_run_overrules_whether_an_environment_waits(environment, setting, beside):
    runner = make_runner(chatter.get_config(environment=f"chatter:{environment}", environment_waits=setting))
    assert runner.environment.waits == beside
    runner.reset({uid: runner.environment.task.train[0] for uid in range(3)})
    answers = Answers(runner)
    answers.ask({uid: {"role": "assistant", "content": "a"} for uid in range(3)})
    turns = answers.ready(wait=False) if not beside else {}
    while beside and len(turns) < 3:
        turns |= answers.ready(wait=True)
    assert sorted(turns) == [0, 1, 2] and {turn.reward for turn in turns.values()} == {0.25}
    runner.close()


def test_too_many_lost_trajectories_end_the_run(tmp_path):
    config = chatter.get_config(environment="chatter:letters(broken=0)", environment_invalid=0.1)
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    run.source.data = run_files.Given([run.source.task.train[i] for i in range(4)])
    with pytest.raises(TooManyInvalid, match="letters/error"):
        run.source.next(run.learner.publish(state))


def breaks_from(first: int):
    """`letters`, in which the problems from `first` to `first + 3` raise in their second turn."""
    inner = chatter.letters()

    def step(state, message):
        if first <= state["id"] < first + 4 and state["turn"] == 1:
            raise KeyError("no such letter")
        return inner.step(state, message)

    return dataclasses.replace(inner, step=step)


def test_a_problem_that_always_fails_does_not_end_a_run_that_samples_in_rounds():
    """It is a fifth of the first round, and would be a larger share of later ones; it is asked once, the others go on."""
    run, params = setup.build(chatter.get_config(
        method="reinforce_ada", environment="chatter:letters(broken=0)", environment_invalid=0.2, **{"sampling.max_group": 12}))
    state = setup.initial_state(run, params)
    run.source.data = run_files.Given([run.source.task.train[i] for i in range(4)])
    for _ in range(2):
        finished = run.source.next(run.learner.publish(state))
        forest = finished.forest
        assert forest.lost.tolist() == [4, 0, 0, 0] and finished.metrics["environment/invalid"] == 4
        sizes = np.bincount(forest.prompt[forest.ends], minlength=4)
        assert sizes[0] == 0 and (sizes[1:] >= 4).all() and sizes.max() > 4  # some prompts had further rounds
        assert finished.rollouts.valid.sum(1).tolist() == sizes.tolist()
    learned = run.learner.learn(state, finished.rollouts)
    assert np.isfinite(learned.metrics["loss"])


def test_a_draw_that_is_lost_whole_is_followed_by_the_next():
    """The first draw is dropped, the second is lost: neither is asked again, although any share may be lost."""
    config = chatter.get_config(environment="test_environment_run:breaks_from(first=4)", environment_invalid=1.0)
    run, params = setup.build(config)
    state, problems = setup.initial_state(run, params), [run.source.task.train[i] for i in range(12)]
    for inner in (single(4, group=4), rounds(4, group=4, most=4, wants=lambda forest: np.ones(4, bool))):
        source = dataclasses.replace(run.source, data=run_files.Given(problems), topology=refill(
            inner, 4, keep=lambda part: part.draw > 0, attempts=9))
        finished = source.next(run.learner.publish(state))
        assert [problem.id for problem in finished.forest.problems] == [8, 9, 10, 11] and finished.rollouts.valid.all()
        assert finished.metrics["filter/draws"] == 3 and finished.metrics["environment/invalid"] == 16
        assert finished.counts["tried"][:12].tolist() == [4] * 4 + [0] * 4 + [4] * 4
    source.data = run_files.Given(problems[4:8])
    with pytest.raises(TooManyInvalid, match="lost all 16 trajectories of a batch"):
        source.next(run.learner.publish(state))


def test_the_share_of_lost_trajectories_is_one_of_an_evaluation_too():
    """Five problems in parts of four, the last of which fails."""
    run, params = setup.build(chatter.get_config())
    last = held_out(run.source.task.heldout, 5)[-1].id
    run, params = setup.build(chatter.get_config(environment=f"chatter:letters(broken={last})", environment_invalid=0.2))
    params = setup.initial_state(run, params).params
    for _ in range(2):
        forest = sample_held_out(run.source, params, None, 5, jax.random.key(0))
        assert forest.lost.tolist() == [0, 0, 0, 0, 4] and len(forest.ends) == 16
    runner, apart = (stream.partner.runner for stream in (run.source.stream, run.source.held_out))
    assert len(apart.invalid) == 4 and not runner.invalid
    runner.invalid |= apart.invalid
    run.source.next(run.learner.publish(setup.initial_state(run, params)))
    assert not runner.invalid  # a step begins anew


@pytest.mark.parametrize(("changes", "reason"), (
    ({"model.chat_template": ""}, "config.model.chat_template"),
    ({"prompts.overlong": "truncate"}, "overlong='truncate'"),
    ({"environment": "guess"}, "Did you mean"),
    ({"environment": "guess_number, tic_tac_toe"}, "names 2 environments"),
    ({"environment": "chatter:letters(returns=(0.0, 1e999))"}, r"returns=\(0.0, inf\), .*give two finite numbers"),
    ({"environment": "chatter:letters(returns=(0.5, 0.5))"}, r"returns=\(0.5, 0.5\), .*give two finite numbers"),
    ({"method": "ttrl"}, "compares the answers"),
    ({"sampling.max_turns": 0}, "sampling.max_turns"),
    ({"environment_invalid": 1.5}, "environment_invalid"),
    ({"environment_waits": "never"}, "Unknown config.environment_waits 'never'. .*Allowed: auto, no, yes"),
    ({"environment": "chatter:uncounted", "method": "spear"}, "'spear' rewards turns that call tools, .*'tool_calls'; add it"),
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
    monkeypatch.setattr(parts.control, "make", lambda name: control.base.CONTROLLERS[name].make(turns=(1, 2), every=1))
    run, params = setup.build(chatter.get_config(method="scaling_inter_rl"))
    state, turns = setup.initial_state(run, params), []
    frozen = run.learner.frozen(state.params)
    for _ in range(2):
        finished = run.source.next(run.learner.publish(state))
        turns.append((finished.metrics["environment/turns"], finished.metrics["control/max_turns"]))
        state = run.learner.learn(state, finished.rollouts, frozen).state
    assert turns == [(1, 1), (2, 2)]


@pytest.mark.parametrize("method", [pytest.param(name, marks=pytest.mark.slow) for name in ("hgpo", "salt")])
def test_other_methods_of_turns_learn_too(method):
    run, params = setup.build(chatter.get_config(method=method))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, run.learner.frozen(state.params))
    advantages, mask = np.asarray(learned.advantages), finished.rollouts.mask
    assert np.isfinite(advantages).all() and not advantages[~mask].any() and learned.metrics["grad_norm"] > 0
    step = finished.rollouts.step_ids
    for p, g in np.ndindex(finished.rollouts.valid.shape):  # one advantage for all tokens of a turn
        assert all(len({*advantages[p, g][mask[p, g] & (step[p, g] == k)].tolist()}) <= 1 for k in range(3))
