"""Curricula, budgets and schedules by name: three steps each; runs sample what they set, also after a resume."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_control_run
import tiny_config
from test_replay_runs import with_factor

from jaxrl_llm import methods
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.controls import Controls
from jaxrl_llm.sampling import stages
from jaxrl_llm.sampling.stages import Unfinished
from jaxrl_llm.setup import names, parts, setup
from jaxrl_llm.tools.timer import PhaseTimer

CHOOSING = ["vade", "gdro_prompt", "c3po", "qwenlong_aepo", "kimi_sampling", "acereason_curriculum", "rapo_curriculum",
            "qwenlong_l1", "siri", "sws", "historical_variance", "oneshot_entropy"]
ALLOTTING = ["dars", "dars_hardness", "speed_rl", "ngu", "xrpo_allocation", "drive", "dart_curation", "gdro_rollout",
            "brorl"]
P, G, MOST = 4, 2, 6
# Schedules whose numbers are so small that they switch between the first and the third step:
CONTROL = {"siri": {"controllers": "period=4"},
           "kimi_sampling": {"controllers": "every=1"}, "drive": {"controllers": "steps=(1, 1, 1), keep=(0.5, 0.25)"},
           "qwenlong_l1": {"controllers": "limits=(9, 10)", "task": "arithmetic(level=sum3, size=80)"}}
IN_PHASES = {"acereason_curriculum", "qwenlong_l1", "sws", "historical_variance", "oneshot_entropy"}


def tiny(method, **changes):
    c = tiny_config.get_config()
    c.method, c.model.num_layers, c.prompts.per_step, c.sampling.group, c.sampling.max_group = method, 1, P, G, MOST
    c.update_from_flattened_dict(changes)
    return c


def steps_of(run, params, count):
    """The steps of a fresh state, each with the controllers' proposals; a step consumes the state before it."""
    state = setup.initial_state(run, params)
    steps = schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))
    for _ in range(count):
        knobs = jax.device_get(run.learner.controls.proposed(state.control))
        done = next(steps)
        yield knobs, done
        state = done.learned.state


def test_they_run_by_name():
    assert {*CHOOSING, *ALLOTTING} <= set(methods.runnable())


@pytest.mark.slow
@pytest.mark.parametrize("method, changes", [
    ("gdro_prompt", {"estimator": "signal=surrogate, num_prompts=512"}), ("gdro_rollout", {"controllers": "signal=surrogate"})])
def test_the_surrogate_loss_of_a_run_is_what_its_updates_moved(method, changes):
    """The signal of all bins stays 0 with a learning rate of 0."""
    seen = {}
    for rate in (0.0, 3e-2):
        run, params = setup.build(tiny(method, **changes, **{"optimizer.learning_rate": rate, "warmup.steps": 0}))
        for _, done in steps_of(run, params, 2):
            state = done.learned.state
            own = state.estimator_state.moving if method == "gdro_prompt" else state.control["gdro_rollout"].gains
            seen[rate] = np.abs(jax.device_get(own)).max()
    assert seen[0.0] < 1e-5 and seen[3e-2] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", CHOOSING + ALLOTTING)
def test_three_steps_by_name(method):
    """The proposed problems are sampled and counted, group sizes stay within their limits, and all numbers are finite.

    Schedules propose other limits, sizes or weights in the third step than in the first one.
    """
    run, params = setup.build(tiny(method, **CONTROL.get(method, {})))
    before, proposed = jax.device_get(params), []
    for number, (knobs, done) in enumerate(steps_of(run, params, 3)):
        proposed.append([knobs.get(name) for name in ("max_tokens", "group_sizes", "prompt_weights")])
        finished, numbers = done.finished, done.finished.metrics | done.learned.metrics
        assert all(np.isfinite(value) for value in numbers.values()) and int(done.learned.state.step) == number + 1
        tried, right = (finished.counts[name] for name in ("tried", "right"))
        assert tried.shape == right.shape == (len(run.source.task.train),) and (right <= tried).all()
        if "prompt_ids" in knobs:
            ids = np.asarray(knobs["prompt_ids"])
            assert set(np.flatnonzero(tried)) == set(ids[ids >= 0].tolist())
        if "group_sizes" in knobs:
            assert tried[ids].tolist() == knobs["group_sizes"].tolist()  # here all are multiples of the group
        if "prompt_ids" not in knobs and "prompt_weights" in knobs and knobs["prompt_weights"].any():
            assert {*np.flatnonzero(tried)} <= {*np.flatnonzero(knobs["prompt_weights"])}
        if "max_tokens" in knobs:
            assert numbers["control/max_tokens"] == knobs["max_tokens"]
        if finished.rollouts is None:
            continue
        sizes = finished.rollouts.valid.sum(1)
        assert sizes.max() <= (MOST if finished.rollouts.valid.shape[1] > G else G) and (sizes % G == 0).all()
        chosen = np.array([problem.id for problem in finished.forest.problems])
        assert (tried[chosen] > 0).all() and tried.sum() >= sizes.sum()
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), before, jax.device_get(done.learned.state.params))
    assert max(jax.tree.leaves(moved)) > 0
    assert method not in CONTROL.keys() - IN_PHASES or not all(map(np.array_equal, proposed[0], proposed[2]))


@pytest.mark.slow
def test_counts_include_all_samples():
    """With a filter, controllers also observe the dropped groups, even in a step without a kept group."""
    run, params = setup.build(tiny("sws", **{"sampling.max_draws": 2}))
    (_, done), = steps_of(with_factor(run, [0.0]), params, 1)
    assert done.finished.rollouts is None and done.learned.rollouts is None
    assert done.finished.counts["tried"].sum() == 2 * P * G and not done.finished.counts["right"].any()
    visits = np.asarray(done.learned.state.control["sws_domains"].visits)
    np.testing.assert_array_equal(visits, done.finished.counts["tried"] > 0)
    assert int(done.learned.state.step) == 1


@pytest.mark.slow
def test_groups_dropped_by_spear_are_not_replaced():
    """At most the three groups of largest spread remain of four, from one draw."""
    run, params = setup.build(tiny("spear_clip", **{"sampling.group": 4}))
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    assert finished.counts["tried"].sum() == 4 * P and "filter/draws" not in finished.metrics
    assert 0 < len(finished.forest.problems) <= 3 and finished.metrics["filter/kept"] == len(finished.forest.problems) / P


@pytest.mark.slow
def test_texts_of_bytes_that_are_none_are_marked_and_not_learned_from():
    run, params = setup.build(tiny("spear_clip", **{"sampling.group": 4, "filters": "spear_rollouts"}))
    state = setup.initial_state(run, params)
    snapshot = run.learner.publish(state)
    finished = run.source.next(snapshot)
    forest, rollouts = finished.forest, finished.rollouts
    assert rollouts.extras["unreadable"].tolist() == [["\ufffd" in text for text in row] for row in forest.texts[
        forest.ends].reshape(P, 4)], "a policy without training writes bytes of all kinds"
    texts = forest.texts.copy()
    texts[forest.ends] = ["1\ufffd2", "12", "\u00e9", "12"] * P
    batch = Unfinished(forest.with_columns(texts=texts), run.source.topology, snapshot, {}, PhaseTimer())
    rollouts = stages.readable().view(rollouts, batch, run.source)
    assert rollouts.extras["unreadable"].tolist() == [[True, False, False, False]] * P
    learned = run.learner.learn(state, rollouts)
    assert not np.asarray(learned.rollouts.mask)[:, 0].any() and learned.metrics["filter/spear_rollouts/dropped"] >= 0.25


def test_a_rule_that_measures_and_a_filter_that_draws_again(monkeypatch):
    row = dataclasses.replace(methods.get("gvm_raft"), slug="both", filters="dynamic_sampling")
    monkeypatch.setitem(methods.METHODS, "both", row)
    with pytest.raises(ValueError, match="gradient_norms, which is measured of a whole batch, and the filter"):
        setup.build(tiny("both"))


@pytest.mark.slow
def test_numbers_of_rollouts_over_a_resume(tmp_path):
    """Bit for bit: the walk through the problems, bins, scores and chosen arms are in the checkpoint."""
    test_control_run.resumed_is_straight(
        tmp_path, method="gdro_rollout", **{"sampling.group": 2, "sampling.max_group": 6, "model.num_layers": 1})


@pytest.mark.slow
def test_numbers_are_set_from_outside():
    run, _ = setup.build(tiny("drive", controllers="steps=(1, 2), keep=(0.5,)"))
    state = setup.initial_state(run, jax.tree.map(jnp.array, run.learner.policy.model.init(jax.random.key(0))))
    sizes = []
    for step in range(2):
        knobs = run.learner.controls.proposed(state.control)
        sizes.append(knobs["group_sizes"].tolist())
        nothing = np.zeros(len(run.source.task.train), np.int32)
        state = run.learner.learn(state, None, facts={"tried": nothing, "right": nothing}).state
        facts = {"measured_tried": run.learner.controls.proposed(state.control)["measured_times"], "measured_right": nothing}
        state = run.learner.told(state, facts)
    assert sizes == [[G] * P, [MOST] * P] and np.asarray(knobs["prompt_weights"]).sum() == 41  # half of 82
    row = parts.controls_of(names.method_of(tiny("t1_oversampling")))
    given = parts.controls_of(names.method_of(tiny("t1_oversampling", controllers="decay=0.5")))
    with pytest.raises(ValueError, match="keyword of controller 'moving_reference' 'decy'. Did you mean 'decay'?"):
        parts.controls_of(dataclasses.replace(methods.get("t1"), controllers="moving_reference(decy=0.9)"))
    for controls, moved in ((row, 0.1), (given, 0.5)):
        state = controls.by_name["moving_reference"].observe({"w": jnp.zeros(1)}, {"params": {"w": jnp.ones(1)}})
        np.testing.assert_allclose(state["w"], moved, rtol=1e-6)
    run, _ = setup.build(tiny("dars", allocation="weighting=hardness"))
    assert run.source.topology.most == 3 * G


@pytest.mark.slow
@pytest.mark.parametrize("method", ["v0", "knapsack_rl", "gvm_raft", "xrpo_allocation", "gdro_rollout", "dars", "speed_rl",
                                    "ngu", "dart_curation", "drive", "v0_5", "reinforce_ada"])
def test_by_default_groups_grow_to_four_times_their_size(method):
    run, params = setup.build(tiny(method, **{"sampling.max_group": 0}))
    assert run.config.sampling.max_group == 4 * G and run.source.most == 4 * G
    state = setup.initial_state(run, params)
    if method == "gdro_rollout":
        assert state.control["gdro_rollout"].gains.shape == (7, 4)


@pytest.mark.parametrize("changes, message", [
    ({"method": "grpo", "controllers": "every=5"}, "these are numbers or terms, and method 'grpo' has no controller here"),
    ({"method": "siri", "controllers": "perod=5"}, "keyword of controller 'siri' 'perod'. Did you mean 'period'"),
    ({"method": "grpo", "allocation": "weighting=hardness"},
     "method 'grpo' has no allocation rule here; name one of [a-z_0-9, ]*dars"),
    ({"method": "dars", "budget.utility": "knapsack"}, "both say how many rollouts a prompt gets"),
    ({"method": "dart_curation", "sampling.max_group": 2}, "controller 'dart_curation' would give all prompts the same"),
    ({"method": "dars", "sampling.max_group": 2}, "sampling.max_group=2 is no more than 1 x sampling.group=2"),
    ({"method": "xrpo_allocation", "sampling.max_group": 4}, "sampling.max_group=4 is no more than 2 x sampling.group=2"),
])
def test_impossible_settings_are_refused(changes, message):
    method = changes.pop("method")
    with pytest.raises(ValueError, match=message):
        setup.build(tiny(method, **changes))


def test_a_controller_that_needs_an_unknown_fact():
    run, params = setup.build(tiny("grpo"))
    strange = dataclasses.replace(run.learner, controls=Controls({"a": test_control_run.by_step(
        temperature=[1.0])._replace(init=lambda moon: jnp.int32(0))}))
    with pytest.raises(ValueError, match="the init of controller 'a' takes moon, and this run knows params"):
        strange.init(params, None, jax.random.key(0))
