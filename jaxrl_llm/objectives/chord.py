"""CHORD: supervised learning on expert traces as a dynamically weighted part of the RL loss (arXiv 2508.11408)."""
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxrl_llm.data.experts import expert_tokens
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.luffy import probability
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry


@objective
def chord(*, weighting: str = "phi", warmup: int = 200, decay: int = 400, peak: float = 0.5, valley: float = 0.02,
          cutoff: float | None = None, clip_low: float = 0.2, clip_high: float = 0.2) -> Objective:
    """`(1 - mu) * L_policy + mu * L_expert`, each the mean over its own tokens, 0 if it has none.

    L_policy is the clipped surrogate on the policy's tokens; L_expert is `-w log p` on tokens of `extras["expert"]`, w
    detached: `phi` p (1 - p), `none` 1, `importance` p. mu rises linearly to `peak` in `warmup` updates, falls to
    `valley` along a cosine in `decay` updates and stays there. Expert tokens are those of given texts beside the prompts, or
    of completions that an expert began. With `cutoff` < 1 expert tokens with p above it have no
    gradient. The defaults are those of the configuration shipped in Trinity-RFT; CHORD-mu has `warmup=0`, `decay=200`,
    `peak=0.9`, `valley=0.05` and `weighting="none"`, CHORD-phi a constant mu of 0.1.
    """
    registry.one_of("weighting", weighting, ("phi", "none", "importance"))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, warmup + decay, valley)

    def shares(rollouts):
        expert = expert_tokens(rollouts)
        sides = {"policy": rollouts.token_mask & ~expert, "expert": expert}
        return {name: token_weights(rollouts.replace(mask=mask), "token_mean") for name, mask in sides.items()}

    def token_loss(logprobs, rollouts, advantages, step):
        mask, expert, mu = rollouts.token_mask, expert_tokens(rollouts), schedule(step)
        ratio = token_ratio(logprobs, rollouts.old_logprobs, mask)
        own, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        prob = lax.stop_gradient(probability(logprobs, mask))
        weight = {"phi": prob * (1 - prob), "none": jnp.ones_like(prob), "importance": prob}[weighting]
        likely = logprobs if cutoff is None else jnp.minimum(logprobs, float(np.log(cutoff)))
        metrics = {"mu": jnp.full(rollouts.valid.shape, mu), "clip_fraction": clipped & ~expert,
                   "expert_fraction": expert, "max/ratio": jnp.where(expert, 0, ratio)}
        return {"policy": (1 - mu) * own, "expert": -mu * weight * likely}, metrics

    made = token_objective(token_loss, needs=("expert",), extra_weights=shares,
                           init=lambda: jnp.int32(0), advance=lambda step: step + 1, reads_old=True)
    return made._replace(reads_apart=True)
