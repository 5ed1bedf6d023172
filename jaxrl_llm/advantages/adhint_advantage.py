"""ADHint: advantages that account for the help of a hint and protect the hint's own tokens (arXiv 2512.13095).

Reconstructed: the direction of the re-weighting, the masking of hint tokens and the comparison of entropies are the
paper's; the joint z-score, the weights `1 +- strength * gap`, the min/max ratio and the constants are ours.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked


def entropy_agreement(entropies_PGT: Array, hint_PGT: Array, continuation_PGT: Array, power: float) -> Array:
    """f32[P, G, T]: `(min(h, hbar) / max(h, hbar)) ** power` on hint tokens, 1 elsewhere and where both are 0.

    h is the policy's entropy at the token, hbar its mean over the rollout's own continuation.
    """
    typical = masked.mean(entropies_PGT, continuation_PGT, axis=-1, keepdims=True)
    low, high = jnp.minimum(entropies_PGT, typical), jnp.maximum(entropies_PGT, typical)
    ratio = jnp.where(high > 0, low / jnp.where(high > 0, high, 1), 1)
    return jnp.where(hint_PGT, ratio**power, 1)


@estimator
def adhint_advantage(*, strength: float = 0.5, power: float = 1.0, eps: float = 1e-6) -> Estimator:
    """`A = a (1 + strength * gap)` for unaided success and aided failure, `a (1 - strength * gap)` for other rollouts.

    a is the z-score in the joint group; `gap = max(0, mean aided reward - mean unaided reward)` of the prompt, 0 when
    it has only one kind. `extras["hinted"]` bool[P, G] marks rollouts that began with a hint, `extras["hint_mask"]`
    bool[P, G, T] its tokens. Hint tokens get 0 where A <= 0, else `A * entropy_agreement`; a clipped surrogate is
    proportional to A, so this weights the loss. Hint tokens need `old_logprobs` of the policy, not of their author.
    """

    def advantages(rollouts):
        rewards, valid, hinted = rollouts.rewards, rollouts.valid, rollouts.extras["hinted"]
        aided, alone = hinted & valid, ~hinted & valid
        gap = jnp.maximum(masked.group_mean(rewards, aided) - masked.group_mean(rewards, alone), 0)
        gap = jnp.where((masked.group_count(aided) > 0) & (masked.group_count(alone) > 0), gap, 0)
        base = group_z_score(rewards, valid, eps=eps)
        base = base * jnp.where((base > 0) != hinted, 1 + strength * gap, 1 - strength * gap)

        mask = rollouts.token_mask
        hint = rollouts.extras["hint_mask"] & aided[..., None] & mask
        weight = entropy_agreement(rollouts.entropies, hint, mask & ~hint, power)
        return jnp.where(hint & (base <= 0)[..., None], 0, base[..., None] * weight)

    return stateless(advantages, needs=("rewards", "entropies", "hinted", "hint_mask"))
