"""PSR, NSR and W-REINFORCE: reinforce right answers, penalise wrong ones, or both, unequally (arXiv 2506.01347)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.control.nsr_psr import VARIANTS, reinforced
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def nsr_psr(*, variant: str = "weighted", positive_weight: float = 0.1) -> Estimator:
    """`psr`: A = 1 on correct rollouts only; `nsr`: A = -1 on wrong ones only; `weighted`: all, positive_weight or -1.

    Correct as in `Rollouts.correct`; there is no baseline. Excluded rollouts leave the token mean too: kept advantages are
    multiplied by (number of tokens) / (number of kept tokens), see `selection.over_kept`. If nothing is kept, A is 0.
    0.1 is the weight that the paper recommends.
    """
    registry.one_of("variant", variant, VARIANTS)
    positive = 1.0 if variant == "psr" else positive_weight

    def advantages(rollouts):
        correct, mask = rollouts.correct, rollouts.token_mask
        keep = reinforced(correct, rollouts.valid, variant)
        signed = jnp.where(correct, positive, -1.0).astype(rollouts.rewards.dtype)
        return over_kept(masked.to_tokens(signed, mask), keep[..., None] & mask, mask)

    return stateless(advantages)
