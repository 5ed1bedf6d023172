"""Schedules, triggers and selections of the covariance, divergence and off-policy REINFORCE family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import control
from jaxrl_llm.control import acereason_temperature, historical_variance, spear_clip, tool_bonus
from jaxrl_llm.data.rollouts import Rollouts, from_lists


def resets(*scores):
    """ProRL's proposals after each of the scores."""
    controller = control.make("reference_reset")
    state, value = controller.init(), []
    assert not controller.propose(state)["reset"]
    for score in scores:
        state = controller.observe(state, {"score": score})
        value.append(bool(controller.propose(state)["reset"]))
    return value


def test_prorl_resets_on_a_drop_or_a_plateau():
    assert resets(0.2, 0.3, 0.22) == [False, False, True]
    assert resets(0.2, 0.3, 0.31, 0.30, 0.305, 0.308) == [False] * 5 + [True]
    assert resets(0.2, 0.3, 0.26) == [False] * 3 and resets(0.9) == [False]
    assert resets(0.3, 0.3, 0.3, 0.3) == [False] * 3 + [True]


def test_prorl_starts_anew_after_a_reset():
    assert resets(0.9, 0.5, 0.5, 0.5, 0.5, 0.5) == [False, True, False, False, False, True]


def test_t1_anchor_follows():
    controller = control.make("moving_reference")
    anchor = controller.init({"w": jnp.zeros(2)})
    anchor = controller.observe(anchor, {"params": {"w": jnp.array([1.0, 2.0])}})
    np.testing.assert_allclose(controller.propose(anchor)["reference"]["w"], [0.01, 0.02], rtol=1e-5)


def test_spear_rewards_turns_with_calls_less_and_less():
    coef = tool_bonus.tool_coef(jnp.array([0, 50, 100, 200, 300]))
    np.testing.assert_allclose(coef, [1, 0.853553, 0.5, 0, 0], atol=1e-6)
    np.testing.assert_allclose(tool_bonus.tool_reward(jnp.array([7, 13]), coef[1]), [0.597487, 0.853553], rtol=1e-5)
    np.testing.assert_allclose(tool_bonus.tool_reward(np.array([0, 7, 13]), 0.853553), [0, 0.597487, 0.853553], rtol=1e-5)
    controller = control.make("tool_bonus", decay=4)
    state, coefs = controller.init(), []
    for step in range(6):
        coefs.append(float(controller.propose(state)["tool_coef"]))
        state = controller.observe(state, {"step": step})
    np.testing.assert_allclose(coefs, [1, 0.853553, 0.5, 0.146447, 0, 0], atol=1e-6)
    with pytest.raises(ValueError, match="decay=0; give the number of steps"):
        control.make("tool_bonus", decay=0)


def test_spear_keeps_groups_that_differ_and_stores_what_is_better():
    rollouts = from_lists([[1, 0], [1, 1], [1, 0, 0]])
    assert spear_clip.keep_groups(rollouts.rewards, rollouts.valid).tolist() == [True, False, True]
    assert spear_clip.keep_groups(rollouts.rewards, rollouts.valid, share=0.3).tolist() == [True, False, False]
    many = from_lists([[1, 0], [1, 0.5], [1, 0.9], [1, 0.8]])
    assert spear_clip.keep_groups(many.rewards, many.valid).tolist() == [True, True, False, True]
    admitted = spear_clip.admit(jnp.array([[0.5, 0, -0.1, 0.2]]), jnp.array([[True, True, True, False]]))
    assert admitted.tolist() == [[True, False, False, False]]


LOGITS = jnp.array([[3.0, 1, 0], [2, 2, -2], [50, 0, 0]])


def sampled(logits, temperature, key, draws=4000):
    """Rollouts of one prompt, `draws` tokens at each position, with the sampler's log-probs and entropies."""
    logp = jax.nn.log_softmax(logits / temperature)
    tokens = jax.random.categorical(key, logp, shape=(draws, len(logits)))
    mask = jnp.ones((1, draws, len(logits)), bool)
    logprobs = jnp.take_along_axis(jnp.broadcast_to(logp, (draws, *logp.shape)), tokens[..., None], 2)[None, ..., 0]
    return Rollouts(mask=mask, valid=mask.any(-1), behavior_logprobs=logprobs,
                    entropies=jnp.broadcast_to(-(jnp.exp(logp) * logp).sum(-1), mask.shape))


def test_a_newton_step_has_the_slope_of_the_entropy():
    """Against the derivative of the entropy by log T; a step changes the temperature at most by a factor of two."""
    def entropy(log_temperature):
        logp = jax.nn.log_softmax(LOGITS[:2] / jnp.exp(log_temperature))
        return -(jnp.exp(logp) * logp).sum(-1).mean()

    seen, start = sampled(LOGITS[:2], 0.8, jax.random.key(0)), jnp.log(0.8)
    slope, target = jax.grad(entropy)(start), entropy(start) + 0.1
    moved = acereason_temperature.newton_step(0.8, seen.entropies, seen.behavior_logprobs, seen.token_mask, target=target)
    np.testing.assert_allclose(jnp.log(moved / 0.8), 0.1 / slope, rtol=0.05)
    for target, wanted in ((9.0, 1.6), (-9.0, 0.4)):
        moved = acereason_temperature.newton_step(0.8, seen.entropies, seen.behavior_logprobs, seen.mask, target=target)
        np.testing.assert_allclose(moved, wanted, rtol=1e-6)


@pytest.mark.parametrize("logits, target, start, wanted", [
    (LOGITS[:2], 0.5, 1.0, 0.719170), (jnp.array([[4.0, 0, 0, 0]]), 0.3, 1.0, 1.047750)])
def test_newton_steps_end_at_the_temperature_with_the_wanted_entropy(logits, target, start, wanted):
    """The worked examples, with every token as often as it is likely: the entropies and the slopes are exact."""
    temperature = start
    for _ in range(8):
        logp = jax.nn.log_softmax(logits / temperature)
        p, entropy = jnp.exp(logp), -(jnp.exp(logp) * logp).sum(-1, keepdims=True)
        spread = jnp.sqrt((p * (logp + entropy) ** 2).sum(-1, keepdims=True))  # two tokens at this distance have the variance
        logprobs = jnp.concatenate([spread - entropy, -spread - entropy], axis=1)
        entropies = jnp.broadcast_to(entropy, logprobs.shape)
        temperature = acereason_temperature.newton_step(temperature, entropies, logprobs, jnp.ones(logprobs.shape, bool),
                                                        target=target)
    np.testing.assert_allclose(temperature, wanted, rtol=2e-6)


def test_the_temperature_settles_where_the_entropy_is_in_its_band():
    controller = control.make("acereason_temperature")
    observe, state = jax.jit(controller.observe), controller.init(1.0)
    assert float(controller.propose(state)["temperature"]) == 1
    inside = sampled(1.3 * LOGITS[:1], 1.0, jax.random.key(1))
    assert 0.2 < inside.entropies.mean() < 0.4 and observe(state, {"rollouts": inside}) == 1
    nothing = inside.replace(valid=jnp.zeros_like(inside.valid))
    assert observe(controller.init(0.7), {"rollouts": nothing}) == np.float32(0.7)
    for logits in (LOGITS[:2] / 4, 3 * LOGITS[:1]):
        state = controller.init(1.0)
        for number in range(8):
            seen = sampled(logits, state, jax.random.key(number))
            state = observe(state, {"rollouts": seen})
        assert 0.2 <= sampled(logits, state, jax.random.key(9)).entropies.mean() <= 0.4
        assert state != 1


def test_the_example_whose_accuracy_varies_most_is_chosen():
    """Three examples over three steps, by the population variance of numpy; later phases change nothing."""
    controller = control.make("historical_variance")
    state = controller.init(4)
    accuracy = np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.5]])
    for step, row in enumerate(accuracy):
        assert controller.propose(state)["prompt_weights"].tolist() == [1] * 4
        rewards = [[float(row[0] > k) for k in (0.25, 0.75)], [float(row[1] > k) for k in (0.25, 0.75)]]
        state = jax.jit(controller.observe)(state, {"rollouts": from_lists(rewards, prompt_ids=np.array([2, 1]))})
    wanted = [0, accuracy[:, 1].var(), accuracy[:, 0].var(), 0]
    np.testing.assert_allclose(historical_variance.historical_variances(state), wanted, atol=1e-6)
    assert controller.propose(state)["prompt_weights"].tolist() == [1] * 4
    state = controller.begin(state)
    assert controller.propose(state)["prompt_weights"].tolist() == [0, 0, 1, 0]
    for _ in range(3):
        state = controller.observe(state, {"rollouts": from_lists([[0, 1], [1, 1]], prompt_ids=np.array([1, 1]))})
        assert controller.propose(state)["prompt_weights"].tolist() == [0, 0, 1, 0]


def test_groups_of_another_run_are_no_visits():
    """A pool adds groups of other policies to a batch, which are trained on."""
    controller = control.make("historical_variance")
    mixed = from_lists([[0, 1], [1, 1]], prompt_ids=np.array([1, 2])).replace(
        extras={"replayed": np.array([[False, False], [True, True]])})
    state = controller.observe(controller.init(3), {"rollouts": mixed})
    assert state.times.tolist() == [0, 1, 0] and state.mean.tolist() == [0, 0.5, 0]


def test_an_example_twice_in_a_batch_is_visited_once():
    visits = control.make("historical_variance").init(3)
    value = historical_variance.visited(visits, jnp.array([1, 1, 7]), jnp.array([1.0, 0.0, 1.0]), jnp.array([True, True, True]))
    assert value.times.tolist() == [0, 1, 0] and value.mean.tolist() == [0, 0.5, 0] and value.squares.tolist() == [0, 0, 0]


def test_an_anchor_that_is_replaced_every_third_step():
    """The other reading of T1: a copy of the policy that stays for three steps. Half of the way each second step also works."""
    def anchors(**numbers):
        one = control.make("moving_reference", **numbers)
        state, seen = one.init({"w": jnp.zeros(1)}), []
        for step in range(1, 7):
            state = jax.jit(one.observe)(state, {"params": {"w": jnp.full(1, float(step))}})
            seen.append(float(one.propose(state)["reference"]["w"][0]))
        return seen

    assert anchors(decay=0.0, every=3) == [0, 0, 3, 3, 3, 6]
    assert anchors(decay=0.5, every=2) == [0, 1, 1, 2.5, 2.5, 4.25]
    with pytest.raises(ValueError, match="every=0; the reference moves after this number of steps, 1 or more"):
        control.make("moving_reference", every=0)
