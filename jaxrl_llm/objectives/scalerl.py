"""ScaleRL's loss: a truncated importance weight against the sampler, one mean per prompt (arXiv 2510.13786)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.cispo import cispo


@objective
def scalerl(*, max_ratio: float = 5.0, aggregation: str = "prompt_mean", max_len: int | None = None) -> Objective:
    """`l_t = -w_t A_t log p_t`, `w_t = stop_gradient(min(exp(log p_t - behavior_logprobs_t), max_ratio))`.

    This is `cispo` against the sampler. Prompts that the estimator `scalerl` drops leave the mean through its advantages.
    The bound is the paper's, which reports that 4 to 8 work equally well; TRL has 5 too.
    """
    return cispo(max_ratio=max_ratio, anchor="behavior", aggregation=aggregation, max_len=max_len)
