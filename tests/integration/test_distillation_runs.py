"""Runs with a teacher: recorded fields, teachers by task, refusals, and a student that follows its teacher."""
import shutil

import jax
import numpy as np
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm import methods
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.recorders import teacher
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.store import given


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": "gopd", "model.num_layers": 1, **changes})
    return config


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run of two layers; its checkpoint 0 has its initial weights."""
    workdir = tmp_path_factory.mktemp("teacher")
    loop.train(tiny(method="grpo", steps=2, seed=5, **{"model.num_layers": 2, "optimizer.learning_rate": 3e-2}), workdir)
    return workdir


def recorded(config):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    learned = run.learner.learn(state, run.source.next(run.learner.publish(state)).rollouts, run.learner.frozen(state.params))
    return run, jax.device_get(learned.rollouts), learned


@pytest.mark.slow
def test_a_policy_that_teaches_itself_learns_nothing(taught):
    """The teacher is the run's own start: log-probs are the sampler's, advantages 0."""
    run, rollouts, learned = recorded(tiny(seed=5, **{"model.num_layers": 2, "teacher.path": f"{taught}/checkpoints/0"}))
    mask = rollouts.token_mask
    for name in ("teacher_logprobs", "base_logprobs"):
        np.testing.assert_allclose(rollouts.extras[name][mask], rollouts.behavior_logprobs[mask], atol=2e-5)
    assert np.abs(np.asarray(learned.advantages)[mask]).max() < 1e-4 and abs(learned.metrics["teacher/gap"]) < 1e-5
    assert [one.name for one in run.learner.recorders] == ["old", "reference", "teacher"]
    assert run.learner.frozen(learned.state.params).keys() == {"reference"}  # no copy of a teacher is saved


@pytest.mark.slow
@pytest.mark.parametrize("rows", (0, 2))
def test_log_probs_are_those_of_the_teachers_own_model(taught, rows):
    """A model of another depth, row by row without a group or padding; in packed rows too."""
    run, rollouts, _ = recorded(tiny(**{"teacher.path": str(taught), "teacher.base": f"{taught}/checkpoints/0",
                                        "learner.packed_rows": rows}))
    by_name = {one.name: one.given for one in run.learner.recorders if one.given is not None}
    config = tiny(seed=5, **{"model.num_layers": 2})
    _, policy, *_ = setup.build_policy(config)
    for name, params in (("teacher_logprobs", by_name["teacher"][0]), ("base_logprobs", by_name["base"])):
        for p, g in ((0, 0), (1, 2), (3, 3)):
            length = int(rollouts.mask[p, g].sum())
            alone = Rollouts(mask=np.ones((1, 1, length), bool), valid=np.ones((1, 1), bool),
                             tokens=rollouts.tokens[p, g][None, None, :length],
                             prompt_tokens=rollouts.prompt_tokens[p][rollouts.prompt_mask[p]][None],
                             prompt_mask=np.ones((1, int(rollouts.prompt_mask[p].sum())), bool))
            wanted = policy.logprobs(params, None, alone)[0][0, 0]
            np.testing.assert_allclose(rollouts.extras[name][p, g][:length], wanted, atol=2e-5)
    gaps = [np.abs(rollouts.extras["teacher_logprobs"] - x)[rollouts.mask].max() for x in
            (rollouts.extras["base_logprobs"], rollouts.behavior_logprobs)]
    assert min(gaps) > 1e-3  # three different models


def test_each_task_has_its_teacher():
    """Three teachers by literal numbers; with `apart` all of them and the teacher of each task."""
    weights = (1.0, 2.0, 3.0)
    functions = [lambda own, lora, rollouts: (own * rollouts.tokens.astype(float), None)] * 3
    rollouts = Rollouts(mask=np.ones((4, 1, 2), bool), valid=np.ones((4, 1), bool), tokens=np.full((4, 1, 2), 7),
                        extras={"task": np.array([2, 0, 1, 2])})
    one, apart = (teacher(functions, weights, apart=apart) for apart in (False, True))
    result = one.record(one.given, None, None, rollouts)["teacher_logprobs"]
    assert result[:, 0].tolist() == [[21.0] * 2, [7.0] * 2, [14.0] * 2, [21.0] * 2] and one.provides == ("teacher_logprobs",)
    both = apart.record(apart.given, None, None, rollouts)
    assert both["teacher_logprobs"].shape == (4, 1, 2, 3) and both["teacher_id"].tolist() == [2, 0, 1, 2]
    assert both["teacher_logprobs"][0, 0, 0].tolist() == [7.0, 14.0, 21.0] and apart.provides[1] == "teacher_id"
    alone = teacher(functions[:1], weights[:1], apart=True)
    assert alone.record(alone.given, None, None, rollouts)["teacher_id"].tolist() == [0] * 4  # one for all tasks


def test_impossible_settings_are_refused(taught, tmp_path):
    assert {"gopd", "exopd", "kepo"} <= {*methods.runnable_elsewhere()}
    with pytest.raises(NotImplementedError, match="needs teacher_logprobs .from the recorder `teacher` with config.teach"):
        setup.build(tiny())
    with pytest.raises(ValueError, match="names 2 teachers for 1 tasks; give one for all"):
        setup.build(tiny(**{"teacher.path": f"{taught}, {taught}"}))
    with pytest.raises(FileNotFoundError):
        setup.build(tiny(**{"teacher.path": str(tmp_path / "nowhere")}))


def test_a_teacher_that_reads_other_tokens_is_refused(taught, monkeypatch):
    run, _ = setup.build(tiny(**{"teacher.path": str(taught)}))
    tokenizer = run.source.stream.tokenizer

    class Shifted(type(tokenizer)):
        def encode(self, text):
            return [token + 1 for token in super().encode(text)]

    task, mesh = run.source.task, run.source.stream.mesh
    from jaxrl_llm.setup import teachers
    def asked(own):
        return teachers.loader(run.config, task, own, mesh, 14, lambda model: "function")("path")
    assert [function for function, _ in asked(tokenizer)] == ["function"]
    assert [one.name for one in run.learner.recorders] == ["old", "reference", "teacher"]
    with pytest.raises(ValueError, match="config.teacher.path=.* reads '.*=' as other tokens than the policy"):
        asked(Shifted())


@pytest.mark.slow
def test_three_steps_by_name_and_a_resume(taught, tmp_path):
    """Weights and metrics of the straight run, also if the teacher is on the host, which changes no bit."""
    options = {"teacher.path": str(taught), "checkpoint.every": 2, "eval.every": 4, "samples_every": 0, "eval.problems": 1}
    for method in ("exopd", "kepo", "gopd"):
        loop.train(tiny(**options, method=method, steps=3), tmp_path / method)
        assert all(np.isfinite(list(line.values())).all() for line in lines(tmp_path / method))
    again = dict(options, **{"learner.offload": "teacher"})
    shutil.copytree(tmp_path / "gopd", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/3")
    loop.train(tiny(**options, steps=3), tmp_path / "resumed", resume=True)
    loop.train(tiny(**again, steps=3), tmp_path / "away")
    wanted = run_files.saved(tmp_path / "gopd", tiny(**options, steps=3))
    assert_same(run_files.saved(tmp_path / "resumed", tiny(**options, steps=3)), wanted)
    assert_same(run_files.saved(tmp_path / "away", tiny(**again, steps=3)), wanted)
    assert [repeatable(line) for line in lines(tmp_path / "resumed")] == [repeatable(line) for line in lines(tmp_path / "gopd")]


@pytest.mark.slow
def test_a_resumed_run_whose_teacher_has_changed_is_refused(taught, tmp_path):
    """The teacher's folder is the same, and it went on learning; its earlier weights are found wherever they are now."""
    options = {"eval.every": 0, "samples_every": 0, "teacher.path": str(tmp_path / "teacher")}
    shutil.copytree(taught, tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher/checkpoints/2")
    loop.train(tiny(**options, steps=1), tmp_path / "run")
    shutil.copytree(tmp_path / "teacher", tmp_path / "earlier")
    shutil.copytree(taught / "checkpoints/2", tmp_path / "teacher/checkpoints/2")
    with pytest.raises(ValueError, match="the weights of the recorder 'teacher' are not those that this run learned from"):
        loop.train(tiny(**options, steps=2), tmp_path / "run", resume=True)
    for offload in ("", "teacher"):  # checksums are those of the weights, wherever these wait
        resumed = shutil.copytree(tmp_path / "run", tmp_path / f"resumed{offload}")
        moved = dict(options, **{"teacher.path": str(tmp_path / "earlier"), "learner.offload": offload})
        loop.train(tiny(**moved, steps=2), resumed, resume=True)
        assert [line["step"] for line in lines(resumed)] == [0, 1, 2]


def test_given_weights_are_compared_tensor_by_tensor():
    saved = {"teacher": {"0.a": 1, "0.b": 2}}
    for same in (saved, {}, {"base": {"a": 7}}, {**saved, "base": {"a": 7}}):
        given.check_same(same, saved)
    for other, tensor in (({"0.a": 1, "0.b": 3}, "0.b"), ({"0.a": 1}, "0.b"), ({"0.a": 1, "0.b": 2, "1.a": 1}, "1.a")):
        with pytest.raises(ValueError, match=f"1 of {len(other)} tensors differ, {tensor} first"):
            given.check_same({"teacher": other}, saved)
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    next_to = np.where(w == 4, np.nextafter(w, np.float32(9)), w)
    one, same, other = (given.sums_of([teacher([None], [{"w": jax.numpy.asarray(x)}])]) for x in (w, w, next_to))
    assert one == same != other and one["teacher"].keys() == {"0.w"}


@pytest.mark.slow
def test_the_student_comes_closer_to_its_teacher(tmp_path):
    """A teacher writes lower-case letters far more often than a new model; no reward asks the student for them."""
    common = {"samples_every": 0, "eval.every": 0, "checkpoint.every": 60, "optimizer.learning_rate": 1e-2}
    loop.train(tiny(method="grpo", **common, steps=30, rewards="format(pattern='[a-z].*')"), tmp_path / "teacher")
    many = {"prompts.per_step": 16, "sampling.group": 16}  # a reward of one draw is noise; of 256 it is not
    loop.train(tiny(**common, **many, steps=60, seed=1, **{"teacher.path": str(tmp_path / "teacher")}), tmp_path / "student")
    gaps = [line["teacher/gap"] for line in lines(tmp_path / "student")[1:]]
    assert np.mean(gaps[-10:]) < 0.25 * np.mean(gaps[:10]) and np.mean(gaps[:10]) > 0.1, gaps
