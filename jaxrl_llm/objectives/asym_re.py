"""Asymmetric REINFORCE's loss: no ratio, no clip; the estimator's low baseline does the work (arXiv 2506.20520)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.reinforce import reinforce


@objective
def asym_re(*, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = -A log p_t` with the advantages of the estimator `asym_re`, whatever policy sampled the rollouts."""
    return reinforce(aggregation=aggregation, max_len=max_len)
