"""BPO's loss by hand, its weight against the derivative that it stands for, and TRL's formula on one random batch."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists

with np.errstate(divide="ignore"):  # padded log-probs are log 0 = -inf on purpose
    NEW, SAMPLED = (np.log(pad_lists([rows])) for rows in ([[0.4, 0.9], [0.95, 0.1, 0.6]], [[0.3, 0.1], [0.1, 0.9, 0.5]]))
A = pad_lists([[[1, 1], [-2, -2, -2]]])
ROLLOUTS = from_lists([[1, 0]], lengths=[[2, 3]], behavior_logprobs=SAMPLED)


def run(new=NEW, rollouts=ROLLOUTS, advantages=A, **numbers):
    objective = objectives.make("bpo", **numbers)
    update = jax.value_and_grad(objective.update, has_aux=True)
    (loss, (metrics, _)), slope = update(jnp.asarray(new), rollouts, jnp.asarray(advantages), ())
    return float(loss), metrics, np.asarray(slope)


def test_worked_example():
    """Weights 8/7, 5 (above 1.2: masked); 6.67 (capped at 3), 0.2 (below 0.8: masked), 1.2."""
    loss, metrics, slope = run()
    assert loss == pytest.approx(0.0061738, abs=1e-6)
    np.testing.assert_allclose(slope, [[[-2 / 7, 0, 0], [1, 0, 0.4]]], atol=1e-6)
    wanted = {"masked_fraction": 0.4, "clip_fraction": 0.4, "max/weight": 6.6666667}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(wanted, rel=1e-5)


def test_the_mask_reads_the_weight_before_the_cap():
    """The weight 5 of the second token is masked though its cap 1.1 is inside the range."""
    np.testing.assert_allclose(run(cap=1.1)[2][0, 0], [-1.1 / 4, 0, 0], atol=1e-6)


def test_a_token_that_is_certain_has_a_finite_weight():
    """p = 1: (1.1 - 0.3) / 0.1 = 8, capped at 3; rounding that brings log p above 0 changes nothing."""
    sampled = from_lists([[1]], lengths=[[1]], behavior_logprobs=np.log(np.float32([[[0.3]]])))
    for new in (0.0, 1e-3):
        slope = run(np.float32([[[new]]]), sampled, np.float32([[[-1]]]))[2]
        np.testing.assert_allclose(slope, [[[3]]], rtol=1e-6)


def test_the_weight_is_the_slope_of_the_log_prob_and_the_divergence_of_two_outcomes():
    """d (log p + mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p))) / d log p, by finite differences in float64."""
    def stands_for(log_p, mu):
        p = np.exp(log_p)
        return log_p + mu * np.log(mu / p) + (1 - mu) * np.log((1 - mu) / (1 - p))

    p, mu, step = np.array([0.2, 0.5, 0.75, 0.4]), np.array([0.3, 0.5, 0.5, 0.3]), 1e-6
    differences = (stands_for(np.log(p) + step, mu) - stands_for(np.log(p) - step, mu)) / (2 * step)
    sampled = from_lists([[1]], lengths=[[4]], behavior_logprobs=np.log(mu)[None, None])
    _, _, slope = run(np.log(p)[None, None], sampled, np.full((1, 1, 4), -1.0), smoothing=1e-9, clip_low=0.5)
    np.testing.assert_allclose(4 * slope[0, 0], differences, rtol=1e-5)


def test_the_gradient_is_that_of_the_loss_with_its_weights_held():
    """Differences of -A M min(w, 3) log p over 4 or 6, with the weights of the worked example as numbers."""
    weights, step = np.array([[[8 / 7, 0, 0], [3, 0, 1.2]]]), 1e-6
    share = np.array([[[1 / 4, 1 / 4, 0], [1 / 6, 1 / 6, 1 / 6]]])
    def loss(logs):
        return np.sum(-A * weights * share * np.where(share > 0, logs, 0))
    differences = [(loss(NEW + step * unit) - loss(NEW - step * unit)) / (2 * step) if keep else 0
                   for unit, keep in zip(np.eye(6).reshape(6, 1, 2, 3), share.ravel() > 0)]
    np.testing.assert_allclose(run()[2].ravel(), differences, atol=1e-6)


def test_the_same_numbers_as_trl_s_bpo_trainer():
    """As TRL's `BPOTrainer` with `bpo_smoothing=0.1`, `bpo_weight_cap=3`, `epsilon=0.2`, `epsilon_high=0.28`."""
    random = np.random.default_rng(0)
    P, G, T = 3, 4, 6
    lengths = random.integers(1, T + 1, (P, G))
    mask = np.arange(T) < lengths[..., None]
    per_token_logps, sampling_per_token_logps = np.log(random.uniform(0.05, 0.99, (2, P, G, T)))
    scores = random.normal(size=(P, G))
    loss, slope = 0.0, np.zeros((P, G, T))
    for p, g, t in np.argwhere(mask):
        omega = (1 + 0.1 - np.exp(sampling_per_token_logps[p, g, t])) / (1 + 0.1 - np.exp(per_token_logps[p, g, t]))
        clipped = omega > 1.28 if scores[p, g] > 0 else omega < 0.8
        slope[p, g, t] = 0 if clipped else -scores[p, g] * min(omega, 3.0) / lengths[p, g] / (P * G)
        loss += slope[p, g, t] * per_token_logps[p, g, t]
    with jax.enable_x64(True):
        rollouts = Rollouts(mask=jnp.asarray(mask), valid=jnp.ones((P, G), bool), rewards=jnp.zeros((P, G)),
                            behavior_logprobs=jnp.asarray(sampling_per_token_logps))
        value, _, gradient = run(per_token_logps, rollouts, np.broadcast_to(scores[..., None], (P, G, T)), clip_high=0.28)
    assert value == pytest.approx(loss, rel=1e-9)
    np.testing.assert_allclose(gradient, slope, atol=1e-12)
    assert 0.2 < np.mean(slope[mask] == 0) < 0.8


def test_a_smoothing_of_zero_is_an_error():
    with pytest.raises(ValueError, match="smoothing=0.0; give more than 0"):
        objectives.make("bpo", smoothing=0.0)
    with pytest.raises(ValueError, match="cap=-1; give more than 0"):
        objectives.make("bpo", cap=-1)
