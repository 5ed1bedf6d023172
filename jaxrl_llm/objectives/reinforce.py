"""The plain policy-gradient loss (Williams 1992), for one update per batch of on-policy rollouts."""
from jaxrl_llm.objectives.base import Objective, objective, token_objective


@objective
def reinforce(*, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = -A_t * log p_t`. Its value does not measure progress; its gradient is the policy gradient's estimator."""

    def token_loss(logprobs, rollouts, advantages):
        return -advantages * logprobs, {}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len)
