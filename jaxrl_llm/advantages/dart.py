"""DART-GUI: rewards normalised over the steps of a group, and no gradient from steps of low entropy (arXiv 2509.23866)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.segments import step_totals


@estimator
def dart(*, quantile: float = 0.2) -> Estimator:
    """`A = (R - mean) / std`, population std, over the rewards of all steps: a trajectory of L steps counts L times.

    A group whose steps are all equal gets 0. So does a step whose mean `entropies` f32[P, G, T] are below this `quantile` of
    all steps in the batch: it adds nothing to a surrogate, and counts in the mean over steps all the same. A KL term of such a
    step stays. Steps are the runs of `step_ids`; without them a rollout is one step. The quantile is the paper's. Raises
    ValueError for one outside [0, 1).
    """
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile={quantile} of the entropies of steps; give 0 or more and less than 1")

    def advantages(rollouts):
        mask, rewards = rollouts.token_mask, rollouts.rewards
        ids = jnp.zeros(mask.shape, jnp.int32) if rollouts.step_ids is None else rollouts.step_ids
        entropies = mask.astype(rewards.dtype) if not quantile else jnp.where(mask, rollouts.entropies, 0)
        entropy, last = step_totals(entropies, ids, mask, mean=True)
        of_steps, ends = (x.reshape(len(mask), -1) for x in (masked.to_tokens(rewards, last), last))
        std = masked.group_std(of_steps, ends, ddof=0)
        A = jnp.where(std > 0, (rewards - masked.group_mean(of_steps, ends)) / jnp.where(std > 0, std, 1), 0)
        if not quantile:
            return A
        least = jnp.nanquantile(jnp.where(last, entropy, jnp.nan), quantile)
        return jnp.where(entropy >= least, A[..., None], 0)

    return stateless(advantages, needs=("rewards", "entropies") if quantile else ("rewards",))
