"""The optimal token baseline: rewards weighted by the gradient that a rollout has spent up to a token (arXiv 2602.07078)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def in_front(x_PGT: Array, mask_PGT: Array) -> Array:
    """The entries of each rollout where `mask` is True one after another, those of holes and padding behind them."""
    return jnp.take_along_axis(x_PGT, jnp.argsort(~mask_PGT, axis=-1, stable=True), axis=-1)


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
        there = in_front(mask, mask)
        energy = jnp.cumsum(in_front(jnp.where(mask, rollouts.extras["logit_gradients"], 0), mask), axis=-1)
        weight = jnp.where(masked.sum(energy, there, axis=1, keepdims=True) > 0, energy, 1)
        shift = masked.sum(weight * (rewards - mean)[..., None], there, axis=1, keepdims=True)
        total = masked.sum(weight, there, axis=1, keepdims=True)
        baseline = mean[..., None] + shift / jnp.where(total > 0, total, 1)  # [P, 1, T]
        if alone == "raw":
            baseline = jnp.where(masked.count(there, axis=1, keepdims=True) > 1, baseline, 0)
        number = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
        return rewards[..., None] - jnp.take_along_axis(jnp.broadcast_to(baseline, mask.shape), number, axis=-1)

    return stateless(advantages, needs=("rewards", "logit_gradients"))
