"""The optimal token baseline: rewards weighted by the gradient that a rollout has spent up to a token (arXiv 2602.07078)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def numbers_of(mask_PT: Array) -> Array:
    """i32[P, T], how many trained tokens are before each one."""
    return jnp.maximum(jnp.cumsum(mask_PT, axis=-1, dtype=jnp.int32) - 1, 0)


def sums_by_number(norms_PGT: Array, mask_PGT: Array, rewards_PG: Array) -> Array:
    """f[4, P, T]: for the n-th trained tokens of a prompt's rollouts the sums of W r, W, r and 1, W being the energy so far.

    One rollout of each prompt after another, as all at once would take several copies of the batch.
    """
    mask_GPT, norms_GPT = (jnp.moveaxis(jnp.asarray(of_tokens), 1, 0) for of_tokens in (mask_PGT, norms_PGT))

    def add(sums, rollout):
        mask, norms, rewards = rollout
        energy = jnp.cumsum(jnp.where(mask, norms, 0), axis=-1)
        reward = jnp.broadcast_to(rewards[:, None], mask.shape)
        terms = jnp.stack([energy * reward, energy, reward, jnp.ones_like(energy)])
        # over prompts by vmap, so that prompts on several devices stay where they lie
        at_numbers = jax.vmap(lambda sums, numbers, terms: sums.at[:, numbers].add(terms), in_axes=(1, 0, 1), out_axes=1)
        return at_numbers(sums, numbers_of(mask), jnp.where(mask, terms, 0)), None

    zeros = jnp.zeros((4, *mask_GPT.shape[1:]), rewards_PG.dtype)
    return jax.lax.scan(add, zeros, (mask_GPT, norms_GPT, jnp.asarray(rewards_PG).T))[0]


@estimator
def optimal_token_baseline(*, alone: str = "zero") -> Estimator:
    """`A_it = r_i - B_t`, `B_t = sum_j W_jt r_j / sum_j W_jt` over the rollouts j of the prompt that have a trained token t.

    `W_jt = sum_{s <= t} ||onehot(y_js) - p_js||^2` is the realised energy: p_s is the policy's distribution at the s-th trained
    token y_s, and the norm is that of the gradient of log p(y_s) with respect to the logits, `1 - 2 p(y_s) + sum_v p(v)^2`, by
    the recorder `logit_gradients`. Of all baselines of a token, B_t has the smallest variance of the gradient if the gradients
    of the parameters have the norms of those of the logits. Where all W are 0, rollouts count alike. r is the reward of the
    whole rollout, which is the return of each of its tokens if all of it comes at the end.

    Tokens are compared by their number among trained tokens, so words of an environment do not count (verl's
    `tir_optimal_token_baseline`; without such words `optimal_token_baseline`). A token that no other rollout of its group is
    long enough for has B_t = r_i and A = 0; with `alone="raw"` B_t is 0 and A = r_i, which verl has by default from February
    2026 on (`handle_zero_tail`), also for a group of one. All-equal groups get exactly 0 under `alone="zero"`.
    """
    registry.one_of("alone", alone, ("zero", "raw"))

    def advantages(rollouts):
        rewards, mask = rollouts.rewards, rollouts.token_mask
        mean = masked.group_mean(rewards, rollouts.live)
        sums = sums_by_number(rollouts.extras["logit_gradients"], mask, rewards - mean)
        shift, total = jnp.where(sums[1] > 0, sums[:2], sums[2:])
        baseline = mean + shift / jnp.where(total > 0, total, 1)  # [P, T]
        if alone == "raw":
            baseline = jnp.where(sums[3] > 1, baseline, 0)
        of_rollouts = jax.vmap(lambda mask: jnp.take_along_axis(baseline, numbers_of(mask), axis=-1), in_axes=1, out_axes=1)
        return rewards[..., None] - of_rollouts(mask)

    return stateless(advantages, needs=("rewards", "logit_gradients"))
