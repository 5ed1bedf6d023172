"""Group-relative REINFORCE with optional balancing of wrong and right rollouts, RED-Drop (arXiv 2509.24203)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.maths import draws, masked
from jaxrl_llm.tools import registry


@estimator
def rec_family(*, scale: bool = False, drop: str = "none", eps: float = 1e-6, seed: int = 0) -> Estimator:
    """`A_i = r_i - mean` over the kept rollouts of the prompt; with `scale` divided by their population std + `eps`.

    `drop="balance"`: if rollouts below the group mean outnumber the others, random ones of them are dropped until both
    numbers are equal; dropped rollouts get 0. The state counts updates, so that every batch has its own draw. A group with
    at most one kept rollout has mean 0 and std 1, hence A = r. eps is that of the published code in Trinity-RFT.
    """
    registry.one_of("drop", drop, ("none", "balance"))

    def kept(rollouts, step):
        valid = rollouts.valid
        if drop == "none":
            return valid
        below = valid & (rollouts.rewards < masked.group_mean(rollouts.rewards, valid) - 1e-6)  # rounding of the mean
        surplus = masked.group_count(below) - masked.group_count(valid & ~below)
        scores = draws.uniform(jax.random.fold_in(jax.random.key(seed), step), valid.shape)
        rank = jnp.argsort(jnp.argsort(jnp.where(below, scores, 2), axis=1), axis=1)  # 2 is above every score
        return valid & ~(below & (rank < surplus))

    def advantages(rollouts, step):
        rewards, keep = rollouts.rewards, kept(rollouts, step)
        values = rewards - masked.unless_alone(masked.group_mean(rewards, keep), keep)
        if scale:
            values = values / (masked.unless_alone(masked.group_std(rewards, keep, ddof=0), keep, 1.0) + eps)
        return jnp.where(keep, values, 0), step + 1

    return stateful(lambda: jnp.int32(0), advantages)
