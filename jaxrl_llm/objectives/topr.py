"""TOPR, tapered off-policy REINFORCE: bad completions fade out as they become unlikely (arXiv 2503.14286)."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import sequence_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import detached_weight
from jaxrl_llm.tools import registry


@objective
def topr(*, positive: tuple[float, float] = (1.0, 1.0), negative: tuple[float, float] = (0.0, 1.0), level: str = "sequence",
         aggregation: str = "seq_mean_token_sum", max_len: int | None = None) -> Objective:
    """`l = -w A sum_t log p_t`, w detached: `clip(rho, *positive)` where A >= 0, `clip(rho, *negative)` where A < 0.

    rho is the ratio of the whole completion to `behavior_logprobs`, not length-normalised (`level="token"`: the ratio of each
    token, a weaker taper). The rollout's mean advantage decides the sign. With both ranges (1, 1) this is plain REINFORCE, with
    both (0, 1) truncated importance sampling. The default ranges are the paper's; Trinity-RFT and ROLL taper by token.
    """
    registry.one_of("level", level, ("sequence", "token"))

    def token_loss(logprobs, rollouts, advantages):
        mask, behavior = rollouts.token_mask, rollouts.behavior_logprobs
        if level == "token":
            ratio, good = token_ratio(logprobs, behavior, mask), advantages >= 0
        else:
            ratio = sequence_ratio(logprobs, behavior, mask, length_normalised=False)
            good = masked.mean(advantages, mask, axis=-1) >= 0
        weight = jnp.where(good, detached_weight(ratio, *positive), detached_weight(ratio, *negative))
        metrics = {"weight": weight, "positive": good}
        if level == "sequence":
            weight = weight[..., None]
        return -weight * advantages * logprobs, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")
