"""A pass over all training problems before a step: its counts, what controllers make of them, and a kill within it."""
import io
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
import run_files
import tiny_config
from run_files import assert_same

from jaxrl_llm.learning import schedules
from jaxrl_llm.runs import first_pass, loop, phases
from jaxrl_llm.runs.progress import Progress
from jaxrl_llm.sampling import asked
from jaxrl_llm.setup import keys, setup
from jaxrl_llm.setup.phases import phases_of
from jaxrl_llm.tools.timer import PhaseTimer

P, G = 4, 4
CONTROL = {"drive": "steps=(1, 2), keep=(0.5,), times=6", "arpo_replay": "times=6", "qwenlong_l15_adv": "times=6, bins=2"}

CONTROLLERS = {"drive": "drive", "arpo_replay": "solvable", "qwenlong_l15_adv": "even_rates"}


def tiny(method, **changes):
    config = tiny_config.get_config()
    config.method, config.controllers = method, CONTROL[method]
    config.model.num_layers, config.task = 1, "arithmetic(level=digit)"
    often = {"checkpoint.every": 1, "checkpoint.keep": 5, "eval.every": 2, "eval.problems": 1, "samples_every": 0}
    config.update_from_flattened_dict(often | changes)
    return config


def test_answers_do_not_depend_on_an_interrupt():
    """Six answers of two groups of four count; a measure that goes on after its second batch ends with the same counts."""
    run, params = setup.build(tiny("arpo_replay"))
    state, problems = setup.initial_state(run, params), len(run.source.task.train)
    times = first_pass.wanted(run, state)
    assert times.tolist() == [6] * problems
    times = times.copy()
    times[2 * P + 1:] = 0
    weights, key, place = (state.params, state.lora), jax.random.key(3), run.source.position()
    whole = list(asked.ask(run.source, *weights, times, key, asked.none(problems)))
    assert [one.done for one in whole] == [P, 2 * P, 2 * P + 1]
    assert whole[-1].tried.tolist() == times.tolist() and 0 < whole[-1].right.sum() < whole[-1].tried.sum()
    *_, again = asked.ask(run.source, *weights, times, key, whole[1])
    np.testing.assert_array_equal(again.right, whole[-1].right)
    assert run.source.position() == place  # nothing of training has moved
    other = next(asked.ask(run.source, *weights, times, jax.random.key(4), asked.none(problems)))
    assert other.right.tolist() != whole[0].right.tolist()


def test_answers_of_another_configuration_are_refused_with_the_difference(tmp_path):
    """What costs alone, and records of earlier versions, are no difference."""
    run, params = setup.build(tiny("arpo_replay"))
    state = setup.initial_state(run, params)
    times = first_pass.wanted(run, state)
    done = {"step": 0, "times": times.tolist(), "tried": times.tolist(), "right": (times - 1).tolist(), "done": len(times)}

    def continued(**changes):
        config = keys.flat(run.config) | {key.replace("__", "."): value for key, value in changes.items()}
        stored = done | ({"config": {key: config[key] for key in first_pass.answered_under(run.config)}} if changes else {})
        (tmp_path / first_pass.FILE).write_text(json.dumps(stored))
        return first_pass.measured(run, state, (state.params, state.lora), times, tmp_path, Progress(1, stream=io.StringIO()),
                                   PhaseTimer(), again=True)

    (tmp_path / first_pass.FILE).write_text("[1, 2]")
    assert first_pass._begun(tmp_path / first_pass.FILE, 0, times, {})[0].done == 0, "no record of a measure"
    for same in ({}, {"seed": 0}, {"sampling__engine": "slots", "steps": 99}, {"server__deadline": 9.0}):
        assert continued(**same).right.sum() == 5 * len(times)
    said = (r"asked.json has answers to .* training problems under another configuration \(sampling.temperature: 0.5 -> 1.0; "
            r"task: .*\), and answers to the rest would not go with them; continue with the former values, or delete the file")
    with pytest.raises(ValueError, match=said):
        continued(sampling__temperature=0.5, task="arithmetic(level=sub2)")
    with pytest.raises(ValueError, match=r'\(reward_errors: "zero" -> "raise"; server.url: "http://other" -> ""\)'):
        continued(reward_errors="zero", server__url="http://other")
    fewer = {"seed": 0, "task": run.config.task}  # as earlier versions recorded
    (tmp_path / first_pass.FILE).write_text(json.dumps(done | {"config": fewer}))
    assert first_pass._begun(tmp_path / first_pass.FILE, 0, times, first_pass.answered_under(run.config))[0].done == len(times)


@pytest.mark.slow
def test_a_pass_that_was_killed_goes_on_where_it_was(tmp_path, capsys):
    """The checkpoint before the first step and the first two batches of the pass are left: the weights become the same."""
    config = tiny("arpo_replay", steps=2)
    loop.train(config, tmp_path / "straight")
    assert "asked " in (said := capsys.readouterr()).out + said.err
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"resumed/checkpoints/{step}")
    file = tmp_path / "resumed" / first_pass.FILE
    stored = json.loads(file.read_text())
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    key = jax.random.fold_in(jax.random.fold_in(state.key, 2**31 - 6), 0)
    half = list(itertools.islice(asked.ask(run.source, state.params, state.lora, np.array(stored["times"]), key, asked.none(
        len(stored["times"]))), 2))[-1]
    assert half.right.sum() <= sum(stored["right"])
    file.write_text(json.dumps(stored | {"tried": half.tried.tolist(), "right": half.right.tolist(), "done": half.done}))
    loop.train(config, tmp_path / "resumed", resume=True)
    assert json.loads(file.read_text()) == stored
    assert_same(*(run_files.saved(tmp_path / name, config) for name in ("resumed", "straight")))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "second"), [
    ("arpo_replay", "b(method=qwenlong_l15_adv, controllers='times=6, bins=2')"), ("drive", "b")])
def test_a_phase_asks_for_itself(method, second, tmp_path, monkeypatch):
    """Killed between two phases: a second pass of equal numbers has its own answers, and none comes after the last step."""
    config = tiny(method, steps=2, phases=f"a, {second}", **{"sampling.max_group": 2 * G, "optimizer.learning_rate": 3e-2})
    loop.train(config, tmp_path / "straight")

    def dies(course, last, work):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(phases, "entered", dies)
        with pytest.raises(InterruptedError):
            loop.train(config, tmp_path / "killed")
    loop.train(config, tmp_path / "killed", resume=True)
    last = phases_of(config)[1].config
    assert_same(*(run_files.saved(tmp_path / name, last) for name in ("killed", "straight")))
    assert json.loads((tmp_path / "killed" / first_pass.FILE).read_text())["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", CONTROL)
def test_three_steps_by_name(method, tmp_path):
    config = tiny(method, steps=3, **{"sampling.max_group": 2 * G})
    loop.train(config, tmp_path)
    stored = json.loads((tmp_path / first_pass.FILE).read_text())
    assert stored["step"] == (1 if method == "drive" else 0) and stored["done"] == sum(time > 0 for time in stored["times"])
    final, tried, right = run_files.saved(tmp_path, config), np.array(stored["tried"]), np.array(stored["right"])
    state = {name: leaf for name, leaf in final.items() if f"'{CONTROLLERS[method]}'" in name}
    (kept,) = (leaf for name, leaf in state.items() if name.endswith((".kept", ".weights")) and "shares" not in name)
    if method == "drive":
        assert kept.sum() == round(0.5 * len(kept)) and right[kept].mean() <= right[~kept].mean()
    elif method == "arpo_replay":
        assert (kept > 0).tolist() == (right > 0).tolist()
    else:
        assert (kept > 0).tolist() == (tried > 0).tolist() and len(set(kept.tolist())) == 2


def test_a_batch_of_a_schedule_reads_what_was_told():
    """Problems without a success have the weight 0 in the draws after the measure."""
    run, params = setup.build(tiny("arpo_replay"))
    state, problems = setup.initial_state(run, params), len(run.source.task.train)
    right = np.zeros(problems, np.int32)
    right[5:9] = 1
    state = run.learner.told(state, {"measured_tried": np.full(problems, 6, np.int32), "measured_right": right})
    assert first_pass.wanted(run, state) is None
    done = next(schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(params)))
    assert {problem.id for problem in done.finished.forest.problems} == {5, 6, 7, 8}
