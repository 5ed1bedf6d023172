"""OAPL's optimal advantage: reward minus the soft value of the prompt (arXiv 2602.19362, used by KARL 2603.05218)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.soft_value import soft_value


@estimator
def karl_oapl(*, beta1: float = 1.0) -> Estimator:
    """`A_i = r_i - V`, `V = beta1 * log(mean of exp(r / beta1))` over the prompt's valid rollouts.

    V is the value of the best policy under a KL penalty beta1 to the generating policy. All-equal groups and groups
    of one get exactly 0. beta1 = 1 is the paper's.
    """
    if not beta1 > 0:
        raise ValueError(f"beta1={beta1} must be positive; large values give the group mean, small ones its maximum")

    def advantages(rollouts):
        return rollouts.rewards - soft_value(rollouts.rewards, rollouts.valid, temperature=beta1)

    return stateless(advantages)
