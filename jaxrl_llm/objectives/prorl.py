"""ProRL's loss: a high upper clip bound and a small KL to a reference that is renewed (arXiv 2505.24864)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip


@objective
def prorl(*, clip_low: float = 0.2, clip_high: float = 0.4, kl_coef: float = 1e-4, kl_estimator: str = "k3",
          aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) + kl_coef KL_t`, KL to `ref_logprobs`.

    The clip range is the paper's, the coefficient that of the follow-up report (arXiv 2507.12507), whose own recipe has
    `clip_high=0.27` and `kl_estimator="k2"`. `jaxrl_llm.control.reference_reset` says when the reference is replaced.
    """
    return ppo_clip(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, kl_estimator=kl_estimator,
                    aggregation=aggregation, max_len=max_len)
