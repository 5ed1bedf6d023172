"""QwenLong-L1.5's loss: the plain importance-weighted surrogate, one mean per prompt (arXiv 2512.12967)."""
import math

from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip


@objective
def qwenlong_aepo(*, aggregation: str = "prompt_mean", max_len: int | None = None) -> Objective:
    """`l_t = -A_t rho_t`, without clip or KL, for one on-policy update per batch.

    The estimator `qwenlong_aepo` sets some negative advantages to 0; their tokens stay in the denominator.
    """
    return ppo_clip(clip_low=1.0, clip_high=math.inf, aggregation=aggregation, max_len=max_len)
