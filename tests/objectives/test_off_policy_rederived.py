"""The off-policy objectives against a second derivation: loops over rollouts in numpy, gradients worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts

P, G, T = 3, 4, 6
exp, log = np.exp, np.log


def data():
    rng = np.random.default_rng(7)
    mask = (np.arange(T) < rng.integers(2, T + 1, (P, G, 1))) & (rng.random((P, G, T)) < 0.8)
    mask[0, 1] = False
    valid = np.ones((P, G), bool)
    valid[1, 2] = False
    behavior = -exp(rng.normal(size=(P, G, T)))
    old = behavior + 0.35 * rng.normal(size=(P, G, T))
    new, ref = (old + 0.3 * rng.normal(size=(P, G, T)) for _ in range(2))
    advantages = np.where(rng.random((P, G, 1)) < 0.5, 1, -1) * rng.random((P, G, T))
    return mask & valid[..., None], valid, new, old, behavior, ref, advantages


MASK, VALID, NEW, OLD, BEHAVIOR, REF, ADVANTAGES = data()


def shares(aggregation, mask, max_len=None):
    out = np.zeros(mask.shape)
    live = sum(row.any() for prompt in mask for row in prompt)
    for p in range(P):
        for g in range(G):
            for t in range(T):
                if mask[p, g, t]:
                    out[p, g, t] = {
                        "token_mean": mask.sum(),
                        "seq_mean_token_mean": live * mask[p, g].sum(),
                        "seq_mean_token_sum": live,
                        "prompt_mean": sum(group.any() for group in mask) * mask[p].sum(),
                        "fixed_length": live * (max_len or 0),
                    }[aggregation]
    return np.divide(1, out, where=out > 0, out=np.zeros_like(out))


def ppo(ratio, a, low, high, cap=None):
    """Loss and d loss / d log p of the clipped surrogate, by cases."""
    blocked = np.where(a > 0, ratio > high, ratio < low)
    loss = np.where(blocked, -a * np.where(a > 0, high, low), -a * ratio)
    slope = np.where(blocked, 0, -a * ratio)
    if cap is not None:
        over = (a < 0) & (loss > -a * cap)
        loss, slope = np.where(over, -a * cap, loss), np.where(over, 0, slope)
    return np.array([loss, slope])


def weighted(w, a, new):
    return np.array([-w * a * new, -w * a])


# One rollout's real tokens: new, old, behaviour log-probs and advantages -> (loss, slope) per token.
def gspo(n, o, b, a):
    s, mean = exp(np.sum(n - o) / len(n)), np.full(len(n), np.sum(a) / len(a))
    return ppo(s, mean, 0.9, 1.15)


def gspo_token(n, o, b, a):
    return ppo(exp(np.sum(n - o) / len(n)), a, 0.9, 1.15)


def mars2(n, o, b, a):
    return np.minimum(exp(o - b), 1.2) * gspo(n, o, b, a)


def cispo(n, o, b, a):
    return weighted(np.clip(exp(n - o), 0.5, 1.3), a, n)


def cispo_masked(n, o, b, a):
    rho = exp(n - b)
    keep = [not (x > 1.28 and y > 0 or x < 0.8 and y < 0) for x, y in zip(rho, a)]
    return weighted(np.minimum(rho, 5) * keep, a, n)


def minpro(n, o, b, a):
    rho = exp(n - b)
    return weighted(np.array([rho[t] * min(rho[:t], default=1) for t in range(len(n))]), a, n)


def minpro_clipped(n, o, b, a):
    rho = exp(n - b)
    return ppo(np.array([min(min(rho[:t], default=1), 1.1) for t in range(len(n))]), a, 0.8, 1.28)


def mhpo(n, o, b, a):
    x = n - o
    psi = 1.5 * np.tanh(x / 1.5)
    hazard = log(1 + exp(psi)) ** 1.5 + (log(1 + exp(-psi)) / 0.8) ** 2
    return np.array([-a * exp(psi - hazard), -a * exp(psi - hazard) * (1 - np.tanh(x / 1.5) ** 2)])


def r2vpo(n, o, b, a):
    rho = exp(n - o)
    return np.array([-(rho * a - 0.25 * (rho - 1) ** 2), -rho * (a - 0.5 * (rho - 1))])


def icepop(n, o, b, a):
    k = exp(o - b)
    return np.where((k >= 0.8) & (k <= 1.3), k, 0) * ppo(exp(n - o), a, 0.8, 1.2)


def icepop_direct(n, o, b, a):
    k = exp(n - b)
    return weighted(np.where((k >= 0.7) & (k <= 1.3), k, 0) * (k.min() >= 0.5), a, n)


def hispo(n, o, b, a):
    k = exp(o - b)
    gate = (abs(k - 1) < 0.4) * (abs(np.prod(k) ** (1 / len(k)) - 1) < 0.2)
    return gate * ppo(exp(n - b), a, 0.8, 1.28, cap=1.4)


def areal(n, o, b, a):
    w = np.clip(np.prod(exp(o - b)) ** (1 / len(n)), 0.9, 1.1)
    return w * ppo(exp(n - o), a, 0.8, 1.2, cap=1.3)


def areal_mask(n, o, b, a):
    w = exp(o - b)
    return np.where((w <= 1.2) & (w >= 0.7), w, 0) * ppo(exp(n - o), a, 0.8, 1.2)


def vcpo(n, o, b, a):
    return weighted(min(np.prod(exp(n - b)), 1.5), a, n)


def truncated(n, o, b, a):
    return np.minimum(exp(o - b), 1.2) * ppo(exp(n - o), a, 0.8, 1.2)


def by_product(n, o, b, a):
    w = np.prod(exp(o - b))
    return np.where((w >= 1 / 1.5) & (w <= 1.5), w, 0) * ppo(exp(n - o), a, 0.8, 1.2)


def k3_mean(n, o, b, a):
    k = exp(o - b)
    return np.full((2, 1), np.mean(k - 1 - log(k)) <= 0.05) * truncated(n, o, b, a)


def k3_mean_keeps(n, o, b):
    return np.mean(exp(o - b) - 1 - (o - b)) <= 0.05


CASES = [
    ("gspo", {"clip_low": 0.1, "clip_high": 0.15}, gspo, "seq_mean_token_mean"),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.15}, gspo_token, "seq_mean_token_mean"),
    ("cispo", {"min_ratio": 0.5, "max_ratio": 1.3}, cispo, "prompt_mean"),
    ("cispo", {"anchor": "behavior", "clip_low": 0.2, "clip_high": 0.28}, cispo_masked, "prompt_mean"),
    ("minpro", {}, minpro, "token_mean"),
    ("minpro", {"include_current": False, "embed": "ppo_clip", "cap": 1.1}, minpro_clipped, "token_mean"),
    ("mhpo", {}, mhpo, "seq_mean_token_mean"),
    ("r2vpo", {"multiplier": 0.25}, r2vpo, "token_mean"),
    ("mars2_path_adv", {"clip_low": 0.1, "clip_high": 0.15, "max_ratio": 1.2}, mars2, "seq_mean_token_mean"),
    ("icepop", {"min_ratio": 0.8, "max_ratio": 1.3}, icepop, "seq_mean_token_mean"),
    ("icepop_direct", {"min_ratio": 0.7, "max_ratio": 1.3, "veto": 0.5}, icepop_direct, "prompt_mean"),
    ("hispo", {"token_gate": 0.4, "sequence_gate": 0.2, "dual_clip": 1.4, "max_len": 9}, hispo, "fixed_length"),
    ("areal_decoupled_ppo", {"level": "sequence", "bound": "clip", "min_ratio": 0.9, "max_ratio": 1.1,
                             "dual_clip": 1.3}, areal, "token_mean"),
    ("areal_decoupled_ppo", {"min_ratio": 0.7, "max_ratio": 1.2}, areal_mask, "token_mean"),
    ("vcpo", {"max_ratio": 1.5}, vcpo, "seq_mean_token_mean"),
    ("tis_mis", {"max_ratio": 1.2}, truncated, "token_mean"),
    ("tis_mis", {"level": "sequence", "bound": "mask", "max_ratio": 1.5}, by_product, "token_mean"),
    ("tis_mis", {"reject": "seq_mean_k3", "reject_max": 0.05, "max_ratio": 1.2, "denominator": "original"}, k3_mean,
     "token_mean"),
    ("tis_mis", {"reject": "seq_mean_k3", "reject_max": 0.05, "max_ratio": 1.2, "aggregation": "seq_mean_token_mean"},
     k3_mean, "seq_mean_token_mean"),
]


def differentiate(slug, **hyper):
    """(loss, gradient, metrics, state) in float64, with NaN wherever there is padding."""
    def padded(x):
        return jnp.asarray(np.where(MASK, x, np.nan))
    with jax.enable_x64(True):
        rollouts = Rollouts(mask=jnp.asarray(MASK), valid=jnp.asarray(VALID), old_logprobs=padded(OLD),
                            behavior_logprobs=padded(BEHAVIOR), ref_logprobs=padded(REF))
        objective = objectives.of(slug, **hyper)
        update = jax.jit(jax.value_and_grad(objective.update, has_aux=True))
        (loss, (metrics, state)), gradient = update(padded(NEW), rollouts, padded(ADVANTAGES), objective.init())
        return float(loss), np.asarray(gradient), metrics, state


def by_rollout(token_loss):
    values = np.zeros((2, P, G, T))
    for p, g in zip(*np.nonzero(MASK.any(-1))):
        real = MASK[p, g]
        values[:, p, g, real] = token_loss(*(x[p, g, real] for x in (NEW, OLD, BEHAVIOR, ADVANTAGES)))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("slug, hyper, token_loss, aggregation", CASES, ids=[f"{c[0]}-{c[2].__name__}" for c in CASES])
def test_value_and_gradient(slug, hyper, token_loss, aggregation):
    counted = MASK.copy()
    if hyper.get("denominator", "kept") == "kept" and "reject" in hyper:
        for p, g in zip(*np.nonzero(MASK.any(-1))):
            counted[p, g] &= k3_mean_keeps(*(x[p, g, MASK[p, g]] for x in (NEW, OLD, BEHAVIOR)))
        assert 0 < counted.sum() < MASK.sum()
    share = shares(aggregation, counted, hyper.get("max_len"))
    values, slopes = by_rollout(token_loss)
    loss, gradient, _, _ = differentiate(slug, **hyper)
    assert np.ptp(slopes[MASK]) > 0.1
    np.testing.assert_allclose(loss, np.sum(values * share), rtol=1e-9)
    np.testing.assert_allclose(gradient, slopes * share, atol=1e-12)


@pytest.mark.parametrize("denominator", ["kept", "original"])
def test_kl_term_is_unweighted_and_rejected_tokens_leave_it_with_the_denominator(denominator):
    options = dict(reject="token_k2", reject_max=0.05, denominator=denominator)
    plain, with_kl = (differentiate(f"tis_mis{term}", **options) for term in ("", " + kl(0.2, estimator=k2)"))
    kept = MASK & ((OLD - BEHAVIOR) ** 2 / 2 <= 0.05)
    assert 0 < kept.sum() < MASK.sum()
    counted = kept if denominator == "kept" else MASK
    np.testing.assert_allclose(with_kl[0] - plain[0], 0.2 * np.mean((NEW - REF)[counted] ** 2 / 2), rtol=1e-9)
    slope = np.where(counted, 0.2 * (NEW - REF) / counted.sum(), 0)
    np.testing.assert_allclose(with_kl[1] - plain[1], slope, atol=1e-12)


def test_mars2_adds_the_kl_of_every_token():
    plain, with_kl = (differentiate(f"mars2_path_adv{term}") for term in ("", " + kl(0.3, estimator=k2)"))
    share = 0.3 * shares("seq_mean_token_mean", MASK)
    np.testing.assert_allclose(with_kl[0] - plain[0], np.sum((share * (NEW - REF) ** 2 / 2)[MASK]), rtol=1e-9)
    np.testing.assert_allclose(with_kl[1] - plain[1], share * (NEW - REF), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("order, statistic, target", [
    ("low_first", "value", 1.0), ("high_first", "value", 1.05), ("low_first", "gradient", 1.1),
    ("high_first", "gradient", 1.3)])
def test_bapo_search_step_by_step(order, statistic, target):
    """The search as a loop that raises one bound at a time, as a trainer on one machine would write it."""
    rho, a = exp(NEW - OLD)[MASK], ADVANTAGES[MASK] - 0.02
    low, high = {"low": 0.7, "high": 1.1}, {"low": 0.9, "high": 1.6}
    bound = dict(low)

    def balance():
        if statistic == "value":
            gain, loss = np.minimum(rho, bound["high"]), np.maximum(rho, bound["low"])
        else:
            gain, loss = rho * (rho < bound["high"]), rho * (rho > bound["low"])
        return np.sum((gain * a)[a >= 0]) / (-np.sum((loss * a)[a < 0]) + 1e-8)

    for side in ("low", "high") if order == "low_first" else ("high", "low"):
        while balance() < target and bound[side] < high[side] - 1e-12:
            bound[side] = min(bound[side] + 0.05, high[side])
    values, slopes = ppo(rho, a, bound["low"], bound["high"], cap=3)

    with jax.enable_x64(True):
        rollouts = Rollouts(mask=jnp.asarray(MASK), valid=jnp.asarray(VALID), old_logprobs=jnp.asarray(OLD))
        objective = objectives.make("bapo", low=(0.7, 0.9, 0.05), high=(1.1, 1.6, 0.05), order=order, statistic=statistic,
                                    target=target)
        (loss, (metrics, _)), gradient = jax.value_and_grad(objective.update, has_aux=True)(
            jnp.asarray(NEW), rollouts, jnp.asarray(ADVANTAGES - 0.02), ())
    np.testing.assert_allclose([metrics["bound_low"], metrics["bound_high"]], [bound["low"], bound["high"]], rtol=1e-6)
    np.testing.assert_allclose(loss, values.mean(), rtol=1e-9)
    np.testing.assert_allclose(np.asarray(gradient)[MASK], slopes / len(slopes), atol=1e-12)


def test_r2vpo_multiplier_settles_where_the_bound_holds():
    """V above the bound raises lambda by exactly dual_rate * (V - bound)."""
    variance = np.mean((exp(NEW - OLD)[MASK] - 1) ** 2)
    _, _, metrics, state = differentiate("r2vpo", multiplier=0.3, dual_rate=0.5, variance_bound=0.02)
    np.testing.assert_allclose(metrics["ratio_variance"], variance, rtol=1e-9)
    np.testing.assert_allclose(state, 0.3 + 0.5 * (variance - 0.02), rtol=1e-6)


def test_effective_sample_sizes():
    _, _, metrics, _ = differentiate("vcpo", ess_base=2.0)
    w = np.array([exp(np.sum((NEW - BEHAVIOR)[p, g, MASK[p, g]])) for p, g in zip(*np.nonzero(MASK.any(-1)))])
    share = w.sum() ** 2 / np.sum(w**2) / len(w)
    np.testing.assert_allclose([metrics["ess_share"], metrics["step_scale"]], [share, (share / 2) ** 0.5], rtol=1e-6)
    _, _, metrics, _ = differentiate("tis_mis", max_ratio=1.3)
    w = np.clip(exp(OLD - BEHAVIOR)[MASK], 1 / 1.3, 1.3)
    np.testing.assert_allclose(metrics["ess_share"], 1 / np.mean((w / w.mean()) ** 2), rtol=1e-6)
