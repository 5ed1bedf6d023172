"""T1's loss: clipped surrogate, KL to an anchor that follows the policy, entropy bonus (arXiv 2501.11651)."""
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.oneshot_entropy import oneshot_entropy


@objective
def t1(*, kl_coef: float = 1e-3, entropy_coef: float = 1e-3, clip_low: float = 0.2, clip_high: float = 0.2,
       aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho)) + kl_coef * k3_t - entropy_coef * H_t`, `ref_logprobs` from the moving anchor.

    The terms are those of `oneshot_entropy`. Reconstructed: the paper's coefficients are not known, the defaults are our
    choice. `jaxrl_llm.control.moving_reference` moves the anchor.
    """
    return oneshot_entropy(kl_coef=kl_coef, entropy_coef=entropy_coef, clip_low=clip_low, clip_high=clip_high,
                           aggregation=aggregation, max_len=max_len)
