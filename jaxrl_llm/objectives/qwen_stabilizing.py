"""MiniRL: the first-order token surrogate of the sequence reward, corrected for sampler mismatch (arXiv 2512.01374)."""
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import OWN_ROUTES, ROUTES
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import detached_weight, still_moving
from jaxrl_llm.tools.registry import one_of


@objective
def qwen_stabilizing(*, clip_low: float = 0.2, clip_high: float = 0.27, cap: float = 5.0,
                     aggregation: str = "seq_mean_token_sum", max_len: int | None = None, routing: str = "free") -> Objective:
    """`l_t = -M_t w_t A log p_t`, `w = stop_gradient(min(exp(log p - behavior log-prob), cap))`.

    w compares with the sampling engine, so it covers both staleness and the numerical gap between sampler and
    learner. M is 0 where `rho = exp(log p - old log-prob)`, of the learner alone, has left the clip range in the
    direction of A. The numbers are the paper's.

    `routing` says which experts the tokens of a mixture take in the updates: those that the "sampler" took (R3), those that the
    "learner" takes before its first update (R2), or "free", whichever the router then chooses, as in dense models. Gates are
    always the learner's, and gradients flow into them. The paper finds R3 better from four updates on a batch on. Tokens
    without a record, such as those of the prompt, are routed freely.
    """
    kinds = {"free": "", "sampler": ROUTES, "learner": OWN_ROUTES}
    replays = kinds[one_of("routing of qwen_stabilizing", routing, kinds)]

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        weight = detached_weight(token_ratio(logprobs, rollouts.behavior_logprobs, mask), 0, cap)
        moving = still_moving(token_ratio(logprobs, rollouts.old_logprobs, mask), advantages, clip_low, clip_high)
        return -jnp.where(moving, weight * advantages, 0) * logprobs, {"clip_fraction": ~moving, "weight": weight}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), reads_old=True,
                           replays=replays, unknown="old")
