"""LlamaRL's AIPO: one-sided importance weights for asynchronous, quantised samplers (arXiv 2505.24034)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.cispo import cispo


@objective
def llamarl(*, max_ratio: float = 4.0, aggregation: str = "seq_mean_token_sum", max_len: int | None = None) -> Objective:
    """`l_t = -w_t A log p_t`, `w_t = stop_gradient(min(exp(log p_t - behavior_logprobs_t), max_ratio))`.

    This is `cispo` against the sampler, summed over each completion; the paper uses bounds between 2 and 10, 4 is our
    choice. The weight corrects both for stale parameters and for a sampler of lower precision.
    """
    return cispo(max_ratio=max_ratio, anchor="behavior", aggregation=aggregation, max_len=max_len)
