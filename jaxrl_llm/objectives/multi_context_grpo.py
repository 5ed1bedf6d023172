"""Multi-context GRPO: a clipped loss over the conversations of each trajectory (MemSearcher, arXiv 2511.02805)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, check
from jaxrl_llm.maths import masked, segments
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip
from jaxrl_llm.tools import registry


def trajectory_weights(rollouts: Rollouts) -> Array:
    """f32[P, G, T]: 1 / (trajectories with tokens * tokens of the token's trajectory), the rows with its `traj`."""
    group = segments.same(rollouts.live, rollouts.extras["traj"])
    tokens = segments.total(rollouts.lengths, group) * masked.count(segments.first(group))
    return masked.to_tokens(1 / jnp.maximum(tokens, 1), rollouts.token_mask)


@objective
def multi_context_grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0,
                       aggregation: str = "token_mean") -> Objective:
    """`ppo_clip` for conversations as rows on the G axis.

    `aggregation`: `token_mean` over all tokens of all conversations, as in the published code, where trajectories with
    more turns weigh more; or `trajectory_mean`: token mean inside each trajectory, then the mean over trajectories.
    Extras: `traj` i32[P, G] for `trajectory_mean`. The numbers are those of the published code, which has a term
    `kl(0.001)`.
    """
    registry.one_of("aggregation", aggregation, ("token_mean", "trajectory_mean"))
    clipped = ppo_clip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if aggregation == "token_mean":
        return clipped

    def weights(rollouts):
        return {**clipped.weights(rollouts), "loss": trajectory_weights(check(rollouts, "traj"))}

    def update(logprobs, rollouts, advantages, state):
        if rollouts.loss_weights is None:
            rollouts = rollouts.replace(loss_weights=weights(rollouts))
        return clipped.update(logprobs, rollouts, advantages, state)

    return clipped._replace(update=update, weights=weights, needs=(*clipped.needs, "traj"))
