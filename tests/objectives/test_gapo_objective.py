"""GAPO: literal numbers, its bound by numbers of right completions, finite differences, and a public reimplementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists
from jaxrl_llm.objectives.gapo import upper_clip
from jaxrl_llm.setup import parts, why
from jaxrl_llm.setup.config import default_config

close = np.testing.assert_allclose


def run(slug, rollouts, new, advantage, **hyper):
    objective = objectives.make(slug, **hyper)
    (loss, (metrics, _)), gradient = jax.jit(jax.value_and_grad(objective.update, has_aux=True))(new, rollouts, advantage, ())
    return float(loss), metrics, np.asarray(gradient)


def test_bounds_of_one_two_three_and_all_right_and_of_none():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    bounds = upper_clip(from_lists(rewards), 3e-3, 6e-3)
    close(bounds, [[6e-3] + [3e-3] * 3, [5e-3] * 2 + [3e-3] * 2, [4e-3] * 3 + [3e-3], [3e-3] * 4, [3e-3] * 4], rtol=1e-6)
    few = from_lists([[1, 0, 0, 1]])
    few = few.replace(valid=jnp.array([[True, False, True, False]]))
    close(upper_clip(few, 0.2, 0.28)[0, [0, 2]], [0.28, 0.2], rtol=1e-6)  # one of two
    close(upper_clip(from_lists([[1]]), 0.2, 0.28), [[0.28]], rtol=1e-6)
    record = from_lists([[0.4, 0.1]], extras={"correct": jnp.array([[True, False]])})
    close(upper_clip(record, 0.2, 0.28), [[0.28, 0.2]], rtol=1e-6)  # the record, not the size of a reward


# One and two of three completions of one token are right; their ratios are 1.27, 1.27, 0.7.
REWARDS = [[1, 0, 0], [1, 1, 0]]
NEW = jnp.log(jnp.array([[1.27, 1.27, 0.7]] * 2))[..., None] - 1
ROLLOUTS = from_lists(REWARDS, lengths=[[1] * 3] * 2, old_logprobs=jnp.full((2, 3, 1), -1.0))


@pytest.mark.parametrize("slug", ["gapo", "gapo_token"])
def test_worked_example(slug):
    """The only right one of three may reach 1.28, one of two right ones 1.24: its loss is flat. Wrong ones stop at 0.8.

    A = r - mean. The first prompt has losses -2/3 * 1.27, 1/3 * 1.27 and 1/3 * 0.8, the second -1/3 * 1.24 twice (of which one
    has the ratio 1.27, the other too) and 2/3 * 0.8.
    """
    A, _ = advantages.make("dr_grpo").update(ROLLOUTS, ())
    loss, metrics, gradient = run(slug, ROLLOUTS, NEW, A, clip_low=0.2, clip_high=0.28)
    close(loss, (-2 / 3 * 1.27 + 1.27 / 3 + 0.8 / 3 - 2 / 3 * 1.24 + 2 / 3 * 0.8) / 6, rtol=1e-5)
    close(gradient[..., 0], [[-2 / 3 * 1.27 / 6, 1.27 / 18, 0], [0, 0, 0]], atol=1e-6)
    close(metrics["clip_fraction"], 4 / 6, rtol=1e-6)
    close(metrics["clip_high"], (0.28 + 0.2 + 0.2 + 0.24 + 0.24 + 0.2) / 6, rtol=1e-6)


def batch():
    """A random batch of float64 with an invalid rollout, beside the ratios that it has."""
    rng = np.random.default_rng(5)
    P, G, T = 3, 5, 4
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    valid = np.ones((P, G), bool)
    valid[1, 2] = False
    old = -rng.gamma(1.0, size=(P, G, T))
    rewards = rng.integers(0, 2, (P, G)).astype(float)
    rollouts = Rollouts(*map(jnp.asarray, (mask, valid)), rewards=jnp.asarray(rewards), old_logprobs=jnp.asarray(old))
    return rollouts, rewards, valid, mask & valid[..., None], old, old + 0.3 * rng.normal(size=old.shape)


@pytest.mark.parametrize("slug, low, high", [("gapo", 0.05, 0.2), ("gapo_token", 0.2, 0.28)])
def test_as_a_public_reimplementation_and_by_finite_differences(slug, low, high):
    """`epsilon_high_for_group` of the recipe `adaptive-clip` in TRL's loss, by `importance_sampling_level` sequence or token.

    Gradients are those of central differences.
    """
    with jax.enable_x64(True):
        rollouts, rewards, valid, mask, old, new = batch()
        A, _ = advantages.make("dr_grpo").update(rollouts, ())

        def epsilon_high_for_group(correct, k):
            correct = max(1, min(k, correct))
            return low + (high - low) * (k - correct) / (k - 1)

        epsilon_high = np.array([[epsilon_high_for_group(int(scores[there].sum()), there.sum())] for scores, there in
                                 zip(rewards, valid)])[..., None]

        def compute_loss(per_token_logps):
            log_ratio = np.where(mask, per_token_logps - old, 0)
            lengths = np.maximum(mask.sum(-1, keepdims=True), 1)
            coef_1 = np.exp(log_ratio.sum(-1, keepdims=True) / lengths if slug == "gapo" else log_ratio)
            losses = -np.minimum(coef_1 * A, np.clip(coef_1, 1 - low, 1 + epsilon_high) * A) * mask
            return (losses.sum(-1) / lengths[..., 0]).sum() / valid.sum() if slug == "gapo" else losses.sum() / mask.sum()

        loss, _, gradient = run(slug, rollouts, jnp.asarray(new), A, clip_low=low, clip_high=high)
        close(loss, compute_loss(new), rtol=1e-9)
        for place in np.ndindex(new.shape):
            step = np.zeros_like(new)
            step[place] = 1e-6
            close(gradient[place], (compute_loss(new + step) - compute_loss(new - step)) / 2e-6, atol=1e-7)


def test_equal_bounds_are_those_of_gspo_and_of_ppo():
    rollouts, *_, new = batch()
    rollouts, new = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) if x.dtype == float else x, (rollouts, new))
    A, _ = advantages.make("grpo").update(rollouts, ())
    for ours, theirs in (("gapo", "gspo"), ("gapo_token", "ppo_clip")):
        hyper = {"clip_low": 0.1, "clip_high": 0.1}
        close(run(ours, rollouts, new, A, **hyper)[2], run(theirs, rollouts, new, A, **hyper)[2], rtol=1e-6)


def test_groups_that_are_cut_into_rows_are_refused():
    config = default_config()
    config.method, config.objective, config.sampling.max_group, config.allocation = "dars", "gapo", 32, ""
    lines = why.conflicting(config, parts.make_parts(config, 32))
    assert lines == ["objective 'gapo' counts the right completions of a prompt, and the allocation rule 'dars' gives prompts "
                     "unequal numbers of rollouts, which are cut into rows; leave out one of them"]
