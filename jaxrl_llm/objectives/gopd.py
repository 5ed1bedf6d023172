"""The loss of generalised on-policy distillation: clipped surrogate, corrected for the sampler (arXiv 2602.12125)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.tis_mis import tis_mis


@objective
def gopd(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0, sampler_cap: float = 5.0,
         aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = min(exp(old - behaviour log-prob), sampler_cap) * clipped surrogate of A_t`, at most `-A c` where A < 0.

    This is `tis_mis` with truncated weights. A is a separate log-ratio for each token (`advantages.gopd`). The numbers are
    those of the authors' code.
    """
    return tis_mis(max_ratio=sampler_cap, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
                   aggregation=aggregation, max_len=max_len)
