"""Controllers in runs: settings of sampler, learner and loader, references that follow or are reset; all over resumes."""
import dataclasses
import inspect
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm import control, methods, parallel
from jaxrl_llm.control import Controller
from jaxrl_llm.control.knobs import unread
from jaxrl_llm.control.reference_reset import reference_reset
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.controls import Controls
from jaxrl_llm.learning.optimizers import updates_planned
from jaxrl_llm.runs import beginning, loop
from jaxrl_llm.sampling.heldout import sample_held_out
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.first_state import known_of
from jaxrl_llm.setup.readers import readers
from jaxrl_llm.store.checkpoints import Checkpoints
from jaxrl_llm.store.lock import at_home
from jaxrl_llm.store.workdir import Workdir
from jaxrl_llm.tools.registry import Kind

NAMES = {"prorl", "t1"}


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict(changes)
    return config


def test_a_reset_needs_a_constant_rate():
    with pytest.raises(ValueError, match="optimizer.schedule='linear' would begin again and not end at 0"):
        setup.build(tiny(method="prorl", objective="+ kl(0.1)", **{"optimizer.schedule": "linear"}))


def test_they_are_runnable_and_adapters_are_refused():
    assert set(methods.runnable()) >= NAMES
    for name in NAMES:
        with pytest.raises(ValueError, match="updates the reference from full weights; LoRA does not change them"):
            setup.build(tiny(method=name, **{"lora.rank": 2}))


def test_before_which_batches_the_optimiser_is_fresh():
    one = control.make("fresh_optimizer", batches=3)
    state, seen = one.init(), []
    for step in range(5):
        seen.append(bool(one.propose(state)["fresh_optimizer"]))
        state = one.observe(state, {"step": jnp.int32(step)})
    assert seen == [True, False, False, True, False]
    with pytest.raises(ValueError, match="batches=0 between fresh states"):
        control.make("fresh_optimizer", batches=0)


@pytest.mark.slow
def test_the_optimiser_is_cleared_before_every_batch():
    """Adam has counted the updates of the last batch alone, and its rate those of all; the update is that of a new Adam."""
    run, params = setup.build(tiny(method="kimi_opmd", **{"optimizer.schedule": "linear", "steps": 3}))
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    rollouts, facts, per_step = finished.rollouts, finished.facts, run.learner.per_step
    rewards = np.linspace(-1, 1, rollouts.rewards.size, dtype=np.float32).reshape(rollouts.rewards.shape)
    batch = rollouts.replace(rewards=rewards)
    state = run.learner.learn(state, batch, facts=facts).state
    plain = dataclasses.replace(run.learner, controls=Controls())
    fresh = plain._cleared(jax.tree.map(jnp.copy, state).replace(control={}))
    state, other = run.learner.learn(state, batch, facts=facts).state, plain.learn(fresh, batch).state
    assert per_step > 1 and int(optax.tree.get(state.opt_state, "ScaleByAdamState").count) == per_step
    assert updates_planned(state.opt_state) == 2 * per_step
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(other.params))


@pytest.mark.slow
def test_a_reference_that_follows_the_policy():
    """Three steps against the average of the weights by hand; the log-probs recorded are those of the average."""
    run, params = setup.build(tiny(method="t1", **{"optimizer.learning_rate": 3e-2}))
    state, anchor = setup.initial_state(run, params), jax.tree.map(np.asarray, params)
    assert run.learner.frozen(state.params) == {}
    rollouts = run.source.next(run.learner.publish(state)).rollouts
    rewards = np.linspace(-1, 1, rollouts.rewards.size, dtype=np.float32).reshape(rollouts.rewards.shape)
    for _ in range(3):
        before = anchor
        learned = run.learner.learn(state, rollouts.replace(rewards=rewards))
        state = learned.state
        anchor = jax.tree.map(lambda old, new: np.float32(0.99) * old + np.float32(0.01) * new, anchor,
                              jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
                     state.control["moving_reference"], anchor)
        expected, _ = run.learner.policy.logprobs(before, None, learned.rollouts)
        seen = np.asarray(learned.rollouts.token_mask)
        np.testing.assert_allclose(np.asarray(learned.rollouts.ref_logprobs)[seen], np.asarray(expected)[seen], atol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), anchor, state.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def resumed_is_straight(tmp_path, **changes):
    """A run of six steps, and one that stops after three: the same weights and lines. Returns the lines."""
    options = {"checkpoint.every": 3, "eval.every": 1, "optimizer.learning_rate": 3e-2, **changes}
    loop.train(tiny(**options, steps=6), tmp_path / "straight")
    loop.train(tiny(**options, steps=3), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 3 -> 6"):
        loop.train(tiny(**options, steps=6), tmp_path / "resumed", resume=True)
    found, wanted = (run_files.saved(tmp_path / name, tiny(**options, steps=6)) for name in ("resumed", "straight"))
    assert_same(found, wanted)
    told = [[repeatable(line) for line in lines(tmp_path / name)] for name in ("resumed", "straight")]
    assert told[0] == told[1]
    return told[0]


@pytest.mark.slow
def test_an_anchor_over_a_resume(tmp_path):
    assert not (tmp_path / "straight/reference").exists()
    resumed_is_straight(tmp_path, method="t1")


@pytest.mark.parametrize("former, name", (("t1", "moving_reference"), ("prorl", "reference_reset"), ("spear", "recent_median")))
def test_controllers_by_the_names_of_an_earlier_version(tmp_path, former, name):
    """A checkpoint with the former name of a controller, which was its method's, and one with the present give one state."""
    run, params = setup.build(tiny(method=former))
    state = setup.initial_state(run, params)
    state = state.replace(control=jax.tree.map(lambda x: x + 1, state.control))
    renamed = state.replace(control={former if key == name else key: inner for key, inner in state.control.items()})
    assert former in renamed.control and name not in renamed.control

    def read():
        restored = beginning.restored(run, params, checkpoints).state
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, restored.control, state.control)
        return restored

    for folder, saved in (("former", renamed), ("present", state)):
        with Checkpoints(tmp_path / folder) as checkpoints:
            checkpoints.save(3, saved)
            checkpoints.save(6, read())
            read()
    with Checkpoints(tmp_path / "other") as checkpoints:
        checkpoints.save(3, state.replace(control={}))
        with pytest.raises(ValueError, match=rf"control\.{name}.*: not in the checkpoint"):
            beginning.restored(run, params, checkpoints)


@pytest.mark.slow
def test_resets_over_a_resume(tmp_path, monkeypatch):
    """A controller that is shown the errors of a policy that learns sees validation fall, and resets soon."""
    patient = reference_reset(patience=1, drop=0.0)
    shown_errors = patient._replace(observe=lambda state, facts: patient.observe(state, {"score": 1 - facts["score"]}))
    monkeypatch.setitem(control.base.CONTROLLERS, "reference_reset", Kind(lambda **hyper: shown_errors))
    told = resumed_is_straight(tmp_path, method="prorl", phases="all", objective="+ kl(0.1)")
    resets = [line["step"] for line in told if line.get("control/reset") == 1]
    assert resets and len(resets) < 6
    stored = sorted(int(path.name) for path in (tmp_path / "straight/reference").iterdir() if path.name.isdecimal())
    assert stored == sorted({0, *resets})[-2:]
    for line in told[1:]:  # the step after a reset meets a reference that it equals, at the rate of a first update
        if line["step"] - 1 in resets and "learning_rate" in line:
            assert line["learning_rate"] == told[1]["learning_rate"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ("line", "reference"))
def test_an_evaluation_is_observed_once_whatever_breaks_after_it(tmp_path, monkeypatch, broken):
    """A full disk after the evaluation of step 3, at its line of metrics or at the weights that a reset keeps."""
    def falls_at(calls):
        """Requests a reset at the third evaluation; its state counts them, so that a second look at one is seen."""
        return Controller(lambda: jnp.int32(0), lambda seen: {"reset": seen == 3},
                          lambda seen, facts: seen + ("score" in facts), facts=("score",), knobs=("reset",))

    monkeypatch.setitem(control.base.CONTROLLERS, "reference_reset", Kind(lambda **hyper: falls_at(3)))
    options = {"checkpoint.every": 6, "eval.every": 1, "optimizer.learning_rate": 3e-2, "method": "prorl", "phases": "all",
               "objective": "+ kl(0.1)", "steps": 5}
    loop.train(tiny(**options), tmp_path / "straight")
    place, name = (loop.MetricWriter, "write") if broken == "line" else (beginning, "keep_weights")
    intact = getattr(place, name)

    def full(*given, **named):
        if 3 in given[:3]:
            raise OSError("the disk is full")
        return intact(*given, **named)

    monkeypatch.setattr(place, name, full)
    with pytest.raises(OSError, match="the disk is full") as caught:
        loop.train(tiny(**options), tmp_path / "resumed")
    assert "step 3 was saved" in caught.value.__notes__[0]
    monkeypatch.setattr(place, name, intact)
    loop.train(tiny(**options), tmp_path / "resumed", resume=True)
    resets = [[line.get("control/reset") for line in lines(tmp_path / one)] for one in ("resumed", "straight")]
    assert resets[0] == resets[1] == [None, 0, 0, 1, 0, 0]
    resumed, straight = (run_files.saved(tmp_path / one, tiny(**options)) for one in ("resumed", "straight"))
    assert_same(resumed, straight)
    assert resumed[".control['reference_reset']"] == 5
    told = [[repeatable(line) for line in lines(tmp_path / one)] for one in ("resumed", "straight")]
    assert told[0] == told[1], "what step 3 measured before the disk was full is in its line"


@pytest.mark.filterwarnings("ignore:.*is on a new branch")
def test_a_reference_of_a_branch_that_was_left_is_not_read_later(tmp_path):
    """A reset after step 300, killed before its checkpoint: the run continues from 250, and may not reset at 300 again."""
    one = types.SimpleNamespace(name="reference", init=lambda params: jax.tree.map(jnp.copy, params))
    run = types.SimpleNamespace(learner=types.SimpleNamespace(keeping=(one,), mesh=parallel.make_mesh(), offload=()))

    def state(step):
        return types.SimpleNamespace(step=step, params={"w": jnp.full(4, float(step))})

    def read(step, resume=True):
        work = Workdir(at_home(tmp_path), resume, {}, [])
        return float(beginning.frozen_weights(run, state(step), work, step)["reference"]["w"][0])

    (tmp_path / "reference/7").mkdir(parents=True)  # of a start that saved no checkpoint
    assert read(0, resume=False) == 0 and not (tmp_path / "reference/7").exists()
    beginning.keep_weights(tmp_path / "reference", 300, one, state(300))
    assert [read(250), read(350)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_completions_of_each_problem_have_limits_of_their_own(monkeypatch, engine):
    """They are the beginnings of what the policy writes without limits, and have not stopped where a limit ends them."""
    limits = np.random.default_rng(0).integers(1, 9, 82)

    def bounded():
        return Controller(lambda: jnp.int32(0), lambda seen: {"token_limits": jnp.asarray(limits)}, lambda seen, facts: seen,
                          facts=("step",), knobs=("token_limits",))

    free, _ = setup.build(tiny(**{"sampling.engine": engine}))
    monkeypatch.setitem(control.base.CONTROLLERS, "bounded", Kind(bounded))
    row = dataclasses.replace(methods.get("grpo"), slug="bounded", controllers="bounded")
    monkeypatch.setitem(methods.METHODS, "bounded", row)
    run, params = setup.build(tiny(method="bounded", **{"sampling.engine": engine}))
    assert len(run.source.task.train) == len(limits)
    state = setup.initial_state(run, params)
    cut, cuts = set(), 0
    for _ in range(2):
        own = run.source.next(run.learner.publish(state)).rollouts
        whole = free.source.next(free.learner.publish(state)).rollouts
        np.testing.assert_array_equal(own.prompt_ids, whole.prompt_ids)
        most = limits[own.prompt_ids][:, None]
        lengths = np.minimum(whole.mask.sum(-1), most)
        np.testing.assert_array_equal(own.mask.sum(-1), lengths)
        T = min(own.tokens.shape[2], whole.tokens.shape[2])
        kept = np.arange(T) < lengths[..., None]
        np.testing.assert_array_equal(own.tokens[..., :T][kept], whole.tokens[..., :T][kept])
        ended = whole.mask.sum(-1) > most
        assert own.extras["truncated"][ended].all()
        cut, cuts = cut | {*np.unique(most)}, cuts + ended.sum()
    assert len(cut) > 3 and cuts > 3
    held_out = [sample_held_out(source, state.params, None, 4, state.key) for source in (run.source, free.source)]
    np.testing.assert_array_equal(*(forest.tokens for forest in held_out))  # they have no limits of their own


def by_step(**values):
    """A controller that sets each of these to its next entry in every step, and the last one from then on."""
    tables = {name: jnp.asarray(x) for name, x in values.items()}

    def propose(step):
        return {name: table[jnp.minimum(step, len(table) - 1)] for name, table in tables.items()}

    return Controller(lambda: jnp.int32(0), propose, lambda step, facts: step + 1, facts=("rewards",), knobs=tuple(values))


def controlled(run, **controllers):
    return dataclasses.replace(run, learner=dataclasses.replace(run.learner, controls=Controls(controllers)))


def first_steps(run, params, count):
    """The steps of a fresh state, each with the weights before it."""
    state, found = setup.initial_state(run, jax.tree.map(lambda x: x + 0, params)), []
    before = jax.device_get(state.params)
    frozen = run.learner.frozen(state.params)
    for step in itertools.islice(schedules.make("sync").steps(run.source, run.learner, state, frozen), count):
        found.append((before, step))
        before = jax.device_get(step.learned.state.params)
    return found


@pytest.mark.slow
def test_settings_reach_sampler_learner_and_loader():
    """Temperatures and limits of three steps; the learner's log-probs are the sampler's at each, nothing compiles again."""
    run, params = setup.build(tiny(**{"model.num_layers": 1, "learner.minibatches": 2, "optimizer.warmup_updates": 0}))
    hot, short = [0.5, 2.0, 1.3], [2, 5, 99]
    problems = [[3, 3, 40, 81], [7, -1, -1, 8], [-1, -1, -1, -1]]
    weights = np.zeros((3, 82), np.float32)
    weights[:, [11, 12]] = 1
    run = controlled(run, heat=by_step(temperature=np.float32(hot), max_tokens=short), data=by_step(
        prompt_ids=problems, prompt_weights=weights))
    plain = dataclasses.replace(run.learner.policy, temperature=1.0)
    for number, (before, step) in enumerate(first_steps(run, params, 3)):
        rollouts, metrics = step.finished.rollouts, step.finished.metrics | step.learned.metrics
        mask = rollouts.mask
        assert metrics["control/temperature"] == np.float32(hot[number]) and metrics["control/max_tokens"] == short[number]
        assert mask.sum(-1).max() <= short[number] and (number == 2 or mask.sum(-1).max() == short[number])
        assert rollouts.extras["truncated"][mask.sum(-1) == short[number]].any() or number == 2
        again = plain.logprobs(before, None, rollouts.replace(temperature=np.full(4, hot[number], np.float32)))
        np.testing.assert_allclose(np.where(mask, again[0], 0), np.where(mask, rollouts.behavior_logprobs, 0), atol=1e-4)
        np.testing.assert_allclose(np.where(mask, again[1], 0), np.where(mask, rollouts.entropies, 0), atol=1e-4)
        assert metrics["max/mismatch"] < 0.1  # of the second update's weights; 1 or more at a wrong temperature
        ids = [problem.id for problem in step.finished.forest.problems]
        assert ids[:2] + ids[3:] == [3, 3, 81] if number == 0 else set(ids) >= {11, 12} and set(ids) <= {7, 8, 11, 12}
        assert number != 1 or (ids[:2] == [7, 8] and sorted(ids[2:]) == [11, 12])
    assert step.position["data"] | {"draws": 3, "next_problem": 0} == step.position["data"]


@pytest.mark.slow
def test_a_learning_rate_is_a_factor_of_the_schedule():
    """Half of the rate moves every weight half as far, of the same batch; none leaves it where it is."""
    run, params = setup.build(tiny(**{"model.num_layers": 1, "optimizer.warmup_updates": 0}))
    moved = {}
    for rate in (1.0, 0.5, 0.0):
        one = controlled(run, rate=by_step(learning_rate=[np.float32(rate)]))
        one.source.set_position({"data": one.source.data.get_state() | {"next_problem": 0, "draws": 0}, "next_uid": 0})
        (before, step), = first_steps(one, params, 1)
        assert step.learned.metrics["control/learning_rate"] == rate
        moved[rate] = jax.tree.map(lambda new, old: np.asarray(new) - old, step.learned.state.params, before)
    assert max(np.abs(x).max() for x in jax.tree.leaves(moved[1.0])) > 1e-3
    jax.tree.map(lambda half, whole: np.testing.assert_allclose(half, whole / 2, atol=2e-7), moved[0.5], moved[1.0])
    assert not any(x.any() for x in jax.tree.leaves(moved[0.0]))


def test_runs_know_what_controllers_begin_with_and_read_what_they_set():
    run, params = setup.build(tiny(**{"model.num_layers": 1}))
    known = {one.name for one in (*known_of(run, params), *run.learner.known(params))}
    made = {name: control.make(name) for name in control.names()}
    for name, one in made.items():
        assert known >= {*inspect.signature(one.init).parameters}, name
    assert unread(made, readers()) == []


def test_what_two_set_and_values_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="controllers 'a' and 'b' both set temperature"):
        Controls({"a": by_step(temperature=[1.0]), "b": by_step(temperature=[2.0])})
    run, params = setup.build(tiny(**{"model.num_layers": 1}))
    for wrong, said in (({"prompt_weights": np.ones((1, 81))}, r"prompt_weights of controller 'a' has shape \(81,\).* N is 82"),
                        ({"prompt_ids": [[82]]}, "prompt_ids of controller 'a' has numbers from 82 to 82; give 81 or less")):
        with pytest.raises(ValueError, match=said):
            first_steps(controlled(run, a=by_step(**wrong)), params, 1)
    with pytest.raises(ValueError, match="temperature=-1.0 of controller 'a'; give 0 or more"):
        first_steps(controlled(run, a=by_step(temperature=np.float32([-1]))), params, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["acereason_temperature", "scalerl"])
def test_settings_over_a_resume(tmp_path, method):
    """Bit for bit, the temperature, the counts of right answers, and the drawn problems behind the last step that was saved."""
    told = resumed_is_straight(tmp_path, method=method, **{"learner.minibatches": 1, "sampling.group": 4})
    if method == "scalerl":
        assert position_of(tmp_path / "resumed")["data"]["draws"] == 6
    else:
        assert len({line["control/temperature"] for line in told[1:] if "control/temperature" in line}) > 1


def position_of(workdir):
    """Where the source of a finished run is."""
    config = tiny(method="scalerl", **{"learner.minibatches": 1})
    run, params = setup.build(config)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore(setup.initial_state(run, params)).host
