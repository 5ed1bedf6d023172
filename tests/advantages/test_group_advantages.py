"""Group-relative advantages: literal numbers, the equations in float64 numpy, and the effect of the options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.ace import punish_confidence
from jaxrl_llm.advantages.ettrl_ear import confidence
from jaxrl_llm.advantages.ttrl import majority
from jaxrl_llm.advantages.xrpo_advantage import relative_likelihood, sharpen
from jaxrl_llm.control.mc_grpo import lower_median, without_pivot
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.rewards.call_kinds import COUNTS, step_reward

close = np.testing.assert_allclose


def run(slug, rollouts, **hyper):
    """Advantages as float64 [P, G, T]."""
    estimator = advantages.make(slug, **hyper)
    return np.asarray(estimator.update(rollouts, estimator.init())[0], np.float64)


def per_rollout(slug, rollouts, **hyper):
    """[P, G], after checking that the tokens of a rollout share one advantage."""
    values, mask = run(slug, rollouts, **hyper), np.asarray(rollouts.token_mask)
    own = np.array([[row[m][0] if m.any() else 0 for row, m in zip(*group)] for group in zip(values, mask)])
    assert np.array_equal(values, np.where(mask, own[..., None], 0).astype(np.float32))
    return own


def batch(seed=0, P=3, G=6, T=5, **fields):
    """Random rollouts: some invalid, some empty, measurements everywhere."""
    rng = np.random.default_rng(seed)
    arrays = dict(
        mask=np.arange(T) < rng.integers(0, T + 1, (P, G, 1)),
        valid=rng.random((P, G)) < 0.8,
        rewards=rng.choice([0.0, 0.4, 1.0, 1.0], (P, G)),
        reward_components=rng.choice([0.0, 0.5, 1.0], (P, G, 3)),
        behavior_logprobs=-rng.exponential(size=(P, G, T)),
        old_logprobs=-rng.exponential(size=(P, G, T)),
        ref_logprobs=-rng.exponential(size=(P, G, T)),
        entropies=rng.exponential(size=(P, G, T)),
        **fields,
    )
    extras = {name: jnp.asarray(x) for name, x in arrays.pop("extras", {}).items()}
    return Rollouts(**{name: jnp.asarray(x) for name, x in arrays.items()}, extras=extras)


def groups(rollouts):
    """(prompt, indices of its valid rollouts) and float64 arrays by name."""
    valid = np.asarray(rollouts.valid)
    return [(p, np.flatnonzero(valid[p])) for p in range(len(valid))]


def f64(x):
    return np.asarray(x, np.float64)


def z(x, eps=1e-6, ddof=1):
    x = f64(x)
    if len(x) <= ddof or np.all(x == x[0]):
        return np.zeros(len(x))
    return (x - x.mean()) / (x.std(ddof=ddof) + eps)


def expect(slug, rollouts, reference, rtol=1e-4, **hyper):
    """Checks that `per_rollout` equals `reference(p, indices) -> advantages of these rollouts`, for rollouts with tokens."""
    wanted = np.zeros(rollouts.valid.shape)
    for p, i in groups(rollouts):
        wanted[p, i] = reference(p, i)
    close(per_rollout(slug, rollouts, **hyper), wanted * np.asarray(rollouts.live), rtol=rtol, atol=1e-5)


# Median-centred GRPO


def test_mc_grpo_worked_example():
    rollouts = from_lists([[0, 1, 2], [0, 0, 1], [1, 1, 1]])
    close(per_rollout("mc_grpo", rollouts), [[-1.4985015, 0, 1.4985015], [0, 0, 3000], [0, 0, 0]], rtol=1e-6)
    close(per_rollout("mc_grpo", rollouts, scale="std")[1], [0, 0, 5.1952526], rtol=1e-6)
    close(per_rollout("mc_grpo", rollouts, scale="none", compensate=False)[0], [-1, 0, 1])
    keep = without_pivot(rollouts.rewards, rollouts.valid)
    assert np.array_equal(keep, [[1, 0, 1], [0, 1, 1], [0, 1, 1]])


def test_mc_grpo_agrees_with_numpy():
    rollouts = batch(1)
    def lower(x):
        return np.sort(x)[(len(x) - 1) // 2]

    def reference(p, i):
        centred = f64(rollouts.rewards)[p, i] - lower(f64(rollouts.rewards)[p, i])
        values = centred / (lower(np.abs(centred)) + 1e-3)
        moved = np.abs(values) > 1e-6
        return values * (len(i) / max(moved.sum(), 1))

    expect("mc_grpo", rollouts, reference)


def test_median_ignores_padding_and_takes_the_lower_of_two():
    x = jnp.array([[5.0, 1.0, -9.0, 3.0], [5.0, 1.0, 2.0, 3.0], [7.0, 0.0, 0.0, 0.0]])
    valid = jnp.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    assert np.array_equal(lower_median(x, valid), [[3], [2], [0]])
    assert np.array_equal(without_pivot(x, valid), [[1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]])


def test_the_median_of_few_rollouts_errs_in_sign_less_often_than_the_mean():
    """Skewed rewards with few successes of different size; the reference is the group of all rollouts."""
    rng = np.random.default_rng(0)
    rewards = rng.exponential(size=(2000, 3)) ** 3
    oracle = np.sign(rewards - np.median(rng.exponential(size=10**5) ** 3))
    rollouts = from_lists(rewards)
    wrong = {slug: np.mean(np.sign(per_rollout(slug, rollouts)) * oracle < 0) for slug in ("mc_grpo", "grpo")}
    assert wrong["mc_grpo"] < 0.8 * wrong["grpo"]


# ACE


def test_ace_worked_example():
    A, wrong, shift = jnp.array([[1.0, -1, -1]]), jnp.array([[False, True, True]]), jnp.array([[1.0, 1, -2]])
    close(punish_confidence(A, wrong, shift, alpha=1, modulation="softplus"), [[1, -2.3132617, -1.1269280]], rtol=1e-6)
    close(punish_confidence(A, wrong, shift, alpha=1, modulation="relu"), [[1, -2, -1]])


def test_ace_agrees_with_numpy_and_without_alpha_is_grpo():
    rollouts = batch(2)
    r, lengths = f64(rollouts.rewards), np.asarray(rollouts.lengths)
    shift = (f64(rollouts.old_logprobs - rollouts.ref_logprobs) * np.asarray(rollouts.token_mask)).sum(2)

    def reference(p, i, c):
        A = z(r[p, i])
        return A * np.where((r[p, i] < 0.5) & (A < 0), 1 + 0.7 * np.log1p(np.exp(c[p, i])), 1)

    expect("ace", rollouts, lambda p, i: reference(p, i, shift), alpha=0.7)
    mean = np.clip(shift / np.maximum(lengths, 1), -0.2, 0.2)
    expect("ace", rollouts, lambda p, i: reference(p, i, mean), alpha=0.7, norm="mean", shift_clip=0.2)
    close(run("ace", rollouts, alpha=0.0), run("grpo", rollouts))


# GDPO


def gdpo(components, **hyper):
    components = jnp.asarray(components, jnp.float32)
    rollouts = from_lists(np.zeros(components.shape[:2])).replace(reward_components=components)
    return per_rollout("gdpo", rollouts, **hyper)


TWO_REWARDS = [[(1, 1), (1, 0), (0, 1), (0, 0)], [(1, 1), (1, 1), (0, 1), (0, 1)]]


def test_gdpo_worked_example():
    summed = [[1.7317509, 0, 0, -1.7317509], [0.8658754, 0.8658754, -0.8658754, -0.8658754]]
    close(gdpo(TWO_REWARDS, whiten="none"), summed, rtol=2e-6, atol=1e-7)
    white = [[1.5273905, 0, 0, -1.5273905], [0.7636953, 0.7636953, -0.7636953, -0.7636953]]
    close(gdpo(TWO_REWARDS), white, rtol=2e-6, atol=1e-6)


def test_gdpo_distinguishes_rewards_with_equal_sums():
    values = gdpo([[(0, 0), (1, 0)], [(0, 0), (1, 1)]], whiten="none", eps=1e-8)
    close(values, np.sqrt(2) * np.array([[-0.5, 0.5], [-1, 1]]), rtol=1e-6)


@pytest.mark.slow
def test_gdpo_weights_conditions_nan_and_one_component():
    close(gdpo(TWO_REWARDS, weights=(1, 0), whiten="none")[0], z([1, 1, 0, 0], 1e-4), rtol=1e-6)
    conditioned = gdpo(TWO_REWARDS, conditions=((1, 0, 0.5),), whiten="none")
    close(conditioned[0], z([1, 1, 0, 0], 1e-4) + z([1, 0, 0, 0], 1e-4), rtol=1e-5)
    assert np.array_equal(gdpo([[(np.nan,), (1,)]]), gdpo([[(0,), (1,)]]))
    close(gdpo([[(0,), (1,)], [(0,), (0,)]]), [z([0, 1], 1e-4), [0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match="3 weights for 2 reward components"):
        gdpo(TWO_REWARDS, weights=(1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("whiten", ["seq", "token"])
def test_gdpo_agrees_with_numpy(whiten):
    rollouts, weights = batch(3), (1.0, 0.3, 2.0)
    total = np.zeros(rollouts.valid.shape)
    for p, i in groups(rollouts):
        total[p, i] = sum(w * z(f64(rollouts.reward_components)[p, i, k], 1e-4) for k, w in enumerate(weights))
    valid, mask = np.asarray(rollouts.valid), np.asarray(rollouts.token_mask)
    if whiten == "seq":
        white = (total - total[valid].mean()) / (total[valid].std(ddof=1) + 1e-4)
    else:
        tokens = np.broadcast_to(total[..., None], mask.shape)[mask]
        white = (total - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    close(run("gdpo", rollouts, weights=weights, whiten=whiten), white[..., None] * mask, rtol=1e-4, atol=1e-5)


# FAPO


def fapo(correct, flawed, **hyper):
    rollouts = from_lists([correct]).replace(extras={"flawed": jnp.asarray([flawed], bool)})
    return per_rollout("fapo", rollouts, **hyper)[0]


def test_fapo_worked_example():
    """The sign of a flawed success flips when clean successes outnumber errors."""
    close(fapo([1, 1, 0, 0], [0, 1, 0, 0]), [1.3055811, 0.2611162, -0.7833486, -0.7833486], rtol=1e-5)
    close(fapo([1, 1, 1, 0], [0, 0, 1, 0]), [0.7833486, 0.7833486, -0.2611162, -1.3055811], rtol=1e-5)
    close(fapo([1, 1, 0], [1, 0, 1], penalty=0.5), z([0.5, 1, -1]), rtol=1e-5)


def test_fapo_adds_the_overlong_penalty_to_the_shaped_reward():
    rollouts = from_lists([[1, 1, 0]], [[2, 3, 4]]).replace(extras={"flawed": jnp.array([[True, False, False]])})
    close(per_rollout("fapo", rollouts, max_len=4)[0], z([0, 0.5, -2]), rtol=1e-5)
    close(per_rollout("fapo", rollouts, max_len=4, cache_len=1)[0], z([0, 1, -2]), rtol=1e-5)
    with pytest.raises(ValueError, match="cache=9, max_length=4"):
        advantages.make("fapo", max_len=4, cache_len=9)


# XRPO


def test_xrpo_worked_example():
    s = jnp.array([[-1.0, -0.2, -0.5, -0.3]])[..., None]
    eta = relative_likelihood(s, jnp.ones_like(s, bool), jnp.ones((1, 4), bool))
    close(eta, [[0.6065307, 1.3498588, 1, 1.2214028]], rtol=1e-6)
    A, correct = jnp.array([[1.0, 1, -1, -1]]), jnp.array([[True, True, False, False]])
    close(sharpen(A, correct, eta, novelty_coef=2.5, novelty_cap=0.5), [[1.5, 1, -1, -1]])


@pytest.mark.parametrize("baseline", ["group", "correct"])
def test_xrpo_agrees_with_numpy(baseline):
    rollouts = batch(4)
    r, live, lengths = f64(rollouts.rewards), np.asarray(rollouts.live), np.asarray(rollouts.lengths)
    s = (f64(rollouts.behavior_logprobs) * np.asarray(rollouts.token_mask)).sum(2) / np.maximum(lengths, 1)

    def reference(p, i):
        A, correct = z(r[p, i]), r[p, i] > 0.5
        counted = live[p, i] & (correct if baseline == "correct" else True)
        eta = np.exp(s[p, i] - s[p, i][counted].mean()) if counted.any() else np.ones(len(i))
        bonus = np.clip(0.8 * (1 - eta), 0, 0.3 * np.maximum(A, 0))
        return A + bonus * (correct & (A > 0))

    expect("xrpo_advantage", rollouts, reference, novelty_coef=0.8, novelty_cap=0.3, baseline=baseline)


# PSR, NSR, W-REINFORCE


def test_nsr_psr_worked_example():
    """The loss of two rollouts of two tokens under PPO's clip; the denominator is the number of kept tokens."""
    rollouts = from_lists([[1, 0]], [[2, 2]])
    logprobs = jnp.log(jnp.array([[[1.4, 1.0], [0.5, 1.0]]]))
    rollouts = rollouts.replace(old_logprobs=jnp.zeros((1, 2, 2)))
    for variant, expected in (("psr", -1.1), ("nsr", 0.9), ("weighted", 0.395)):
        A, _ = advantages.make("nsr_psr", variant=variant).update(rollouts, ())
        loss, _ = objectives.ppo_clip().update(logprobs, rollouts, A, ())
        close(loss, expected, rtol=1e-6)


def test_nsr_psr_normalises_by_the_tokens_it_keeps():
    rollouts = from_lists([[1, 0], [0, 1]], [[3, 1], [4, 2]])
    close(per_rollout("nsr_psr", rollouts, variant="psr"), [[2, 0], [0, 2]])
    close(per_rollout("nsr_psr", rollouts, variant="nsr"), [[0, -2], [-2, 0]])
    close(per_rollout("nsr_psr", rollouts), [[0.1, -1], [-1, 0.1]])
    assert not np.any(run("nsr_psr", from_lists([[0, 0]]), variant="psr"))


def test_a_wrong_token_gives_its_mass_to_the_others_in_proportion():
    """One softmax step: PSR moves the logits by p_y (onehot_y - p), NSR by the exact opposite."""
    logits, y = jnp.array([0.5, -0.3, 1.0, 0.1]), 2
    prob = np.exp(f64(logits)) / np.exp(f64(logits)).sum()
    for variant, reward, sign in (("psr", 1, 1), ("nsr", 0, -1)):
        rollouts = from_lists([[reward]])
        A, _ = advantages.make("nsr_psr", variant=variant).update(rollouts, ())

        def expected_return(logits):
            logprob = jax.nn.log_softmax(logits)[y]
            loss, _ = objectives.ppo_clip().update(logprob[None, None, None], rollouts, A, ())
            return -loss

        step = f64(jax.grad(expected_return)(logits)) * prob[y]
        close(step, sign * prob[y] * (np.eye(4)[y] - prob), rtol=1e-5)


# GRPO-lambda


def test_grpo_lambda_worked_example():
    correct = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    lengths = [[100, 200, 300, 400], [50, 60, 70, 80], [1, 2, 3, 4]]
    values = per_rollout("grpo_lambda", from_lists(correct, lengths), share=0.34)
    close(values[0], [0.6182621, 0.4975650, 0.3768679, -1.4926950], rtol=1e-5)
    close(values[1], [1.4999967, -0.4999989, -0.4999989, -0.4999989], rtol=1e-6)
    assert not np.any(values[2])


def test_grpo_lambda_counts_real_prompts_and_breaks_ties_in_batch_order():
    """20% of five prompts is one prompt. Of two equally solved prompts the first is taken; the others use GRPO."""
    rewards, lengths = [[1, 0], [1, 1], [1, 1], [0, 0], [1, 0]], [[1, 2]] * 5
    values = per_rollout("grpo_lambda", from_lists(rewards, lengths))
    assert values[1, 0] > 0 > values[1, 1] and not np.any(values[2])
    close(values[[0, 4]], per_rollout("grpo", from_lists(rewards, lengths))[[0, 4]])
    everywhere = per_rollout("grpo_lambda", from_lists(rewards, lengths), variant="threshold", threshold=1.0)
    close(everywhere[2], values[1])
    with pytest.raises(ValueError, match="alpha=1"):
        advantages.make("grpo_lambda", alpha=1.0)


def test_grpo_lambda_agrees_with_numpy():
    rollouts = batch(6, P=4)
    r, lengths = f64(rollouts.rewards) > 0.5, f64(rollouts.lengths)

    def reference(p, i):
        won, L = r[p, i], lengths[p, i]
        score = won.astype(float)
        if won.mean() >= 0.5:
            deviation = won * (L - L[won].mean())
            score = won * (1 - 0.4 / (1 + np.exp(-deviation / (L[won].std() + 1e-8))))
        return z(score)

    expect("grpo_lambda", rollouts, reference, variant="threshold", threshold=0.5, alpha=0.4)


# RAPO


def test_rapo_worked_example():
    rewards = [[1.1, 0.1, 0.1, 0.1], [0.1, 0.1, 1.1, 0.1], [0.1] * 4, [1.1] * 4]
    high, low = 3.464102, -1.154701
    expected = [[high, low, low, low], [low, low, high, low], [0] * 4, [0] * 4]
    close(per_rollout("rapo", from_lists(rewards)), expected, rtol=1e-6)
    close(per_rollout("rapo", from_lists(rewards), max_scale=1.5), 0.75 * np.array(expected), rtol=1e-6)
    lonely = per_rollout("rapo", from_lists([[1, 0, 0, 1, 0], [1] * 5, [0] * 5]))[0]
    close(lonely, [3.674235, -2.449490, -2.449490, 3.674235, -2.449490], rtol=1e-6)


def test_rapo_does_not_count_prompts_without_rollouts():
    rollouts = from_lists([[1, 0], [1, 1], [1, 0]]).replace(valid=jnp.array([[1, 1], [1, 1], [0, 0]], bool))
    close(per_rollout("rapo", rollouts), [[2, -2], [0, 0], [0, 0]], rtol=1e-6)


def calls_of(*rows):
    """Extras of one group: searches, repeated ones, queries, repeated ones, and whether a call was malformed, of each."""
    columns = dict(zip((*COUNTS, "malformed"), np.array(rows).T))
    return {name: jnp.asarray([values], bool if name == "malformed" else jnp.int32) for name, values in columns.items()}


def test_rapo_rewards_the_kinds_of_calls():
    """16 calls, a quarter of them redundant: 0.85 right, 0.25 wrong; without calls 1.1 and 0.1; repeats alone go below 0."""
    counts = (6, 2, 6, 2)
    close(step_reward(1.0, 1.0, *map(np.int32, counts)), 0.85, rtol=1e-6)
    close(step_reward(0.0, 1.0, *map(np.int32, counts)), 0.25, rtol=1e-6)
    close([step_reward(np.float32(right), 1.0, *np.zeros(4, np.int32)) for right in (1, 0)], [1.1, 0.1], rtol=1e-6)
    close(step_reward(np.float32(0), 0.0, *np.array([0, 8, 0, 16])), -0.4, rtol=1e-6)
    close(step_reward(np.float32(1), 0.0, *np.array([1, 8, 0, 16])), 0.5, rtol=1e-6)
    group = from_lists([[1, 0, 0]], extras=calls_of((*counts, 0), (*counts, 0), (0, 0, 0, 0, 1)))
    r = np.array([0.85, 0.25, 0.0])
    close(per_rollout("rapo", group, steps=True), [(r - r.mean()) / r.std()], rtol=1e-5)
    assert {*COUNTS, "malformed"} <= {*advantages.make("rapo", steps=True).needs}


# TTRL and its entropy reshaping


VOTES = jnp.array([[7, 3, 3, 7, -1], [5, 5, 5, 1, 1]])


def test_ttrl_worked_example():
    valid = jnp.ones((2, 5), bool)
    label, share = majority(VOTES, valid)
    assert np.array_equal(label, [7, 5])
    close(share, [0.4, 0.6])
    rollouts = from_lists(np.zeros((2, 5))).replace(extras={"answers": VOTES})
    close(per_rollout("ttrl", rollouts), [z([1, 0, 0, 1, 0]), z([1, 1, 1, 0, 0])], rtol=1e-5)


def test_ttrl_trains_on_the_first_votes_and_normalises_by_their_tokens():
    rollouts = from_lists(np.zeros((2, 5)), [[1, 2, 3, 4, 5]] * 2).replace(extras={"answers": VOTES})
    values = per_rollout("ttrl", rollouts, train_rollouts=3)
    close(values[0], 30 / 12 * np.array([*z([1, 0, 0]), 0, 0]), rtol=1e-5)
    assert not np.any(values[1])


def test_ttrl_votes_that_do_not_count():
    answers = jnp.array([[-1, -1, -1, 4], [2, 2, 9, 9], [-1, -1, -1, -1]])
    valid = jnp.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    label, share = majority(answers, valid)
    assert np.array_equal(label, [4, 9, -1])
    close(share, [1 / 4, 2 / 3, 0])
    rollouts = from_lists(np.zeros((3, 4))).replace(valid=valid, extras={"answers": answers})
    values = per_rollout("ttrl", rollouts)
    assert values[0, 3] > 0 and not np.any(values[2])


def test_ear_worked_example():
    H = jnp.array([[0.2, 0.4, 0.6, 0.8]])[..., None]
    close(confidence(H, jnp.ones_like(H, bool)), [[1.6, 1.2, 0.8, 0.4]], rtol=1e-6)
    rollouts = from_lists([[1, 0, 0, 0]]).replace(entropies=H)
    close(per_rollout("ettrl_ear", rollouts, reward="given", eps=0.0), [[2.4, -0.6, -0.4, -0.2]], rtol=1e-6)
    clipped = per_rollout("ettrl_ear", rollouts, reward="given", eps=0.0, variant="clip", clip=1.0)
    close(clipped, [[1, -0.5, -0.5, -0.5]], rtol=1e-6)


def test_ear_flips_the_sign_of_very_uncertain_rollouts_by_default():
    rollouts = from_lists([[1, 0, 0]]).replace(entropies=jnp.array([[[3.0], [0.0], [0.0]]]))
    assert per_rollout("ettrl_ear", rollouts, reward="given")[0, 0] < 0
    assert per_rollout("ettrl_ear", rollouts, reward="given", factor_min=0.0)[0, 0] == 0
    calm = rollouts.replace(entropies=jnp.zeros((1, 3, 1)))
    close(run("ettrl_ear", calm, reward="given"), run("grpo", calm))


def test_ear_agrees_with_numpy_on_majority_rewards():
    answers = np.random.default_rng(8).integers(-1, 3, (3, 6))
    rollouts = batch(8, extras={"answers": answers})
    H, mask = f64(rollouts.entropies), np.asarray(rollouts.token_mask)
    own = (H * mask).sum(2) / np.maximum(mask.sum(2), 1)

    def reference(p, i):
        votes = [a for a in answers[p, i] if a >= 0]
        label = max(votes, key=votes.count)
        live = mask[p, i].any(1)
        return z(answers[p, i] == label) * (2 - own[p, i] / own[p, i][live].mean())

    expect("ettrl_ear", rollouts, reference)


# QwenLong-L1.5


def test_qwenlong_worked_example():
    rollouts = from_lists([[1, 0], [1, 1], [0.2, 0.4]]).replace(extras={"task": jnp.array([0, 0, 1])})
    values = per_rollout("qwenlong_l15_adv", rollouts)
    close(values, [[0.999998, -0.999998], [0, 0], [-0.7071018, 0.7071018]], rtol=1e-6)
    batch_wide = per_rollout("qwenlong_l15_adv", rollouts, scope="batch")
    close(batch_wide, [[1.0963201, -1.0963201], [0, 0], [-0.2192640, 0.2192640]], rtol=1e-6)
    close(per_rollout("qwenlong_l15_adv", rollouts, scope="group"), per_rollout("grpo", rollouts), rtol=1e-6)


def test_qwenlong_agrees_with_numpy():
    task = np.array([2, 0, 2, 2, 0])
    rollouts = batch(9, P=5, extras={"task": task})
    r, valid = f64(rollouts.rewards), np.asarray(rollouts.valid)

    def reference(p, i):
        everyone = np.concatenate([r[q][valid[q]] for q in np.flatnonzero(task == task[p])])
        return (r[p, i] - r[p, i].mean()) / (everyone.std(ddof=1) + 1e-6)

    expect("qwenlong_l15_adv", rollouts, reference)


# Agentic AEPO


def test_aepo_worked_example():
    rollouts = from_lists([[1, 0]], [[2, 2]]).replace(entropies=jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
    expected = [[[0.5339015, 0.8803101], [-0.7071058, -0.7071058]]]
    close(run("aepo_advantage", rollouts), expected, rtol=1e-6)


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_aepo_agrees_with_numpy(scope):
    rollouts = batch(10)
    H, mask, expected = f64(rollouts.entropies), np.asarray(rollouts.token_mask), np.zeros(rollouts.mask.shape)
    for p, i in groups(rollouts):
        pool = H[p][mask[p]] if scope == "group" else H[mask]
        expected[p, i] = z(f64(rollouts.rewards)[p, i])[:, None] * (
            1 + 0.2 * (H[p, i] - pool.mean()) / (pool.std(ddof=1) + 1e-6))
    close(run("aepo_advantage", rollouts, scope=scope), expected * mask, rtol=1e-4, atol=1e-5)


# ScaleRL


def test_scalerl_worked_example():
    """With CISPO against the sampler's log-probs: advantages, loss and gradient."""
    p = pad_lists([[[0.75, 0.22, 0.4], [0.2, 0.15]]], fill=1)
    behavior = pad_lists([[[0.5, 0.25, 0.32], [0.32, 0.25]]], fill=1)
    rollouts = from_lists([[1, 0]], [[3, 2]]).replace(behavior_logprobs=jnp.log(behavior))
    A, _ = advantages.make("scalerl").update(rollouts, ())
    close(A[0, :, 0], [0.999998, -0.999998], rtol=1e-6)
    objective = objectives.make("cispo", max_ratio=5.0, anchor="behavior", aggregation="prompt_mean")
    loss, _ = objective.update(jnp.log(p), rollouts, A, ())
    close(loss, 0.153029342, rtol=1e-5)


def test_scalerl_drops_prompts_without_signal_from_std_and_mean():
    """One of three prompts is kept: sigma is its own, and the mean over three prompts equals the mean over one."""
    values = per_rollout("scalerl", from_lists([[1, 0, 0, 0], [1, 1, 1, 1], [0.3, 0.3]]))
    a = np.array([0.75, -0.25, -0.25, -0.25])
    close(values[0], 3 * a / (np.sqrt(np.mean(a**2)) + 1e-6), rtol=1e-6)
    assert not np.any(values[1:])


def test_scalerl_running_second_moment():
    """The first batch initialises it; 4 kept rollouts replace 1 - 0.999^4 of it; a batch without a signal changes nothing."""
    estimator = advantages.make("scalerl", variant="running")
    first, second = from_lists([[1, 0], [1, 1]]), from_lists([[2, 0], [0, 4]])
    A, state = estimator.update(first, estimator.init())
    np.testing.assert_allclose(state, 0.25, rtol=1e-6)
    np.testing.assert_allclose(A[..., 0], [[2 / 1.0002, -2 / 1.0002], [0, 0]], rtol=1e-6)  # one of two prompts kept
    A, state = estimator.update(second, state)
    moment = 0.999**4 * 0.25 + (1 - 0.999**4) * (1 + 1 + 4 + 4) / 4
    np.testing.assert_allclose(state, moment, rtol=1e-6)
    np.testing.assert_allclose(A[..., 0], np.array([[1, -1], [-2, 2]]) / (moment**0.5 + 1e-4), rtol=1e-6)
    A, same = estimator.update(from_lists([[1, 1]]), state)
    assert same == state and not np.any(A)


def test_scalerl_agrees_with_numpy():
    rollouts = batch(11, P=5)
    r, live = f64(rollouts.rewards), np.asarray(rollouts.live)
    centred = {p: r[p, i] - r[p, i].mean() for p, i in groups(rollouts)}
    kept = [p for p, a in centred.items() if np.ptp(a) > 0 and live[p].any()]
    sigma = np.concatenate([centred[p] for p in kept]).std()
    factor = live.any(1).sum() / len(kept)
    expect("scalerl", rollouts, lambda p, i: centred[p] / (sigma + 1e-6) * factor * (p in kept))
