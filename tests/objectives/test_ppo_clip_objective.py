"""The clipped surrogate, all aggregations and KL estimators on one example with literal values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists
from jaxrl_llm.objectives import kl

# One prompt, two rollouts of 3 and 2 tokens; padded log-probs are log 0 = -inf on purpose.
ADVANTAGES = jnp.asarray(pad_lists([[[1, 1, 1], [-1, -1]]]))
with np.errstate(divide="ignore"):
    OLD, NEW, REF = (np.log(pad_lists([rows])) for rows in (
        [[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]], [[0.5, 0.3, 0.8], [0.25, 0.1]]))
ROLLOUTS = from_lists([[1, 0]], lengths=[[3, 2]], old_logprobs=OLD, ref_logprobs=REF)
REAL = np.asarray(ROLLOUTS.mask)


def run(rollouts=ROLLOUTS, new=NEW, advantage=ADVANTAGES, term="", **hyper):
    objective = objectives.of(f"ppo_clip{term}", **{"clip_high": 0.28, "dual_clip": 3.0} | hyper)
    update = jax.value_and_grad(objective.update, has_aux=True)
    (loss, (metrics, _)), gradient = update(jnp.asarray(new), rollouts, advantage, ())
    return float(loss), metrics, np.asarray(gradient)


@pytest.mark.parametrize("aggregation, expected", [
    ("token_mean", -0.116), ("seq_mean_token_sum", -0.29), ("seq_mean_token_mean", 0.095),
    ("prompt_mean", -0.116), ("fixed_length", -0.0966667)])
def test_aggregations(aggregation, expected):
    loss, _, _ = run(aggregation=aggregation, max_len=3)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_metrics_and_gradient():
    _, metrics, gradient = run()
    np.testing.assert_allclose(gradient, [[[0, -0.22, -0.1], [0, 0.3, 0]]], atol=1e-7)
    np.testing.assert_allclose(metrics["clip_fraction"], 0.4, rtol=1e-6)
    np.testing.assert_allclose(metrics["approx_kl"], 0.096011, atol=1e-6)
    np.testing.assert_allclose(metrics["max/ratio"], 1.5, rtol=1e-6)
    assert metrics["clip_fraction_lower"] == 0


def test_dual_clip_caps_negative_advantages_only():
    high = NEW + np.where(REAL, np.log(4.0), 0)
    loss, metrics, gradient = run(new=high, clip_low=0.9)
    # ratios 6, 4.4, 2 | 2, 6: clipped at 1.28 three times, 2, and 6 capped at 3
    np.testing.assert_allclose(loss, (-1.28 * 3 + 2 + 3) / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction_lower"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[[0, 0, 0], [0.4, 0, 0]]], atol=1e-6)


def test_a_kl_weighed_by_the_ratio_is_that_of_the_new_policy():
    """Over the three tokens of a uniform old policy: value and gradient of sum p log(p / q), which plain k3 misses."""
    logits, reference = jnp.array([0.9, -0.4, 0.1]), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    rollouts = from_lists([[0, 0, 0]], lengths=[[1, 1, 1]], old_logprobs=jnp.full((1, 3, 1), -np.log(3)),
                          ref_logprobs=reference.reshape(1, 3, 1))

    def penalty(logits, estimator="k3"):
        objective = objectives.of(f"ppo_clip(clip_high=0.28) + kl(1, estimator={estimator})")
        return objective.update(jax.nn.log_softmax(logits).reshape(1, 3, 1), rollouts, jnp.zeros((1, 3, 1)), ())[0]

    p = np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum()
    gap = np.log(p) - np.log([0.2, 0.5, 0.3])
    value, slope = jax.value_and_grad(penalty)(logits, "unbiased")
    np.testing.assert_allclose(value, (p * gap).sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, p * (gap - (p * gap).sum()), rtol=1e-5)  # d KL / d logits of a softmax
    assert abs(penalty(logits) - value) > 0.01 and np.abs(jax.grad(penalty)(logits) - slope).max() > 0.01


K1 = np.array([0.405465, -0.310155, -0.693147, -0.223144, 0.405465])
K2 = np.array([0.082201, 0.048098, 0.240227, 0.024897, 0.082201])
K3 = np.array([0.072132, 0.053481, 0.306853, 0.026856, 0.072132])
K2_SLOPE = [0.081093, -0.062031, -0.138629, -0.044629, 0.081093]
K3_SLOPE = [0.066667, -0.072727, -0.2, -0.05, 0.066667]


@pytest.mark.parametrize("estimator, values, gradient", [
    ("k1", K1, [0.2] * 5), ("abs", abs(K1), [0.2, -0.2, -0.2, -0.2, 0.2]), ("k2", K2, K2_SLOPE), ("k3", K3, K3_SLOPE),
    ("k1+", K1, K2_SLOPE), ("k3+", K3, K2_SLOPE)])
def test_kl_estimators(estimator, values, gradient):
    new, ref = jnp.asarray(NEW[REAL]), jnp.asarray(REF[REAL])
    np.testing.assert_allclose(kl.token_kl(new, ref, estimator), values, atol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(kl.token_kl(x, ref, estimator)) / 5)(new)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)


def test_kl_as_a_loss_term_adds_its_mean():
    plain, _, _ = run()
    for estimator, mean in (("k1", -0.083103), ("k2", 0.095525), ("k3", 0.106291)):
        loss, metrics, _ = run(term=f" + kl(0.1, estimator={estimator})")
        np.testing.assert_allclose(metrics["kl"], mean, atol=1e-6)
        np.testing.assert_allclose(loss, plain + 0.1 * mean, atol=1e-6)


def test_grpo_from_reward_to_loss():
    with np.errstate(divide="ignore"):
        old, new = (np.log(pad_lists([rows])) for rows in ([[0.5, 0.4], [0.2]], [[0.7, 0.4], [0.1]]))
    rollouts = from_lists([[1, 0]], lengths=[[2, 1]], old_logprobs=old, ref_logprobs=old)
    values, _ = advantages.grpo().update(rollouts, ())
    options = dict(rollouts=rollouts, new=new, advantage=values, clip_high=0.2, dual_clip=None)
    loss, metrics, _ = run(**options, aggregation="seq_mean_token_mean")
    np.testing.assert_allclose(loss, -0.10606587, atol=2e-8)
    np.testing.assert_allclose(metrics["clip_fraction"], 2 / 3, rtol=1e-6)
    loss, _, _ = run(**options, aggregation="seq_mean_token_mean", term=" + kl(0.1)")
    np.testing.assert_allclose(loss, -0.08945428, atol=3e-8)
    centred, _ = advantages.make("dr_grpo").update(rollouts, ())
    loss, _, _ = run(**options | {"advantage": centred}, aggregation="fixed_length", max_len=4)
    np.testing.assert_allclose(loss, -0.0875, rtol=1e-6)


def test_dapo_loss():
    rollouts = from_lists([[1, 0]], old_logprobs=np.zeros((1, 2, 1), np.float32))
    loss, _, _ = run(rollouts=rollouts, new=np.log(np.float32([[[1.5], [0.5]]])),
                     advantage=jnp.array([[[0.70710611], [-0.70710611]]]), dual_clip=10.0)
    np.testing.assert_allclose(loss, -0.16970547, atol=2e-8)


def test_without_old_logprobs_the_gradient_is_reinforce():
    _, metrics, gradient = run(rollouts=ROLLOUTS.replace(old_logprobs=None))
    np.testing.assert_allclose(gradient, np.where(REAL, -np.asarray(ADVANTAGES), 0) / 5, rtol=1e-6)
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] == 0


def test_impossible_settings_are_refused():
    for hyper, message in (
        ({"dual_clip": 0.5}, "larger than 1"),
        ({"aggregation": "token-mean"}, "Did you mean 'token_mean'"),
        ({"aggregation": "fixed_length"}, "generation budget"),
        ({"term": " + kl(0.1, estimator=k4)"}, "Allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            objectives.ppo_clip(**hyper)
    with pytest.raises(ValueError, match="'ref_logprobs'"):
        run(rollouts=ROLLOUTS.replace(ref_logprobs=None), term=" + kl(0.1)")
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 2\)"):
        run(advantage=ADVANTAGES[..., 0])
