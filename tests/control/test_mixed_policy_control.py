"""Dropped, replaced, retried and replayed rollouts: SimpleTIR, ReMix, R3L, KEPO, SPEAR."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, control, objectives
from jaxrl_llm.control import kepo, r3l, recent_median, remix, simpletir_filter
from jaxrl_llm.control.base import without
from jaxrl_llm.data.rollouts import from_lists, pad_lists


def test_simpletir_worked_example():
    """Rollout 1: code, tool output, answer; rollout 2: one void turn of two tokens."""
    ratios = pad_lists([[[1.5, 1.1, 0.5], [0.5, 1.5]]], fill=1)
    rollouts = from_lists([[1, 0]], lengths=[[3, 2]], old_logprobs=np.zeros((1, 2, 3), np.float32))
    rollouts = rollouts.replace(mask=rollouts.mask.at[0, 0, 1].set(False))
    void = jnp.array([[[False] * 3, [True, True, False]]])
    keep = simpletir_filter.free_of_void(void, rollouts.mask, rollouts.valid)
    assert keep.tolist() == [[True, False]]
    values, _ = advantages.grpo().update(rollouts, ())
    np.testing.assert_allclose(values[0, :, 0], [0.707106, -0.707106], atol=1e-6)
    trained = without(rollouts, keep)
    assert trained.mask.tolist() == [[[True, False, True], [False] * 3]]
    update = jax.value_and_grad(objectives.ppo_clip(clip_high=0.28, dual_clip=3.0).update, has_aux=True)
    (loss, _), gradient = update(jnp.log(ratios), trained, values, ())
    np.testing.assert_allclose(loss, -0.629324145, atol=1e-6)
    np.testing.assert_allclose(gradient, [[[0, 0, -0.176776], [0, 0, 0]]], atol=1e-6)
    nothing = without(rollouts, jnp.zeros((1, 2), bool))
    assert update(jnp.log(ratios), nothing, values, ())[0][0] == 0


def test_simpletir_leaves_out_rollouts_that_reach_the_limit():
    rollouts = from_lists([[1, 0, 1]], lengths=[[2, 2, 2]], extras={
        "void": jnp.zeros((1, 3, 2), bool).at[0, 1].set(True), "truncated": jnp.array([[False, False, True]])})
    assert control.make_filter("simpletir_filter").keep(rollouts).tolist() == [[True, False, True]]
    both = control.make_filter("simpletir_filter", overlong=False)
    assert both.keep(rollouts).tolist() == [[True, False, False]] and both.needs == ("void", "truncated")


def test_remix_takes_the_named_share_from_each_recent_policy():
    ages = np.asarray(remix.policy_ages(jax.random.key(0), 20_000, 5))
    np.testing.assert_allclose([np.mean(ages == i) for i in range(4)], [0.6, 0.2, 0.2, 0], atol=0.015)
    assert np.unique(remix.policy_ages(jax.random.key(0), 1000, 1)).tolist() == [0, 1]
    assert not np.any(remix.policy_ages(jax.random.key(0), 1000, jnp.int32(0)))


def test_remix_switches_once_to_the_policy_of_that_moment():
    one = control.make("remix", switch=2)
    state = one.init({"w": jnp.zeros(1)})
    assert one.propose(state)["reference"]["w"] == 0 and one.propose(state)["epochs"] > 10**6  # as many as configured
    bases, epochs = [], []
    for step in range(4):
        state = one.observe(state, {"step": jnp.int32(step), "params": {"w": jnp.full(1, step + 1.0)}})
        bases.append(float(one.propose(state)["reference"]["w"][0]))
        epochs.append(int(one.propose(state)["epochs"]) == 1)
    assert bases == [0, 2, 2, 2] and epochs == [False, True, True, True]
    late = one.observe(one.init({"w": jnp.zeros(1)}), {"step": jnp.int32(7), "params": {"w": jnp.ones(1)}})
    assert late.params["w"] == 1 and late.switched
    with pytest.raises(ValueError, match="switch=0; give the number of steps before the switch"):
        control.make("remix", switch=0)


@pytest.mark.parametrize("text, expected", [
    ('{"outcome": "failure", "suggestion": "add", "retry_from_step": 1}', ("add", 1)),
    ('{"outcome": "success_but_inefficient", "suggestion": "s", "retry_from_step": 0}', ("s", 0)),
    ('{"outcome": "success", "suggestion": "s", "retry_from_step": 0}', None),
    ('{"outcome": "failure", "suggestion": "s", "retry_from_step": 2}', None),
    ('{"outcome": "failure", "suggestion": "s", "retry_from_step": -1}', None),
    ('{"outcome": "failure", "suggestion": "s", "retry_from_step": true}', None),
    ('{"outcome": "failure", "suggestion": "s"}', None), ("[1]", None), ("no json", None),
    ('{"outcome": ["failure"], "suggestion": "s", "retry_from_step": 0}', None)])
def test_r3l_reflections(text, expected):
    assert r3l.parse_reflection(text, steps=2) == expected


def test_r3l_records_reflections_that_helped():
    base, retry = jnp.array([[0.0, 0.5, 1.0, 1.0]]), jnp.array([[1.0, 0.6, 0.0, 1.0]])
    retried, perfect = jnp.array([[True, True, False, True]]), jnp.array([[False, True, True, False]])
    reflections, guided = r3l.recorded(base, retry, retried, perfect)
    assert reflections.tolist() == [[True, False, True, False]] and guided.tolist() == [[True, False, False, False]]


def test_kepo_replaces_rollouts_of_wanted_prompts():
    rollouts = from_lists([[0, 0], [0, 1], [0]])
    assert kepo.unsolved(rollouts.rewards, rollouts.valid).tolist() == [True, False, True]
    assert not kepo.unsolved(jnp.zeros((1, 2)), jnp.zeros((1, 2), bool))[0]
    wanted = jnp.arange(4000) % 2 == 0
    chosen = np.asarray(kepo.replaced(jax.random.key(0), wanted, 4, draws=2))
    counts = chosen.sum(1)
    assert not counts[1::2].any() and set(counts[::2]) == {1, 2}
    np.testing.assert_allclose(np.mean(counts[::2] == 1), 1 / 4, atol=0.04)
    np.testing.assert_allclose(chosen[::2].mean(0), 7 / 16, atol=0.05)


def test_spear_history_is_a_ring_of_group_means():
    history = recent_median.recent_median(size=3).init()
    assert recent_median.baseline(history) == 0
    first = from_lists([[0.2], [0.0, 0.8], [0.6]])
    observe = jax.jit(recent_median.record)
    history = observe(history, first.rewards, first.valid)
    np.testing.assert_allclose(recent_median.baseline(history), 0.4, rtol=1e-6)
    padded = jnp.array([[True], [False], [True]])  # the middle prompt is padding
    history = observe(history, jnp.array([[1.0], [9.0], [0.9]]), padded)
    np.testing.assert_allclose(sorted(np.asarray(history.values)), [0.6, 0.9, 1.0], rtol=1e-6)
    np.testing.assert_allclose(recent_median.baseline(history), 0.9, rtol=1e-6)
    assert history.count == 5
    with pytest.raises(ValueError, match="size=3"):
        recent_median.record(history, jnp.zeros((4, 1)), jnp.ones((4, 1), bool))
