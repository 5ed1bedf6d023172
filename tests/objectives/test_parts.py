"""The parts that objectives are composed of, and the frame that reduces them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods, objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists, take
from jaxrl_llm.objectives import aggregation, ratios, trust_region
from jaxrl_llm.objectives.base import token_objective

OLD, NEW = (jnp.log(pad_lists([rows])) for rows in ([[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]]))
ROLLOUTS = from_lists([[1, 0]], lengths=[[3, 2]], old_logprobs=OLD)
MASK = ROLLOUTS.token_mask


def test_ratios():
    np.testing.assert_allclose(ratios.token_ratio(NEW, OLD, MASK), [[[1.5, 1.1, 0.5], [0.5, 1.5, 1]]], rtol=1e-5)
    np.testing.assert_allclose(ratios.sequence_ratio(NEW, OLD, MASK), [[0.937889, 0.866025]], rtol=1e-5)
    product = ratios.sequence_ratio(NEW, OLD, MASK, length_normalised=False)
    np.testing.assert_allclose(product, [[0.825, 0.75]], rtol=1e-5)
    prefix = ratios.prefix_ratio(NEW, OLD, MASK)
    np.testing.assert_allclose(prefix, [[[1.5, 1.65, 0.825], [0.5, 0.75, 0.75]]], rtol=1e-5)


def test_log_ratios_are_clamped_before_exp():
    far = jnp.where(MASK, OLD + 500, 0)
    for ratio in (ratios.token_ratio, ratios.prefix_ratio):
        np.testing.assert_allclose(np.max(ratio(far, OLD, MASK)), np.exp(20), rtol=1e-6)
    np.testing.assert_allclose(ratios.sequence_ratio(far, OLD, MASK, limit=10.0), np.exp(10.0), rtol=1e-6)


@pytest.mark.parametrize("ratio", [ratios.token_ratio, ratios.sequence_ratio, ratios.prefix_ratio])
def test_on_policy_ratio_is_one_with_the_gradient_of_the_logprobs(ratio):
    assert np.all(np.asarray(ratio(NEW, None, MASK)) == 1)
    gradient = np.asarray(jax.grad(lambda x: jnp.sum(ratio(x, None, MASK)))(NEW))
    assert np.all(gradient[np.asarray(MASK)] > 0) and gradient[0, 1, 2] == 0


def test_trust_regions():
    ratio, advantage = jnp.array([1.5, 0.5, 1.5, 0.5]), jnp.array([1.0, 1.0, -1.0, -1.0])
    assert trust_region.still_moving(ratio, advantage, 0.2, 0.28).tolist() == [False, True, True, False]
    assert trust_region.inside(ratio, 0.5, 1.2).tolist() == [False, True, False, True]
    np.testing.assert_allclose(trust_region.detached_weight(ratio, 0.0, 1.28), [1.28, 0.5, 1.28, 0.5], rtol=1e-6)
    assert not np.any(jax.grad(lambda x: trust_region.detached_weight(x, 0.0, 9.0).sum())(ratio))
    loss, clipped = trust_region.clipped_surrogate(ratio, advantage, 0.2, 0.28)
    np.testing.assert_allclose(loss, [-1.28, -0.5, 1.5, 0.8], rtol=1e-6)
    slope = jax.grad(lambda x: trust_region.clipped_surrogate(x, advantage, 0.2, 0.28)[0].sum())(ratio)
    assert np.array_equal(np.asarray(slope) != 0, ~np.asarray(clipped))


@pytest.mark.parametrize("name", aggregation.AGGREGATIONS)
def test_weights_by_counting(name):
    lengths = [[3, 0, 1], [0, 0, 0], [2, 4, 4]]
    rollouts = from_lists([[1, 1, 1]] * 3, lengths=lengths)
    weights = np.asarray(aggregation.token_weights(rollouts, name, max_len=5))
    for p, row in enumerate(lengths):
        for g, length in enumerate(row):
            own_prompt = sum(row)
            expected = {
                "token_mean": 1 / 14,
                "seq_mean_token_mean": 1 / (5 * max(length, 1)),
                "seq_mean_token_sum": 1 / 5,
                "step_mean_token_mean": 1 / (5 * max(length, 1)),  # a rollout without turns is one step
                "prompt_mean": 1 / (2 * max(own_prompt, 1)),
                "fixed_length": 1 / 25,
            }[name]
            np.testing.assert_allclose(weights[p, g], [expected] * length + [0] * (4 - length), rtol=1e-6)


def test_each_step_counts_the_same_whatever_its_length():
    """Steps of 3 and 1 tokens, then steps of 2, 1 and 3 in two rollouts, with a token of a tool amid the first one."""
    one = from_lists([[1, 0]], lengths=[[3, 1]]).replace(step_ids=jnp.zeros((1, 2, 3), jnp.int32))
    weights = aggregation.token_weights(one, "step_mean_token_mean")
    advantages = np.array([[[0.7071068] * 3, [-0.7071068] * 3]])
    np.testing.assert_allclose(-weights * advantages, [[[-.1178511] * 3, [.3535534, 0, 0]]], rtol=1e-6)
    mask = jnp.array([[[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]]], bool)
    two = from_lists([[1, 0]], lengths=[[5, 3]]).replace(mask=mask, step_ids=jnp.array([[[0, 1, 1, 3, 0], [0, 0, 0, 0, 0]]]))
    np.testing.assert_allclose(aggregation.token_weights(two, "step_mean_token_mean"),
                               [[[1 / 4, 0, 1 / 4, 1 / 4, 0], [1 / 12] * 3 + [0, 0]]], rtol=1e-6)


@pytest.mark.parametrize("method", ["dart_tis", "dart_curation"])
def test_the_loss_of_dart_is_a_mean_over_steps(method):
    """The worked example of arXiv 2509.23866's equations, without its choice of steps: steps of 2 and 2 tokens, then of 1."""
    old, behavior, new = (np.log(x) for x in ([[.4, .6], [.4, .1], [.3, 1]], [[.5, .5], [.4, .2], [.25, 1]],
                                              [[.4, .9], [.2, .1], [.3, 1]]))
    advantage, real = np.array([.70711, .70711, -1.41421]), np.array([[1, 1], [1, 1], [1, 0]], bool)
    weight, ratio, kl = np.minimum(np.exp(old - behavior), 1), np.exp(new - old), np.exp(old - new) - (old - new) - 1
    clipped = np.minimum(ratio * advantage[:, None], np.clip(ratio, .8, 1.28) * advantage[:, None])
    expected = np.mean((-weight * clipped + .1 * kl).mean(1, where=real))

    def rows(x):
        return jnp.array([[[*x[0], *x[1]], [*x[2], 0, 0]]], jnp.float32)

    rollouts = from_lists([[1, 0]], lengths=[[4, 1]]).replace(
        old_logprobs=rows(old), behavior_logprobs=rows(behavior), ref_logprobs=rows(old),
        step_ids=jnp.array([[[0, 0, 1, 1], [0] * 4]]))
    loss, _ = methods.build(method)[1].update(rows(new), rollouts, rows(np.repeat(advantage, 2).reshape(3, 2)), ())
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_terms_with_their_own_denominator_and_a_state():
    def loss(logprobs, rollouts, advantages, step):
        metrics = {"reward": rollouts.rewards, "max/surprise": -logprobs}
        return {"loss": -advantages * logprobs, "best": -logprobs * step}, metrics

    def best(rollouts):
        chosen = rollouts.token_mask & (rollouts.rewards == 1)[..., None]
        return {"best": chosen / jnp.maximum(jnp.sum(chosen), 1)}

    objective = token_objective(loss, extra_weights=best, init=lambda: jnp.int32(2), advance=lambda step: step + 1)
    rollouts = from_lists([[1, 0], [1, 1]], lengths=[[2, 1], [1, 0]])
    logprobs = -jnp.arange(1.0, 9.0).reshape(2, 2, 2)
    value, (metrics, state) = objective.update(logprobs, rollouts, jnp.ones((2, 2, 2)), objective.init())
    # counting tokens 1, 2 | 3 and 5 | none; the best ones 1, 2 and 5
    np.testing.assert_allclose(value, (1 + 2 + 3 + 5) / 4 + 2 * (1 + 2 + 5) / 3, rtol=1e-6)
    np.testing.assert_allclose([metrics["reward"], metrics["max/surprise"]], [2 / 3, 5], rtol=1e-6)
    assert state == 3

    whole = rollouts.replace(loss_weights=objective.weights(rollouts))
    ones, two = jnp.ones((1, 2, 2)), jnp.int32(2)
    parts = [objective.update(logprobs[i : i + 1], take(whole, i, 1), ones, two)[0] for i in (0, 1)]
    np.testing.assert_allclose(sum(parts), value, rtol=1e-6)


def test_local_denominators_would_not_add_up():
    """The error that the weights prevent: a micro-batch that divides by its own token count."""
    rollouts = from_lists([[1, 0], [1, 0]], lengths=[[3, 3], [1, 1]])
    logprobs, advantages = -jnp.ones((2, 2, 3)), jnp.ones((2, 2, 3)) * jnp.array([1.0, 3.0])[:, None, None]
    objective = objectives.make("reinforce")
    whole, _ = objective.update(logprobs, rollouts, advantages, ())
    parts = [(logprobs[i : i + 1], take(rollouts, i, 1), advantages[i : i + 1]) for i in (0, 1)]
    local = [float(objective.update(*part, ())[0]) for part in parts]
    np.testing.assert_allclose(whole, (6 * 1 + 2 * 3) / 8)
    assert abs(sum(local) / 2 - float(whole)) > 0.4
