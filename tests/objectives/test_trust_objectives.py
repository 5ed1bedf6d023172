"""Objectives that weigh or leave out tokens by how far the policy is from the one that sampled: values and gradients."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods, objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists

# One prompt, two rollouts of 3 and 2 tokens; padded log-probs are log 0 = -inf on purpose.
with np.errstate(divide="ignore"):
    NEW, SAMPLER = (np.log(pad_lists([rows])) for rows in (
        [[0.75, 0.22, 0.4], [0.2, 0.15]], [[0.5, 0.25, 0.32], [0.32, 0.25]]))
ROLLOUTS = from_lists([[1, 0]], lengths=[[3, 2]], behavior_logprobs=SAMPLER)
A = [[1, 1, 1], [-1, -1]]


def run(slug, advantage=A, **hyper):
    objective = objectives.of(slug, **hyper)
    arguments = jnp.asarray(NEW), ROLLOUTS, jnp.asarray(pad_lists([advantage])), objective.init()
    (loss, (metrics, _)), gradient = jax.value_and_grad(objective.update, has_aux=True)(*arguments)
    gradient = np.asarray(gradient)[0]
    assert gradient[1, 2] == 0
    return float(loss), [*gradient[0], *gradient[1, :2]], metrics


def expect(slug, loss, gradient, metrics=None, **options):
    value, slope, facts = run(slug, **options)
    np.testing.assert_allclose(value, loss, atol=2e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)
    for name, expected in (metrics or {}).items():
        np.testing.assert_allclose(facts[name], expected, atol=1e-6, err_msg=name)


# Ratios 1.5, .88, 1.25 | .625, .6; |q - p| = .25, .03, .08 | .12, .1.
TV = [
    ({}, (-0.88 - 1.25 + 0.625 + 0.6) / 2, [0, -0.44, -0.625, 0.3125, 0.3]),
    ({"delta_low": 0.11}, (-0.88 - 1.25 + 0.6) / 2, [0, -0.44, -0.625, 0, 0.3]),
    ({"delta_high": 0.3}, (-1.5 - 0.88 - 1.25 + 0.625 + 0.6) / 2, [-0.75, -0.44, -0.625, 0.3125, 0.3]),
    ({"max_ratio": 1.0}, (-0.88 - 1 + 0.625 + 0.6) / 2, [0, -0.44, -0.5, 0.3125, 0.3]),
    ({"aggregation": "token_mean"}, (-0.88 - 1.25 + 0.625 + 0.6) / 5, [0, -0.176, -0.25, 0.125, 0.12]),
]


@pytest.mark.parametrize("hyper, loss, gradient", TV, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_dppo_by_total_variation(hyper, loss, gradient):
    metrics = {} if hyper.get("delta_low") or hyper.get("delta_high") else {"clip_fraction": 0.2, "divergence": 0.58 / 5}
    expect("dppo", loss, gradient, metrics | {"max/ratio": 1.5}, **hyper)


def test_dppo_by_kl():
    """KL: (log 2 - log 1.5) / 2 = .143841, .002543, .013705 | .32 log 1.6 + .68 log .85 = .039888, .033834."""
    hyper = methods.get("dppo_kl").part("objective").numbers
    divergence = (0.143841 + 0.002543 + 0.013705 + 0.039888 + 0.033834) / 5
    expect("dppo", -0.4525, [0, -0.44, -0.625, 0.3125, 0.3], {"clip_fraction": 0.2, "divergence": divergence}, **hyper)
    expect("dppo", (-0.88 - 1.25 + 0.6) / 2, [0, -0.44, -0.625, 0, 0.3], **hyper | {"delta_low": 0.035})


def test_dppo_with_a_pull_towards_the_sampler():
    """.5 (log 1.5)^2 = .0822010 and so on beside the values above: masked tokens are pulled too."""
    change = np.array([0.405465, -0.127833, 0.223144, -0.470004, -0.510826])
    expect("dppo + kl(1, estimator=k2, against=behavior)", -0.4525 + 0.5 * np.sum(change**2) / 2,
           np.array([0, -0.44, -0.625, 0.3125, 0.3]) + 0.5 * change,
           {"clip_fraction": 0.2, "kl_behavior": np.mean(change**2) / 2})


def test_dppo_lets_every_token_come_back():
    """With advantages against the move of each token nothing is masked, however far it is."""
    back = [[-1, 1, -1], [1, 1]]
    expect("dppo", (1.5 - 0.88 + 1.25 - 0.625 - 0.6) / 2, [0.75, -0.44, 0.625, -0.3125, -0.3], {"clip_fraction": 0},
           advantage=back, delta_low=0.0, delta_high=0.0)


@pytest.mark.parametrize("text, said", [
    ("dppo(divergence=js)", "Unknown divergence 'js'. Allowed: kl, tv"),
    ("dppo(delta_low=-0.1)", "delta_low=-0.1; give 0 or more"), ("dppo(max_ratio=0)", "max_ratio=0; give more than 0"),
    ("vespo(lambda_neg=-1)", "lambda_neg=-1; give 0 or more"),
    ("klpo(beta=0)", "beta=0; give more than 0"), ("klpo(route=tokens)", "Did you mean 'token'")])
def test_wrong_numbers_and_names_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        objectives.of(text)


def random(seed=0, shape=(3, 4, 6)):
    """New and sampler's log-probs, advantages of whole rollouts and a mask."""
    rng = np.random.default_rng(seed)
    sampler = -rng.gamma(1.0, size=shape)
    new = np.minimum(sampler + 0.4 * rng.normal(size=shape), -1e-3)
    advantages = np.repeat(rng.normal(size=(*shape[:2], 1)), shape[2], -1)
    lengths = rng.integers(1, shape[2] + 1, shape[:2])
    lengths[0, 0] = shape[2]
    return new, sampler, advantages, np.arange(shape[2]) < lengths[..., None]


def ours(slug, data, **hyper):
    """`(loss, gradient)` in float64."""
    new, sampler, advantages, mask = data
    with jax.enable_x64(True):
        objective = objectives.of(slug, **hyper)
        rollouts = from_lists(np.zeros(mask.shape[:2]), lengths=mask.sum(-1), behavior_logprobs=sampler)
        loss, slope = jax.value_and_grad(
            lambda x: objective.update(x, rollouts, jnp.asarray(advantages), ())[0])(jnp.asarray(new))
        return float(loss), np.asarray(slope)


def central(function, at, mask, step=1e-6):
    """The gradient of a function of log-probs, by central differences at the tokens of the mask."""
    slope = np.zeros_like(at)
    for place in zip(*np.nonzero(mask), strict=True):
        shift = np.zeros_like(at)
        shift[place] = step
        slope[place] = (function(at + shift) - function(at - shift)) / (2 * step)
    return slope


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_is_differentiated_as_it_is_written(divergence):
    data = random(seed=1, shape=(1, 2, 4))
    hyper = {"divergence": divergence, "delta_low": 0.05, "delta_high": 0.05}
    slope = central(lambda new: ours("dppo", (new, *data[1:]), **hyper)[0], data[0], data[3])
    np.testing.assert_allclose(ours("dppo", data, **hyper)[1], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss_mode, delta", [("dppo_tv", 0.1), ("dppo_kl", 0.02)])
def test_dppo_has_the_gradient_of_verl(loss_mode, delta):
    """As verl's `loss_mode`: `-A * truncated_ratio * log_prob * valid_mask`, of which `log_prob` alone is differentiated."""
    new, sampler, advantages, mask = data = random()
    prob, old_prob = np.exp(new), np.exp(sampler)
    if loss_mode == "dppo_tv":
        valid = np.where(advantages > 0, prob - old_prob <= delta, prob - old_prob >= -delta)
    else:
        binary_kl = old_prob * (sampler - new) + (1 - old_prob) * np.log((1 - old_prob + 1e-8) / (1 - prob + 1e-8))
        valid = (binary_kl <= delta) | np.where(advantages > 0, prob <= old_prob, prob >= old_prob)
    gradient = -advantages * np.minimum(prob / old_prob, 1.5) * valid * mask / mask.sum()
    assert 0.1 < np.mean(valid[mask]) < 0.9 and np.any(prob / old_prob > 1.5)
    loss, slope = ours("dppo", data, divergence=loss_mode[-2:], delta_low=delta, delta_high=delta, max_ratio=1.5,
                       aggregation="token_mean")
    np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(loss, gradient.sum(), rtol=1e-5)  # which is the surrogate of the paper's equation 12


def test_dppo_anchored_is_the_default_loss_of_prime_rl():
    """As `default_loss_fn`: `-keep_mask * advantages * importance_ratio + kl_tau * log_importance_ratio**2` over all tokens."""
    trainer, inference, advantages, mask = data = random(seed=8)
    log_importance_ratio, probs_diff = trainer - inference, np.exp(trainer) - np.exp(inference)
    keep_mask = ~np.where(advantages > 0, probs_diff > 0.2, probs_diff < -0.2)
    assert 0 < np.mean(~keep_mask[mask]) < 0.5
    pg_loss = keep_mask * advantages * np.exp(log_importance_ratio)
    loss, slope = ours(methods.get("dppo_anchored").objective, data)
    np.testing.assert_allclose(loss, np.mean((-pg_loss + 0.001 * log_importance_ratio**2)[mask]), rtol=1e-5)
    gradient = np.where(mask, -pg_loss + 0.002 * log_importance_ratio, 0) / mask.sum()
    np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-9)


def test_vespo():
    """W = 1.65 and .375: 1.65^2 exp(-1.95) = .387341160 and .375^3 exp(1.25) = .184061054."""
    good, bad = 0.387341160, 0.184061054
    slope = [-good / 2] * 3 + [bad / 2] * 2
    expect("vespo", 0.2037057354, slope, {"weight": (good + bad) / 2, "max/ratio": 1.65})
    expect("vespo", 0.2037057354 * 2 / 5, [x * 2 / 5 for x in slope], aggregation="token_mean")


def test_vespo_takes_the_numbers_of_the_sign():
    """1.65^3 exp(-1.3) = 1.224246881 where A < 0, .375^2 exp(1.875) = .916990189 where A >= 0; plain weights are 1.65, .375."""
    _, slope, _ = run("vespo", advantage=[[-1] * 3, [1] * 2])
    np.testing.assert_allclose(slope, [1.224246881 / 2] * 3 + [-0.916990189 / 2] * 2, rtol=2e-6)
    _, slope, _ = run("vespo", k_pos=1.0, lambda_pos=0.0, k_neg=1.0, lambda_neg=0.0)
    np.testing.assert_allclose(slope, [-1.65 / 2] * 3 + [0.375 / 2] * 2, rtol=2e-6)


def test_vespo_has_the_gradient_of_its_surrogate():
    """f(W) A with f' = phi / W: exp(3) (1 - (1 + 3 W) exp(-3 W)) / 9, and exp(2) (2 - (4 W^2 + 4 W + 2) exp(-2 W)) / 8."""
    new, sampler, advantages, mask = data = random(seed=2, shape=(2, 2, 3))

    def surrogate(logprobs):
        ratio, advantage = np.exp(((logprobs - sampler) * mask).sum(-1)), advantages[..., 0]
        good = np.exp(3) * (1 - (1 + 3 * ratio) * np.exp(-3 * ratio)) / 9
        bad = np.exp(2) * (2 - (4 * ratio**2 + 4 * ratio + 2) * np.exp(-2 * ratio)) / 8
        return -np.mean(np.where(advantage >= 0, good, bad) * advantage)

    np.testing.assert_allclose(ours("vespo", data)[1], central(surrogate, new, mask), rtol=1e-6, atol=1e-9)


def test_vespo_is_that_of_trl():
    """As TRL's `loss_type="vespo"`: `-phi_seq * advantages * per_token_logps`, over all tokens of the batch."""
    new, sampler, advantages, mask = data = random(seed=3)
    log_w_seq = ((new - sampler) * mask).sum(-1, keepdims=True)
    k_seq, lambda_seq = np.where(advantages >= 0, 2.0, 3.0), np.where(advantages >= 0, 3.0, 2.0)
    phi_seq = np.exp(lambda_seq + k_seq * log_w_seq - lambda_seq * np.exp(log_w_seq))
    gradient = -phi_seq * advantages * mask / mask.sum()
    loss, slope = ours("vespo", data, aggregation="token_mean")
    np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(loss, np.sum(gradient * new), rtol=1e-5)


def test_vespo_of_very_stale_rollouts_is_finite():
    new, sampler, advantages, mask = random(seed=4)
    for shift in (-50.0, 50.0):
        loss, slope = ours("vespo", (new, sampler + shift, advantages, mask))
        assert np.isfinite(loss) and np.max(np.abs(slope)) < 1e-12


# log(p / q) = .405465, -.127833, .223144 | -.470004, -.510826; (1 - q) / (1 - p) = 2, .961538, 1.133333 | .85, .882353;
# the binary KLs are those of DPPO: .160089 | .073722 in all.
def test_klpo_by_token():
    """h = 1 - .0405465, 1 + .0127833, 1 - .0223144 | -1 + .0470004, -1 + .0510826; the gradient is -h w / 2."""
    expect("klpo", 0.0748415335, [-0.9594535, -0.4869151, -0.5540219, 0.4050248, 0.41864],
           {"residual": 0.9703679, "correction": 1.1654449, "sequence_kl": (0.1600888 + 0.0737223) / 2,
            "log_ratio": (0.5007753 - 0.9808293) / 2})


def test_klpo_by_completion():
    """h = 1 - .1 (.5007753 + .1600888) = .9339136 | -1 + .1 (.9808293 - .0737223) = -.9092893."""
    expect("klpo", 0.0504191081, [-0.9339136, -0.4489969, -0.5292177, 0.386448, 0.401157],
           {"residual": (3 * 0.9339136 + 2 * 0.9092893) / 5}, route="sequence")


def test_klpo_learns_from_equal_rewards():
    """There is no baseline: a reward of 1 raises a token and a reward of 0 moves it back to the sampler."""
    _, slope, _ = run("klpo", advantage=[[0] * 3, [1] * 2])
    np.testing.assert_allclose(slope[:3], [0.0405465, -0.0127833 * 0.961538 / 2, 0.0223144 * 1.133333 / 2], atol=1e-6)
    np.testing.assert_allclose(slope[3:], [-1.0470004 * 0.85 / 2, -1.0510826 * 0.882353 / 2], atol=1e-6)


def binary_kl(new, sampler):
    p, q = np.exp(new), np.exp(sampler)
    return q * (sampler - new) + (1 - q) * np.log((1 - q) / (1 - p))


def test_klpo_by_completion_has_the_gradient_of_its_squares():
    new, sampler, advantages, mask = data = random(seed=5, shape=(2, 2, 4))

    def squares(logprobs):
        fitted = ((logprobs - sampler + binary_kl(logprobs, sampler)) * mask).sum(-1)
        return np.mean((advantages[..., 0] - 0.3 * fitted) ** 2) / 0.6

    np.testing.assert_allclose(ours("klpo", data, beta=0.3, route="sequence")[1], central(squares, new, mask), rtol=1e-6,
                               atol=1e-8)


def test_klpo_by_token_has_the_gradient_of_the_centred_score():
    new, sampler, advantages, mask = data = random(seed=6, shape=(2, 2, 4))
    held = (advantages - 0.3 * (new - sampler)) * mask

    def surrogate(logprobs):
        return -np.mean((held * (logprobs + binary_kl(logprobs, sampler))).sum(-1))

    np.testing.assert_allclose(ours("klpo", data, beta=0.3)[1], central(surrogate, new, mask), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("route", ["token", "sequence"])
def test_klpo_is_that_of_the_authors(route):
    """As `klpo_token_loss(kl_estimator="binary")` and `klpo_sequence_loss`, with their names, in another order of terms."""
    new, sampler, advantages, mask = data = random(seed=7)
    returns, ell = advantages[..., :1], (new - sampler) * mask
    correction = (1 - np.exp(sampler)) / (1 - np.exp(new))
    centered_ratio = (ell + binary_kl(new, sampler)) * mask
    feedback = returns - 0.1 * (ell if route == "token" else centered_ratio.sum(-1, keepdims=True))
    gradient = -feedback * correction * mask / mask[..., 0].size
    loss, slope = ours("klpo", data, route=route)
    np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(loss, np.sum(gradient * new), rtol=1e-5)


@pytest.mark.parametrize("route", ["token", "sequence"])
def test_klpo_of_tokens_that_became_certain_is_finite(route):
    """`(1 - q) / (1 - p)` has a bound where float32 has none left of `1 - p`; a token that stays certain has the factor 1."""
    for before, factor in ((np.log(0.5), 0.5 / 1e-6), (0.0, 1.0)):
        rollouts = from_lists([[1]], lengths=[[1]], behavior_logprobs=np.full((1, 1, 1), before, np.float32))
        objective = objectives.make("klpo", route=route)
        slope = jax.grad(lambda x: objective.update(x, rollouts, jnp.ones((1, 1, 1)), ())[0])(jnp.zeros((1, 1, 1)))
        shift = 0.0 if before == 0 else 0.1 * (np.log(2) if route == "token" else 0.5 * (np.log(2) + np.log(5e5)))
        np.testing.assert_allclose(slope, [[[-(1 - shift) * factor]]], rtol=1e-5)
