"""SAPO, GMPO and LUSPO: literal values of a small example, the formulas of peers in numpy, and finite differences of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists

# One prompt, rollouts of 3 and 2 tokens with ratios 1.5, 1.1, 0.5 and 0.5, 1.5, rewarded with 1 and -1.
with np.errstate(divide="ignore"):  # log 0 = -inf in the padding
    OLD, NEW = (np.log(pad_lists([rows])) for rows in ([[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]]))
ROLLOUTS = from_lists([[1, 0]], lengths=[[3, 2]], old_logprobs=OLD)
A = [[1, 1, 1], [-1, -1]]
P, G, T = 3, 4, 6


def differentiate(objective, new, rollouts, advantages):
    (loss, (metrics, _)), gradient = jax.value_and_grad(objective.update, has_aux=True)(
        jnp.asarray(new), rollouts, jnp.asarray(advantages), objective.init())
    return float(loss), np.asarray(gradient), metrics


def expect(text, loss, gradient, metrics, advantage=A):
    value, slope, facts = differentiate(objectives.of(text), NEW, ROLLOUTS, pad_lists([advantage]))
    np.testing.assert_allclose(value, loss, atol=2e-6)
    np.testing.assert_allclose([*slope[0, 0], *slope[0, 1]], [*gradient, 0], atol=1e-6)
    for name, expected in metrics.items():
        np.testing.assert_allclose(facts[name], expected, rtol=1e-6, err_msg=name)


def random_batch():
    """Lengths of 1 to 6 tokens, ratios around 1 as after some updates, one advantage of either sign per rollout."""
    random = np.random.default_rng(3)
    mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
    old = -random.gamma(1.0, size=(P, G, T))
    return mask, old, old + 0.4 * random.normal(size=old.shape), np.repeat(random.normal(size=(P, G, 1)), T, -1)


def central_differences(loss, new, step=1e-5):
    gradient = np.zeros_like(new)
    for place in np.ndindex(new.shape):
        moved = np.zeros_like(new)
        moved[place] = step
        gradient[place] = (loss(new + moved) - loss(new - moved)) / (2 * step)
    return gradient


def of_rows(per_token, mask):
    """The mean over rows of their mean over tokens: verl's `seq-mean-token-mean`, TRL's reduction of `grpo` and `sapo`."""
    return np.mean([np.mean(row[real]) for row, real in zip(per_token.reshape(-1, T), mask.reshape(-1, T))])


def verl_sapo(new, old, advantages, mask, tau_pos=1.0, tau_neg=1.05):
    """As verl's `loss_mode="sapo"` and TRL's `loss_type="sapo"`, whose temperatures have the same defaults."""
    tau = np.where(advantages > 0, tau_pos, tau_neg)
    gates = 4 / tau / (1 + np.exp(-tau * (np.exp(new - old) - 1)))
    return of_rows(-gates * advantages, mask)


def verl_geo_mean(new, old, advantages, mask, cliprange_low=0.4, cliprange_high=0.4):
    """As verl's `loss_mode="geo_mean"`, which clamps sgn(A) times the log-ratio from above; TRL's `GMPOTrainer` is the same."""
    sign, negative_approx_kl = np.sign(advantages), new - old
    clamped = np.clip(negative_approx_kl, -cliprange_low, cliprange_high)
    smaller = sign * np.minimum(sign * negative_approx_kl, sign * clamped)
    ratio = [np.exp(np.mean(row[real])) for row, real in zip(smaller.reshape(-1, T), mask.reshape(-1, T))]
    return np.mean(-advantages[..., 0].reshape(-1) * ratio)


def trl_luspo(new, old, advantages, mask, epsilon=0.002, epsilon_high=0.0025):
    """As TRL's `loss_type="luspo"` with `importance_sampling_level="sequence"`: GSPO's loss of a row times its length."""
    losses = []
    for log_ratio, advantage, real in zip(*(x.reshape(-1, T) for x in (new - old, advantages, mask))):
        coef_1 = np.exp(np.mean(log_ratio[real]))
        coef_2 = np.clip(coef_1, 1 - epsilon, 1 + epsilon_high)
        losses.append(-min(coef_1 * advantage[0], coef_2 * advantage[0]) * real.sum())
    return np.mean(losses)


LUSPO = methods.get("luspo").objective
PEERS = [("sapo", verl_sapo, {}), ("sapo(tau_pos=0.5, tau_neg=3)", verl_sapo, {"tau_pos": 0.5, "tau_neg": 3.0}),
         ("gmpo", verl_geo_mean, {}),
         ("gmpo(clip_low=0.1, clip_high=0.2)", verl_geo_mean, {"cliprange_low": 0.1, "cliprange_high": 0.2}),
         (LUSPO, trl_luspo, {}),
         ("gspo_token(0.3, 0.1, aggregation=seq_mean_token_sum)", trl_luspo, {"epsilon": 0.3, "epsilon_high": 0.1})]


@pytest.mark.parametrize("text, peer, numbers", PEERS, ids=[text for text, *_ in PEERS])
def test_values_of_peers_and_gradients_by_finite_differences(text, peer, numbers):
    mask, old, new, advantages = random_batch()
    with jax.enable_x64(True):
        rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.ones((P, G), bool), old_logprobs=jnp.asarray(old))
        loss, gradient, _ = differentiate(objectives.of(text), new, rollouts, advantages)
    np.testing.assert_allclose(loss, peer(new, old, advantages, mask, **numbers), rtol=1e-10)
    slope = central_differences(lambda new: peer(new, old, advantages, mask, **numbers), new)
    assert np.abs(slope).max() > 0.05 and np.abs(slope[~mask]).max() == 0
    np.testing.assert_allclose(gradient, slope, atol=1e-8)


def test_sapo():
    expect("sapo", -0.064271839, [-0.235003712, -0.182875763, -0.078334571, 0.116767478, 0.350302434],
           {"weight": 0.949162701, "max/ratio": 1.5, "approx_kl": 0.096010793})


def test_the_sign_of_each_advantage_chooses_sapos_temperature():
    """Ratios 1.5, 1.1, 0.5 and 0.5, 1.5; l = -A (4 / tau) sigmoid(tau (rho - 1)), tau = 1, 2, 1 and 2, 2."""
    expect("sapo(tau_neg=2)", -0.117859378, [-0.235003712, 0.181512155, -0.078334571, 0.0, 0.294917899],
           {"weight": 0.888598291}, advantage=[[1, -1, 1], [0, -1]])


def test_on_policy_sapo_is_the_policy_gradient_around_another_value():
    """The gate is 1/2, so the loss is -2 A / tau and the gradient that of -A log p, here over 5 tokens."""
    value, slope, metrics = differentiate(
        objectives.of("sapo(aggregation=token_mean)"), OLD, ROLLOUTS, pad_lists([A]))
    np.testing.assert_allclose(value, (-3 * 2 + 2 * 2 / 1.05) / 5, rtol=1e-6)
    np.testing.assert_allclose(slope[0], [[-0.2] * 3, [0.2, 0.2, 0]], rtol=1e-6)
    assert float(metrics["weight"]) == 1


def test_sapo_lets_no_token_lose_its_gradient_at_a_bound_and_distant_tokens_have_little():
    far = np.log(np.array([[[0.05, 0.5, 1.5, 4.0, 20.0, 3e8]]]))
    rollouts = from_lists([[1]], lengths=[[6]], old_logprobs=np.zeros((1, 1, 6)))
    _, slope, _ = differentiate(objectives.of("sapo"), far, rollouts, np.ones((1, 1, 6)))
    relative = -6 * slope[0, 0] / np.exp(far[0, 0])
    np.testing.assert_allclose(relative, [0.804432312, 0.940014849, 0.940014849, 0.180706639, 0, 0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("text, said", [("sapo(tau_pos=0)", "tau_pos=0; give more than 0"),
                                        ("sapo(tau_neg=-1.05)", "tau_neg=-1.05; give more than 0"),
                                        ("sapo(tau_pos=inf)", "tau_pos=inf; give more than 0, finite")])
def test_temperatures_are_positive(text, said):
    with pytest.raises(ValueError, match=said):
        objectives.of(text)


def test_gmpo():
    """Log-ratios of the first rollout: min(log 1.5, 0.4), log 1.1, log 0.5; of the second: max(log 0.5, -0.4), log 1.5."""
    expect("gmpo", 0.033277281, [0, -0.156030288, -0.156030288, 0, 0.250684073],
           {"clip_fraction": 0.4, "max/ratio": 1.5, "approx_kl": 0.096010793})


def test_wide_bounds_of_gmpo_keep_every_token():
    """The loss is that of GSPO without a clip: (-0.825^(1/3) + 0.75^(1/2)) / 2."""
    expect("gmpo(clip_low=1, clip_high=1)", -0.035931662, [-0.156314788] * 3 + [0.216506351] * 2, {"clip_fraction": 0})


def test_gmpo_clips_on_the_side_of_the_advantage_only():
    """With the signs exchanged the first rollout loses its 0.5 and the second its 1.5; the sign of A chooses the bound."""
    expect("gmpo", 0.085250082, [0.172360389, 0.172360389, 0, -0.215915543, 0], {"clip_fraction": 0.4},
           advantage=[[-1, -1, -1], [1, 1]])


def test_one_outlier_moves_gmpos_mean_less_than_the_arithmetic_one():
    """A ratio of 0.01 among three of 1, with A = 1: 0.01^(1/4) = 0.316227766 against 0.7525 of PPO, whose clip is above."""
    rollouts = from_lists([[1]], lengths=[[4]], old_logprobs=np.zeros((1, 1, 4)))
    new = np.log(np.array([[[0.01, 1, 1, 1]]]))
    value, slope, _ = differentiate(objectives.of("gmpo"), new, rollouts, np.ones((1, 1, 4)))
    np.testing.assert_allclose([value, *slope[0, 0]], [-0.316227766] + [-0.0790569415] * 4, rtol=1e-6)


def test_luspo():
    """s = 0.825^(1/3) with A = 1 and 0.75^(1/2) with A = -1, which is clipped to 0.998; each times its length."""
    expect(LUSPO, -0.408833090, [-0.468944364] * 3 + [0, 0], {"clip_fraction": 0.4, "max/ratio": 0.937888728})


def test_a_token_of_luspo_has_the_gradient_of_any_length_on_policy():
    """GSPO divides the gradient of a token by the length of its completion, LUSPO does not."""
    arguments = OLD, ROLLOUTS, pad_lists([A])
    _, slope, _ = differentiate(objectives.of(LUSPO), *arguments)
    np.testing.assert_allclose(slope[0], [[-0.5] * 3, [0.5, 0.5, 0]], rtol=1e-6)
    _, slope, _ = differentiate(objectives.of("gspo"), *arguments)
    np.testing.assert_allclose(slope[0], [[-1 / 6] * 3, [0.25, 0.25, 0]], rtol=1e-6)
