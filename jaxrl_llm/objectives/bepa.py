"""BEPA: what comes from another policy or another prompt is learned by its shaped probability (arXiv 2601.05787)."""
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.luffy import probability
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools.ranges import POSITIVE


@objective(ranges={"gamma": POSITIVE})
def bepa(*, gamma: float = 0.1, clip_low: float = 0.2, clip_high: float = 0.2, aggregation: str = "token_mean",
         max_len: int | None = None) -> Objective:
    """`l = -A p / (p + gamma)` on rollouts that are `replayed` or were written under another text, PPO's loss on others.

    The paper's loss of an injected rollout was not readable; this is LUFFY's form, without a clip. `ppo_clip` in its place has
    clipped ratios to the log-probs of sampling for replayed rollouts. Metrics: `injected_fraction`, the share of such tokens;
    `rare_fraction`, the share of all tokens that are such tokens with p below 0.2.
    """
    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        injected = mask & rollouts.extras["replayed"][..., None]
        if rollouts.role is not None:
            injected = injected | mask & (rollouts.role == Role.ELSEWHERE)
        prob = probability(logprobs, mask)
        ratio = token_ratio(logprobs, rollouts.old_logprobs, mask)
        own, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        metrics = {"clip_fraction": clipped & ~injected, "injected_fraction": injected,
                   "rare_fraction": injected & (prob < 0.2), "max/ratio": jnp.where(injected, 0, ratio)}
        return jnp.where(injected, -advantages * prob / (prob + gamma), own), metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("replayed",), reads_old=True)
