"""Schedules, triggers and selections of the covariance, divergence and off-policy REINFORCE family."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import control
from jaxrl_llm.control import acereason_temperature, historical_variance, routing_replay, spear_clip
from jaxrl_llm.rollouts import from_lists


def resets(*scores):
    """What ProRL proposes after each of the scores."""
    controller = control.make("prorl")
    state, found = controller.init(), []
    assert not controller.propose(state)["reset"]
    for score in scores:
        state = controller.observe(state, {"score": score})
        found.append(bool(controller.propose(state)["reset"]))
    return found


def test_prorl_resets_on_a_drop_or_a_plateau():
    assert resets(0.2, 0.3, 0.22) == [False, False, True]
    assert resets(0.2, 0.3, 0.31, 0.30, 0.305, 0.308) == [False] * 5 + [True]
    assert resets(0.2, 0.3, 0.26) == [False] * 3 and resets(0.9) == [False]
    assert resets(0.3, 0.3, 0.3, 0.3) == [False] * 3 + [True]


def test_prorl_starts_anew_after_a_reset():
    assert resets(0.9, 0.5, 0.5, 0.5, 0.5, 0.5) == [False, True, False, False, False, True]


def test_t1_anchor_follows():
    controller = control.make("t1")
    anchor = controller.init({"w": jnp.zeros(2)})
    anchor = controller.observe(anchor, {"params": {"w": jnp.array([1.0, 2.0])}})
    np.testing.assert_allclose(controller.propose(anchor)["reference"]["w"], [0.01, 0.02], rtol=1e-5)


def test_spear_tool_reward_and_groups():
    coef = spear_clip.tool_coef(jnp.array([0, 50, 100, 200, 300]))
    np.testing.assert_allclose(coef, [1, 0.853553, 0.5, 0, 0], atol=1e-6)
    np.testing.assert_allclose(spear_clip.tool_reward(jnp.array([7, 13]), coef[1]), [0.597487, 0.853553], rtol=1e-5)
    rollouts = from_lists([[1, 0], [1, 1], [1, 0, 0]])
    assert spear_clip.keep_groups(rollouts.rewards, rollouts.valid).tolist() == [True, False, True]
    assert spear_clip.keep_groups(rollouts.rewards, rollouts.valid, share=0.3).tolist() == [True, False, False]
    many = from_lists([[1, 0], [1, 0.5], [1, 0.9], [1, 0.8]])
    assert spear_clip.keep_groups(many.rewards, many.valid).tolist() == [True, True, False, True]
    admitted = spear_clip.admit(jnp.array([[0.5, 0, -0.1, 0.2]]), jnp.array([[True, True, True, False]]))
    assert admitted.tolist() == [[True, False, False, False]]


LOGITS = jnp.array([[3.0, 1, 0], [2, 2, -2], [50, 0, 0]])
LIVE = jnp.array([True, True, False])


def test_temperature_for_an_entropy():
    for temperature, entropy in ((0.6, 0.442977), (0.85, 0.563560), (1.0, 0.631414)):
        actual = acereason_temperature.mean_entropy(LOGITS, LIVE, temperature)
        np.testing.assert_allclose(actual, entropy, atol=1e-6)
    np.testing.assert_allclose(acereason_temperature.solve(LOGITS, LIVE, target=0.5), 0.719170, atol=1e-5)
    np.testing.assert_allclose(acereason_temperature.solve(LOGITS, LIVE, target=1.2), 3.0, rtol=1e-6)
    np.testing.assert_allclose(acereason_temperature.solve(LOGITS, LIVE, target=0.0), 0.05, rtol=1e-5)


def test_temperature_changes_only_outside_the_band():
    controller = control.make("acereason_temperature")
    sharp = 1.3 * LOGITS[:1]  # entropy 0.2 to 0.4 at temperature 1
    one = LIVE[:1]
    start = controller.init()

    def after(logits):
        return controller.propose(jax.jit(controller.observe)(start, {"logits": logits, "mask": one}))["temperature"]

    assert 0.2 < acereason_temperature.mean_entropy(sharp, one, start) < 0.4
    assert after(sharp) == 1
    flat = after(LOGITS[:1] / 4)
    np.testing.assert_allclose(acereason_temperature.mean_entropy(LOGITS[:1] / 4, one, flat), 0.3, atol=1e-5)
    assert flat < 1 < after(4 * LOGITS[:1])


def test_examples_are_ranked_by_how_much_they_moved():
    accuracy = jnp.array([[0.0, 0.5, 0.2], [1.0, 0.5, 0.4], [0.5, 0.5, 9.0]])
    seen = jnp.array([[True, True, True], [True, True, True], [True, True, False]])
    variance = historical_variance.historical_variance(accuracy, seen)
    np.testing.assert_allclose(variance, [1 / 6, 0, 0.01], atol=1e-6)
    assert historical_variance.rank(accuracy, seen).tolist() == [0, 2, 1]


def test_routing_replay():
    logits = jnp.array([[1.0, 2, 0, -1], [0, 1, 2, 3]])
    recorded = jnp.array([[0, 2], [0, 1]])
    np.testing.assert_allclose(routing_replay.gates(logits, recorded)[0], [0.731059, 0.268941], atol=1e-6)
    chosen = routing_replay.choose(logits, recorded, jnp.array([True, False]))
    assert chosen.tolist() == [[0, 2], [3, 2]]
    slope = jax.grad(lambda s: routing_replay.gates(s, recorded)[0, 0])(logits)
    np.testing.assert_allclose(slope, [[0.196612, 0, -0.196612, 0], [0] * 4], atol=1e-6)  # p (1 - p)
