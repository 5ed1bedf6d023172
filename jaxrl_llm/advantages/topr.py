"""TOPR's baseline: a shift that decides which rollouts count as positive (arXiv 2503.14286)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless


@estimator
def topr(*, shift: float = 0.0) -> Estimator:
    """`A = r - shift`. With rewards +1 and -1 use a shift of 0; with 1 and 0 use 0.5, or failures teach nothing.

    The paper's best shift is unconfirmed.
    """
    return stateless(lambda rollouts: rollouts.rewards - shift)
