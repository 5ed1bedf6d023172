"""Functional groups, hints, shifted baselines, box rewards, rejection and minimum variance on small numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.adhint_advantage import entropy_agreement
from jaxrl_llm.advantages.gui_g1_weights import size_weights
from jaxrl_llm.control.hint_share import hint_ratio
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.rewards.box import box_iou, grounding_reward


def first_token(slug, rollouts, **hyper):
    return np.asarray(advantages.make(slug, **hyper).update(rollouts, ())[0])[..., 0]


# Functional groups: one prompt, two episodes of an attacker and two defenders.
AGENTS = from_lists([[1, 0, 0.5, -1, 1, 0.5]], extras={
    "functional_group": np.array([[0, 1, 1, 0, 1, 1]]), "traj": np.array([[0, 0, 0, 1, 1, 1]])})


def test_shared_baseline_of_functional_groups():
    np.testing.assert_allclose(first_token("advevo_baseline", AGENTS), [[1, -0.5, 0, -1, 0.5, 0]], atol=1e-7)
    episode = first_token("advevo_baseline", AGENTS, scope="episode")
    np.testing.assert_allclose(episode, [[0, -0.25, 0.25, 0, 0.25, -0.25]], atol=1e-7)
    scaled = first_token("advevo_baseline", AGENTS, norm_std=True)
    defenders = np.array([0, 0.5, 1, 0.5])
    np.testing.assert_allclose(scaled[0, [1, 2, 4, 5]], (defenders - 0.5) / (defenders.std(ddof=1) + 1e-6), rtol=1e-5)


def test_dead_agents_do_not_count_and_the_batch_can_share():
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), AGENTS)
    two = two.replace(rewards=two.rewards.at[1].add(2), valid=two.valid.at[0, 4].set(False))
    prompt = first_token("advevo_baseline", two)
    np.testing.assert_allclose(prompt[0], [1, -1 / 3, 1 / 6, -1, 0, 1 / 6], atol=1e-6)
    batch = first_token("advevo_baseline", two, scope="batch")
    mean = np.mean([0, 0.5, 0.5, 2, 2.5, 3, 2.5])
    np.testing.assert_allclose(batch[1], [2, 2 - mean, 2.5 - mean, 0, 3 - mean, 2.5 - mean], atol=1e-6)


# ADHint: four unaided rollouts, four aided ones of two hint tokens and one of their own.
HINTED = np.array([[False] * 4 + [True] * 4])
HINTS = from_lists(
    [[1, 0, 0, 0, 1, 1, 1, 0]], lengths=[[3] * 8], entropies=np.tile(np.float32([0.5, 2.0, 1.0]), (1, 8, 1)),
    extras={"hinted": HINTED, "hint_mask": HINTED[..., None] & np.array([True, True, False])})


def test_hints_reweigh_advantages_and_their_own_tokens():
    values = np.asarray(advantages.make("adhint_advantage").update(HINTS, ())[0])
    np.testing.assert_allclose(
        values[0, :, 2], [1.1692657] + [-0.7015594] * 3 + [0.7015594] * 3 + [-1.1692657], atol=3e-6)
    np.testing.assert_allclose(values[0, 4, :2], [0.3507797, 0.3507797], atol=2e-6)
    assert not np.any(values[0, 7, :2])
    np.testing.assert_allclose(values[0, 0, :2], values[0, 0, 2])
    squared = np.asarray(advantages.make("adhint_advantage", power=2.0).update(HINTS, ())[0])
    np.testing.assert_allclose(squared[0, 4, :2], 0.7015594 / 4, atol=2e-6)


def test_without_help_hints_reduce_to_grpo():
    def both(rollouts):
        return first_token("adhint_advantage", rollouts), first_token("grpo", rollouts)

    worse = HINTS.replace(rewards=jnp.array([[1.0, 1, 0, 0, 0, 0, 0, 1]]), extras={
        "hinted": jnp.asarray(HINTED), "hint_mask": jnp.zeros((1, 8, 3), bool)})
    alone = HINTS.replace(extras={"hinted": jnp.ones((1, 8), bool), "hint_mask": jnp.zeros((1, 8, 3), bool)})
    for rollouts in (worse, alone):
        np.testing.assert_array_equal(*both(rollouts))
    assert not np.any(first_token("adhint_advantage", HINTS.replace(rewards=jnp.ones((1, 8)))))


def test_entropy_agreement_at_zero():
    entropies, hint = jnp.array([[[0.0, 0.0, 3.0]]]), jnp.array([[[True, False, False]]])
    assert np.array_equal(entropy_agreement(entropies, hint, jnp.array([[[False, True, False]]]), 1.0), [[[1, 1, 1]]])
    assert np.array_equal(entropy_agreement(entropies, hint, jnp.array([[[False, False, True]]]), 1.0), [[[0, 1, 1]]])


def test_hint_schedule():
    rewards, valid = jnp.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]), np.ones((4, 4), bool)
    valid[1, 3] = False
    ratio = hint_ratio(rewards, jnp.asarray(valid), jnp.array([0.0, 0.3, 0.3, -0.7]))
    np.testing.assert_allclose(ratio, [0.6, 0, 0.8, 0], rtol=1e-6)


def test_asymmetric_baseline():
    rollouts = from_lists([[1, 0], [0.5, 0.5], [2]])
    expected = [[0.6, -0.4], [0.1, 0.1], [2, 0]]
    np.testing.assert_allclose(first_token("asym_re", rollouts), expected, atol=1e-7)
    np.testing.assert_allclose(first_token("asym_re", rollouts, baseline_shift=0.0)[1], 0, atol=1e-7)


# GUI-G1: three images of 400 x 300 and two predictions each, the target itself and moved by four pixels.
TARGETS = jnp.array([[10.0, 10, 30, 30], [0, 0, 200, 150], [100, 100, 140, 125]])
IMAGES = jnp.full((3, 2), jnp.array([400.0, 300.0]))
PREDICTED = jnp.stack([TARGETS, TARGETS + 4], axis=1)


@pytest.mark.slow
def test_boxes():
    np.testing.assert_allclose(size_weights(TARGETS, IMAGES), [1.5, 0.5, 0.891892], rtol=1e-6)
    np.testing.assert_allclose(size_weights(TARGETS[:1], IMAGES[:1]), 1)
    np.testing.assert_allclose(box_iou(PREDICTED[:, 1], TARGETS), [0.470588, 0.911802, 0.607717], rtol=1e-5)
    reward = grounding_reward(PREDICTED, jnp.ones((3, 2), bool), TARGETS, IMAGES)
    np.testing.assert_allclose(
        reward, [[1.375, 1.241188], [1.375, 1.351492], [1.375, 1.275471]], rtol=1e-6)
    rollouts = Rollouts(mask=jnp.ones((3, 2, 1), bool), valid=jnp.ones((3, 2), bool), rewards=reward,
                        extras={"target_weights": jnp.array([1.5, 0.5, 2.0])})
    centred = np.array([[0.066906], [0.011754], [0.049765]]) * [1, -1]
    np.testing.assert_allclose(
        first_token("gui_g1_weights", rollouts), centred * [[1.5], [0.5], [2]], atol=2e-6)


def test_boxes_that_miss():
    one = jnp.ones((1, 1), bool)
    far = jnp.array([[[300.0, 200, 400, 300]]])
    reward = grounding_reward(far, one, TARGETS[:1], IMAGES[:1])
    close = 4 / (1 / (1 - 290 / 400) + 1 / (1 - 190 / 300) + 1 / (1 - 370 / 400) + 1 / (1 - 270 / 300))
    np.testing.assert_allclose(reward, 0.125 * close, rtol=1e-5)
    assert grounding_reward(far, ~one, TARGETS[:1], IMAGES[:1]) == 0
    assert grounding_reward(jnp.array([[[410.0, 10, 430, 30]]]), one, TARGETS[:1], IMAGES[:1]) == 0
    touching = jnp.array([29.0, 10, 50, 30])
    assert box_iou(touching, TARGETS[0]) == 0 and box_iou(touching.at[0].set(28.0), TARGETS[0]) > 0
    assert box_iou(jnp.zeros(4), jnp.zeros(4)) == 0
    edge = jnp.array([[[20.0, 20, 40, 40]]])  # its centre is the target's corner
    assert grounding_reward(edge, one, TARGETS[:1], IMAGES[:1]) > 1


def test_rejection():
    rollouts = from_lists([[1, -1, -1], [1, 1, 1], [0, 0, 0], [0]])
    plain = first_token("reinforce_rej", rollouts)
    np.testing.assert_array_equal(plain, [[1, -1, -1], [0] * 3, [0] * 3, [-1, 0, 0]])
    graded = from_lists([[1, 0, 0.75], [0.3, 0.3, 0.3]])
    np.testing.assert_array_equal(first_token("reinforce_rej", graded, variant="raw"), [[1, 0, 0.75], [0] * 3])
    np.testing.assert_array_equal(first_token("reinforce_rej", graded), [[1, -1, 1], [0] * 3])
    positive = first_token("reinforce_rej", from_lists([[1, 0], [1, 1], [0, -1]]), variant="raft_pp")
    np.testing.assert_array_equal(positive, [[1, 0], [1, 1], [0, 0]])


def vcpo_batch(rewards, norms, old, behavior, valid=None):
    lengths = [[len(tokens) for tokens in row] for row in old]
    with np.errstate(divide="ignore"):
        old, behavior = np.log(pad_lists(old)), np.log(pad_lists(behavior))
    rollouts = from_lists(rewards, lengths=lengths, old_logprobs=old, behavior_logprobs=behavior,
                          extras={"score_sq_norms": np.float32(norms)})
    return rollouts if valid is None else rollouts.replace(valid=jnp.asarray(valid))


OLD, BEHAVIOR = [[[0.75, 0.22, 0.4], [0.2, 0.15]]], [[[0.5, 0.25, 0.32], [0.32, 0.25]]]


def test_minimum_variance_baseline():
    rollouts = vcpo_batch([[1, 0]], [[2, 1]], OLD, BEHAVIOR)
    np.testing.assert_allclose(first_token("vcpo", rollouts), [[0.050352, -1.949648]], atol=1e-6)
    equal = rollouts.replace(rewards=jnp.full((1, 2), 0.3))
    assert not np.any(first_token("vcpo", equal))
    double = 1.65**4 * 2 / (1.65**4 * 2 + 0.375**4)
    np.testing.assert_allclose(
        first_token("vcpo", rollouts, double_weight=True), [[(1 - double) / 0.5, -double / 0.5]], atol=1e-5)
    capped = 1.65**2 * 0.5**2 * 2 / (1.65**2 * 0.5**2 * 2 + 0.375**4)
    values = first_token("vcpo", rollouts, double_weight=True, max_weight=0.5)
    np.testing.assert_allclose(values, [[(1 - capped) / 0.5, -capped / 0.5]], atol=1e-5)


def test_minimum_variance_baseline_against_float64():
    rng = np.random.default_rng(0)
    old, behavior = (rng.uniform(0.2, 0.9, (3, 4, 2)) for _ in range(2))
    rewards, norms = rng.normal(size=(3, 4)), rng.gamma(2, size=(3, 4))
    valid = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0]], bool)
    rollouts = vcpo_batch(rewards.tolist(), norms, old.tolist(), behavior.tolist(), valid)
    influence = np.where(valid, np.prod(old / behavior, axis=-1) ** 2 * norms, 0)
    spread = np.array([rewards[p][valid[p]].std() for p in range(3)])[:, None]
    spread[2] = 1
    for scope, axis in (("prompt", 1), ("batch", None)):
        baseline = (influence * rewards).sum(axis, keepdims=True) / influence.sum(axis, keepdims=True)
        expected = np.where(valid, (rewards - baseline) / spread, 0)
        np.testing.assert_allclose(first_token("vcpo", rollouts, scope=scope), expected, atol=2e-5)


def test_the_baseline_minimises_the_variance_of_the_estimate():
    """Over a finite set of completions, E[w^2 g (r - b)^2] is smallest at the b behind the advantages."""
    rng = np.random.default_rng(3)
    rewards, norms, weights = rng.random(6), rng.gamma(2, size=6), np.exp(rng.normal(size=6))
    rollouts = vcpo_batch([rewards.tolist()], [norms], [[[w / 100] for w in weights]], [[[0.01]] * 6])
    values = first_token("vcpo", rollouts)[0]
    baseline = rewards - values * rewards.std()
    np.testing.assert_allclose(baseline, baseline[0], atol=1e-5)

    def second_moment(b):
        return np.sum(weights**2 * norms * (rewards - b) ** 2)

    assert second_moment(baseline[0]) < min(second_moment(b) for b in (0, rewards.mean(), baseline[0] + 0.01,
                                                                       baseline[0] - 0.01))


@pytest.mark.parametrize("slug, hyper", [
    ("advevo_baseline", {"scope": "prompts"}), ("vcpo", {"scope": "batches"}), ("reinforce_rej", {"variant": "sign"}),
    ("oprl", {"norm": "grpo_sd"}), ("oprl", {"group_stats": "all_step"})])
def test_nearest_match(slug, hyper):
    with pytest.raises(ValueError, match="Did you mean"):
        advantages.make(slug, **hyper)


def test_swe_rl_counts_partial_similarity_unless_discrete():
    rollouts = from_lists([[1.0, 0.977273, 0.0, -1.0]])
    for variant, counted in (("continuous", [1, 0.977273, 0, -1]), ("discrete", [1, 0, 0, -1])):
        values, _ = advantages.make("swe_rl_reward", variant=variant).update(rollouts, ())
        expected = (counted - np.mean(counted)) / (np.std(counted, ddof=1) + 1e-6)
        np.testing.assert_allclose(values[0, :, 0], expected, rtol=1e-5)
