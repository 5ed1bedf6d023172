"""Objectives of the covariance, divergence and off-policy REINFORCE family: literal examples, derivation in numpy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, control, methods, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.objectives.spear_clip import imitation_coef

# One prompt, two rollouts of 3 and 2 tokens; padded log-probs are log 0 = -inf on purpose.
SIGNS = pad_lists([[[1, 1, 1], [-1, -1]]])
with np.errstate(divide="ignore"):
    OLD, NEW, REF, SAMPLER = (np.log(pad_lists([rows])) for rows in (
        [[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]], [[0.5, 0.3, 0.8], [0.25, 0.1]],
        [[0.5, 0.25, 0.32], [0.32, 0.25]]))
ENTROPIES = pad_lists([[[0.9, 1.4, 0.3], [0.6, 1.8]]])
REAL = np.isfinite(OLD)


def example(rewards=(1, 0), **fields):
    given = dict(old_logprobs=OLD, ref_logprobs=REF, behavior_logprobs=SAMPLER, entropies=ENTROPIES)
    return from_lists([rewards], lengths=[[3, 2]], **given | fields)


def run(objective, rollouts, advantage, new=NEW, state=None):
    """(loss, gradient on the real tokens, metrics)."""
    update = jax.value_and_grad(objective.update, has_aux=True)
    state = objective.init() if state is None else state
    (loss, (metrics, _)), gradient = update(jnp.asarray(new), rollouts, jnp.asarray(advantage), state)
    real = np.asarray(rollouts.token_mask)
    assert not np.any(np.asarray(gradient)[~real])
    return float(loss), np.asarray(gradient)[real], metrics


def check(slug, loss, gradient, rollouts=None, advantage=SIGNS, **hyper):
    actual, slope, metrics = run(objectives.of(slug, **hyper), rollouts or example(), advantage)
    np.testing.assert_allclose(actual, loss, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(slope, gradient, atol=2e-6)
    return metrics


def test_clip_cov_example():
    objective = objectives.make("clip_cov", fraction=0.2, cov_low=0.2)
    for step in range(40):
        loss, gradient, metrics = run(objective, example(), SIGNS, state=jnp.int32(step))
        assert np.sum(gradient == 0) == 1 and gradient[1] != 0  # one of the candidates is drawn
        np.testing.assert_allclose(metrics["candidates"], 0.8, rtol=1e-6)
        np.testing.assert_allclose(metrics["covariance"] * 5, 0.7658 - 0.215357 + 0.262913 + 0.437407 + 0.782626, 1e-5)
        if gradient[0] == 0:
            break
    np.testing.assert_allclose(loss, 0.08, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -0.22, -0.1, 0.1, 0.3], atol=1e-7)


def test_clip_cov_draws_uniformly_and_as_many_as_there_are():
    def dropped(step, fraction):
        update = objectives.make("clip_cov", fraction=fraction, cov_low=0.2).update
        slope = jax.grad(lambda lp: update(lp, example(), jnp.asarray(SIGNS), step)[0])(jnp.asarray(NEW))
        return (slope == 0).reshape(-1)[jnp.array([0, 1, 2, 3, 4])]

    draws = np.asarray(jax.jit(jax.vmap(lambda step: dropped(step, 0.4)))(jnp.arange(600)))
    assert np.all(draws.sum(1) == 2) and not draws[:, 1].any()
    np.testing.assert_allclose(draws.mean(0)[[0, 2, 3, 4]], 0.5, atol=0.08)
    assert np.asarray(dropped(0, 1.0)).sum() == 4  # more are asked for than there are candidates


def test_clip_cov_leaves_constant_advantages_and_clipped_tokens_alone():
    plain, _, _ = run(objectives.ppo_clip(), example(), np.ones_like(SIGNS))
    same, _, metrics = run(objectives.make("clip_cov", fraction=0.5, cov_low=0.0, clip_low=0.2, clip_high=0.2), example(),
                           np.ones_like(SIGNS))
    assert same == plain and metrics["candidates"] == 0
    _, _, metrics = run(objectives.make("clip_cov", cov_low=0.2, clip_low=0.2, clip_high=0.28), example(), SIGNS)
    np.testing.assert_allclose(metrics["candidates"], 0.4, rtol=1e-6)  # tokens 0 and 3 are clipped already


def test_kl_cov_example():
    metrics = check("kl_cov", -0.057813957, [-0.1, -0.22, -0.1, 0.1, 0.5], fraction=0.4)
    np.testing.assert_allclose(metrics["held"], 0.4, rtol=1e-6)
    _, gradient, _ = run(objectives.make("kl_cov", fraction=1.0), example(), SIGNS, new=OLD)
    np.testing.assert_allclose(gradient, -SIGNS[REAL] / 5, atol=1e-7)  # no penalty where nothing has moved yet


def test_spear_schedule_and_loss():
    steps = jnp.array([0, 50, 100, 200, 300])
    np.testing.assert_allclose(imitation_coef(steps, coef=1, warmup=200), [0, 0.146447, 0.5, 1, 1], atol=1e-6)
    assert imitation_coef(jnp.int32(0), coef=0.3, warmup=0) == np.float32(0.3)
    extras = {"reward_baseline": jnp.array([0.5]), "age": jnp.array([[3, 3]])}
    rollouts = example(rewards=(0.2, 1.0), extras=extras)
    advantage, _ = advantages.make("spear").update(rollouts, ())
    np.testing.assert_allclose(advantage[0], [[-0.3, -0.3, -0.3], [0.5, 0.5, 0]], atol=1e-7)  # the first is below the baseline
    objective = objectives.make("spear_clip", max_len=4, cov_low=5.0)

    def at(step, **changed):
        return run(objective, rollouts.replace(extras=extras | changed | {"current_version": jnp.int32([step])}), advantage)

    for step, share in ((0, 0), (50, 0.146447), (400, 1)):
        loss, gradient, metrics = at(step)
        # ratios .5 and 1.5 with A = .5: the second is clipped at 1.28
        np.testing.assert_allclose(loss, -share * (0.5 + 1.28) * 0.5 / 4, rtol=1e-5)
        np.testing.assert_allclose(gradient, [0, 0, 0, -share * 0.25 / 4, 0], atol=1e-6)
        assert metrics["kept_fraction"] == 0.5
    for change in ({"age": jnp.array([[0, 11]])}, {"reward_baseline": jnp.array([1.1])}):
        loss, gradient, _ = at(400, **change)
        assert loss == 0 and not np.any(gradient)


def test_aepo_clip_example():
    check("aepo_clip", -0.116, [-0.256, -0.22, -0.1, 0, 0.3], entropy_scale=0.0)
    metrics = check("aepo_clip", -0.055220624, [-0.247525, -0.249132, -0.076827, 0, 0.379450])
    assert metrics["sign_flips"] == 0
    np.testing.assert_allclose(metrics["kept_gradient"], 0.2, rtol=1e-6)
    flipped = check("aepo_clip", 0.0, np.zeros(5), advantage=0 * SIGNS, entropy_scale=2.0)
    np.testing.assert_allclose(flipped["sign_flips"], 0.4, rtol=1e-6)  # z = -.83 and -1.16 for entropies .6 and .3
    _, gradient, _ = run(objectives.make("aepo_clip", entropy_scale=0.0), example(), SIGNS, new=NEW + np.log(4) * REAL)
    np.testing.assert_allclose(gradient, [-0.256, -0.256, -0.256, 0.4, 0], atol=1e-6)  # ratio 6 at the dual bound


@pytest.mark.parametrize("variant, loss", [
    ("canonical", -0.182143350), ("exact", 0.241143445), ("pairwise", 0.906960828), ("simple", -0.052563824)])
def test_kimi_opmd_example(variant, loss):
    rollouts = example()
    advantage, _ = advantages.make("kimi_opmd").update(rollouts, ())
    actual, gradient, _ = run(objectives.make("kimi_opmd", tau=0.5, variant=variant), rollouts, advantage)
    np.testing.assert_allclose(actual, loss, rtol=1e-6)
    if variant == "canonical":
        np.testing.assert_allclose(gradient, [-0.298093] * 3 + [0.178079] * 2, atol=1e-6)
        # the gradient of `exact` is 2 tau times that of `canonical`
        _, exact, _ = run(objectives.make("kimi_opmd", tau=0.5, variant="exact"), rollouts, advantage)
        np.testing.assert_allclose(exact, gradient, rtol=1e-6)


def test_kimi_opmd_with_the_log_of_the_mean_exponential():
    advantage, _ = advantages.make("kimi_opmd", baseline="logavgexp", tau=0.5).update(example(), ())
    np.testing.assert_allclose(np.asarray(advantage)[0, :, 0], [1 - 0.716890, -0.716890], atol=1e-6)
    loss, _, _ = run(objectives.make("kimi_opmd", tau=0.5), example(), advantage)
    np.testing.assert_allclose(loss, -0.857177726, rtol=1e-6)


def test_rec_family_examples():
    check("rec_family + kl(0.2, estimator=k2, against=old)", 0.132635575,
          [0.016219, -0.196188, -0.227726, -0.027726, 0.216219])
    ring = dict(clip="ring", weight="importance_sampling", ring_low=0.4, ring_high=0.4)
    check("rec_family", -0.144398821, [0, -0.22, -0.1, 0, 0.3], **ring)


def test_rec_family_weights_of_huge_advantages_are_finite():
    for scale, size in ((1.0, 1.0), (100.0, 20.0)):  # exp(A) up to the clamped exponent
        loss, gradient, _ = run(objectives.make("rec_family", clip="none", weight="advantage"), example(), scale * SIGNS)
        signs = SIGNS[REAL].astype(np.float64)
        slope = -scale * signs * np.exp(size * signs) / 5
        np.testing.assert_allclose(gradient, slope, rtol=1e-5)
        np.testing.assert_allclose(loss, np.sum(slope * NEW[REAL]), rtol=1e-5)


def test_rec_family_corners_are_the_named_methods():
    plain, gradient, _ = run(objectives.make("reinforce"), example(), SIGNS)
    check("rec_family", plain, gradient, clip="none")
    _, gradient, _ = run(objectives.ppo_clip(), example(), SIGNS)
    _, same, _ = run(objectives.make("rec_family", weight="importance_sampling"), example(), SIGNS)
    np.testing.assert_allclose(same, gradient, atol=1e-7)
    with pytest.raises(ValueError, match="Did you mean 'one_side'"):
        objectives.make("rec_family", clip="oneside")


def test_topr_example():
    rollouts = example(behavior_logprobs=OLD)
    metrics = check("topr", 0.044091057, [-0.5] * 3 + [0.375] * 2, rollouts=rollouts)
    np.testing.assert_allclose(metrics["weight"], 0.875, rtol=1e-6)
    loss, gradient, _ = run(objectives.make("topr", positive=(1, 1), negative=(1, 1)), rollouts, SIGNS)
    plain, expected, _ = run(objectives.make("reinforce", aggregation="seq_mean_token_sum"), rollouts, SIGNS)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)
    _, gradient, _ = run(objectives.make("topr", level="token"), rollouts, SIGNS)
    np.testing.assert_allclose(gradient, [-0.5] * 3 + [0.25, 0.5], atol=1e-6)
    _, gradient, _ = run(objectives.make("topr"), rollouts, SIGNS, new=NEW - 50 * REAL)
    assert np.all(gradient[:3] == -0.5) and np.all(abs(gradient[3:]) < 1e-8)  # the unlikely mistake is left alone


def test_qwen_stabilizing_example():
    rollouts = example()
    advantage, _ = advantages.make("dr_grpo").update(rollouts, ())
    metrics = check("qwen_stabilizing", 0.334880957, [0, -0.22, -0.3125, 0, 0.15], rollouts, advantage)
    np.testing.assert_allclose(metrics["weight"], (1.5 + 0.88 + 1.25 + 0.625 + 0.6) / 5, rtol=1e-6)
    _, gradient, _ = run(objectives.make("qwen_stabilizing", cap=0.7), rollouts, advantage)
    np.testing.assert_allclose(gradient, [0, -0.175, -0.175, 0, 0.15], atol=1e-6)


def test_guirlvg_example():
    rollouts = example(rewards=(2, 0.5))
    advantage, _ = advantages.grpo(eps=1e-4).update(rollouts, ())
    gradient = [0.005556, -0.135685, -0.075587, -0.001562, 0.267223]
    metrics = check("guirlvg_adv_kl", 0.084422457, gradient, rollouts, advantage, reward_kl_coef=0.1)
    np.testing.assert_allclose(metrics["alpha"], 0.625, rtol=1e-6)
    check("guirlvg_adv_kl", 0.0, np.zeros(5), example(rewards=(0, 0)), 0 * SIGNS, reward_kl_coef=0.1)
    loss, _, _ = run(objectives.make("guirlvg_adv_kl", reward_kl_coef=0.1), example(rewards=(2, 2)), 0 * SIGNS)
    np.testing.assert_allclose(loss, 0.1 * (0.432466 / 3 + 0.098988 / 2) / 2, rtol=1e-5)
    with pytest.raises(ValueError, match="max_reward=0"):
        objectives.make("guirlvg_adv_kl", max_reward=0)


def test_prorl_example():
    rollouts = example()
    advantage, _ = advantages.grpo().update(rollouts, ())
    loss, gradient, _ = run(methods.build("prorl", objective="+ kl(0.1)")[1], rollouts, advantage)
    np.testing.assert_allclose(loss, -0.088365724, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.006667, -0.162836, -0.090711, -0.005, 0.218798], atol=1e-6)


def test_t1_loss_from_reward_to_loss():
    rollouts = example(tokens=jnp.array([[[1, 1, 1], [1, 2, 0]]]), extras={"current_entropies": ENTROPIES})
    advantage, _ = advantages.make("t1").update(rollouts, ())
    np.testing.assert_array_equal(advantage[0, :, 0], [1, -1])
    loss, _, _ = run(methods.build("t1")[1], rollouts, advantage)
    np.testing.assert_allclose(loss, -0.100893709, rtol=1e-6)


def test_t1_oversampling_from_reward_to_loss_and_anchor():
    """Leave-one-out advantages cancel at a ratio of 1; a hundredth of the KL and a thousandth of the entropy are left."""
    row = methods.get("t1_oversampling")
    every = np.ones((1, 4, 1), np.float32)
    rollouts = from_lists([[1, 0, 0, 1]], old_logprobs=-0.5 * every, ref_logprobs=-0.6 * every,
                          extras={"current_entropies": 0.3 * every})
    advantage, _ = methods.build(row.slug)[0].update(rollouts, ())
    np.testing.assert_allclose(advantage[0, :, 0], [2 / 3, -2 / 3, -2 / 3, 2 / 3], atol=1e-6)
    made = methods.build(row.slug)[1]
    loss, _ = made.update(-0.5 * every, rollouts, advantage, made.init())
    np.testing.assert_allclose(loss, -2.516258e-4, atol=1e-7)  # float32 terms of 2 / 3 cancel
    anchor = control.make(row.part("controllers").name, **row.part("controllers").numbers)
    moved = anchor.observe(anchor.init({"w": jnp.zeros(2)}), {"params": {"w": jnp.array([1.0, 2.0])}})
    np.testing.assert_allclose(anchor.propose(moved)["reference"]["w"], [0.1, 0.2], rtol=1e-6)


@pytest.mark.parametrize("gate, loss, gradient", [
    ("adaptive", -0.619998760, [-0.299999, -0.22, -0.1, 0, 0]),
    ("token", -0.519998960, [-0.299999, -0.22, -0.1, 0.1, 0])])
def test_qwenlong_aepo_example(gate, loss, gradient):
    bounds = {"entropy_low": 0.5, "entropy_high": 0.9} if gate == "adaptive" else {"entropy_high": 1.0}
    estimator = advantages.make("qwenlong_aepo", scope="batch", gate=gate, **bounds)
    advantage, _ = estimator.update(example(), estimator.init())
    actual, slope, metrics = run(objectives.make("qwenlong_aepo"), example(), advantage)
    np.testing.assert_allclose(actual, loss, rtol=1e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)
    assert metrics["clip_fraction"] == 0


def test_oneshot_entropy_example():
    logits = np.zeros((5, 4))
    logits[1] = [2, 0, 0, -1]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropies = np.full((1, 2, 3), np.nan, np.float32)
    entropies[REAL] = -(probs * np.log(probs)).sum(-1)
    np.testing.assert_allclose(entropies[0, 0, 1], 0.801056, atol=1e-6)
    loss, _, _ = run(methods.build("oneshot_entropy")[1], example(extras={"current_entropies": jnp.asarray(entropies)}), SIGNS)
    np.testing.assert_allclose(loss, -0.101162956, rtol=1e-6)


# Re-derivation: plain loops in float64. `lp` is differentiated by central differences, `at` is its detached value.

def random_batch(seed):
    rng = np.random.default_rng(seed)
    shape = P, G, _ = 3, 4, 5
    mask = rng.random(shape) < 0.7
    valid = rng.random((P, G)) < 0.85
    mask[0, 0] = False
    lp = -np.exp(rng.normal(size=shape))
    d = types.SimpleNamespace(
        mask=mask, valid=valid, lp=lp, old=lp + 0.4 * rng.normal(size=shape), ref=lp + 0.4 * rng.normal(size=shape),
        behavior=lp + 0.4 * rng.normal(size=shape), H=rng.gamma(2.0, size=shape), r=rng.random((P, G)),
        A=np.broadcast_to(rng.normal(size=(P, G, 1)), shape).copy())
    real = mask & valid[..., None]
    d.tokens = [tuple(i) for i in np.argwhere(real)]
    d.rows = {(p, g): [i for i in d.tokens if i[:2] == (p, g)] for p in range(P) for g in range(G) if real[p, g].any()}
    d.rollouts = Rollouts(**jax.tree.map(jnp.asarray, dict(
        mask=mask, valid=valid, rewards=np.float32(d.r), entropies=np.float32(d.H), old_logprobs=np.float32(d.old),
        ref_logprobs=np.float32(d.ref), behavior_logprobs=np.float32(d.behavior),
        extras={"current_entropies": np.float32(d.H)})))
    return d


def token_mean(term):
    return lambda d, lp: sum(term(d, lp, i) for i in d.tokens) / len(d.tokens)


def seq_mean(term, normalise=False):
    def loss(d, lp):
        return sum(sum(term(d, lp, i) for i in row) / (len(row) if normalise else 1)
                   for row in d.rows.values()) / len(d.rows)
    return loss


def kl_cov_reference(d, lp):
    A, at = np.array([d.A[i] for i in d.tokens]), np.array([d.lp[i] for i in d.tokens])
    order = np.argsort(-(A - A.mean()) * (at - at.mean()), kind="stable")
    held = {d.tokens[n] for n in order[: max(int(0.3 * len(A)), 1)]}
    return token_mean(lambda d, lp, i: -d.A[i] * np.exp(lp[i] - d.old[i])
                      + (0.7 * abs(lp[i] - d.old[i]) if i in held else 0))(d, lp)


def aepo_reference(d, lp):
    H = np.array([d.H[i] for i in d.tokens])

    def term(d, lp, i):
        A = d.A[i] * (1 + 0.2 * (d.H[i] - H.mean()) / H.std(ddof=1))
        rho, at = np.exp(lp[i] - d.old[i]), np.exp(d.lp[i] - d.old[i])
        if at > 1.28 and A > 0:
            return -A * 1.28 * np.exp(lp[i] - d.lp[i])
        if at < 0.8 and A < 0:
            return -A * 0.8
        return -A * 1.5 if A < 0 and at > 1.5 else -A * rho
    return token_mean(term)(d, lp)


def kimi_reference(variant):
    def loss(d, lp):
        prompts = sorted({p for p, _ in d.rows})
        total = 0
        for p in prompts:
            rows = [(d.A[key][0], row) for key, row in d.rows.items() if key[0] == p]
            change = [sum(lp[i] - d.old[i] for i in row) for _, row in rows]
            a = [A - 0.3 * c for (A, _), c in zip(rows, change)]
            if variant == "pairwise":
                total += sum((a[i] - a[j]) ** 2 for j in range(len(a)) for i in range(j))
            elif variant == "exact":
                total += np.mean([x**2 for x in a]) / len(prompts)
            else:
                total += np.mean([-A * sum(lp[i] for i in row) + 0.15 * c**2
                                  for (A, row), c in zip(rows, change)]) / len(prompts)
        return total
    return loss


def rec_term(d, lp, i):
    rho, A = np.exp(d.lp[i] - d.old[i]), d.A[i]
    near = 0.8 <= rho <= 1.3
    back = (A >= 0 and rho <= 0.6) or (A <= 0 and rho >= 1.5)
    return -float(near or back) * A * np.exp(A / 0.5) * lp[i] + 0.2 * (lp[i] - d.old[i]) ** 2


def topr_reference(d, lp):
    total = 0
    for key, row in d.rows.items():
        weight = 1 if d.A[key][0] >= 0 else min(np.exp(sum(d.lp[i] - d.behavior[i] for i in row)), 1)
        total -= weight * d.A[key][0] * sum(lp[i] for i in row)
    return total / len(d.rows)


def minirl_term(d, lp, i):
    A, rho = d.A[i], np.exp(d.lp[i] - d.old[i])
    out = (A > 0 and rho > 1.27) or (A < 0 and rho < 0.8)
    return 0 if out else -min(np.exp(d.lp[i] - d.behavior[i]), 1.1) * A * lp[i]


def clipped(d, lp, i):
    rho = np.exp(lp[i] - d.old[i])
    return max(-d.A[i] * rho, -d.A[i] * min(max(rho, 0.8), 1.2))


def k3(d, lp, i):
    return np.exp(d.ref[i] - lp[i]) - (d.ref[i] - lp[i]) - 1


def oneshot_term(d, lp, i):
    return clipped(d, lp, i) + 0.2 * k3(d, lp, i) - 0.1 * d.H[i]


DERIVED = {
    "kl_cov": (dict(fraction=0.3, held_coef=0.7), kl_cov_reference),
    "aepo_clip": (dict(dual_clip=1.5), aepo_reference),
    "kimi_opmd": (dict(tau=0.3), kimi_reference("canonical")),
    "kimi_opmd exact": (dict(tau=0.3, variant="exact"), kimi_reference("exact")),
    "kimi_opmd pairwise": (dict(tau=0.3, variant="pairwise"), kimi_reference("pairwise")),
    "rec_family + kl(0.4, estimator=k2, against=old)": (dict(
        clip="ring", weight="advantage", clip_high=0.3, ring_low=0.4, ring_high=0.5, temperature=0.5), token_mean(rec_term)),
    "topr": (dict(), topr_reference),
    "qwen_stabilizing": (dict(cap=1.1), seq_mean(minirl_term)),
    "guirlvg_adv_kl": (dict(reward_kl_coef=0.3, max_reward=0.8), seq_mean(
        lambda d, lp, i: clipped(d, lp, i) + 0.3 * min(d.r[i[:2]] / 0.8, 1) * k3(d, lp, i), normalise=True)),
    "ppo_clip + kl(0.2) + entropy(0.1)": (dict(), token_mean(oneshot_term)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVED)
def test_against_plain_loops_in_float64(name):
    hyper, reference = DERIVED[name]
    objective = objectives.of(name.removesuffix(" exact").removesuffix(" pairwise"), **hyper)
    for seed in (0, 1):
        d = random_batch(seed)
        loss, gradient, _ = run(objective, d.rollouts, np.float32(d.A), new=np.float32(d.lp))
        np.testing.assert_allclose(loss, reference(d, d.lp), rtol=2e-5, atol=1e-6)
        expected = []
        for i in d.tokens:
            step = np.zeros_like(d.lp)
            step[i] = 1e-6
            expected.append((reference(d, d.lp + step) - reference(d, d.lp - step)) / 2e-6)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_clip_cov_against_plain_loops():
    for seed in range(3):
        d = random_batch(seed)
        objective = objectives.make("clip_cov", clip_low=0.2, clip_high=0.2, fraction=0.1, cov_low=0.3, cov_high=4.0)
        loss, gradient, _ = run(objective, d.rollouts, np.float32(d.A), new=np.float32(d.lp))
        A, lp = (np.array([x[i] for i in d.tokens]) for x in (d.A, d.lp))
        rho = np.exp(lp - [d.old[i] for i in d.tokens])
        beyond = ((A > 0) & (rho > 1.2)) | ((A < 0) & (rho < 0.8))
        cov = (A - A.mean()) * (lp - lp.mean())
        candidates = ~beyond & (cov > 0.3) & (cov < 4.0)
        drawn = (gradient == 0) & ~beyond
        assert candidates.sum() > 1 and not np.any(drawn & ~candidates)
        assert drawn.sum() == min(max(int(0.1 * len(A)), 1), candidates.sum())
        terms = np.where(drawn, 0, np.maximum(-A * rho, -A * np.clip(rho, 0.8, 1.2)))
        np.testing.assert_allclose(loss, terms.mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, np.where(drawn | beyond, 0, -A * rho) / len(A), rtol=1e-4, atol=1e-7)
