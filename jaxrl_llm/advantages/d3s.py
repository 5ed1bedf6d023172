"""D3S: train on the rollouts and tokens with most to teach, then gradually on all (arXiv 2509.22115)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.control.d3s import down_sample
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def d3s(*, total_steps: int = 1000, rollouts_init: float = 0.25, rollouts_final: float = 1.0, tokens_init: float = 0.2,
        tokens_final: float = 1.0, scope: str = "batch", eps: float = 1e-6) -> Estimator:
    """Group z-score on the tokens that `control.d3s.down_sample` keeps, 0 on others; the state counts the steps.

    The shares of rollouts and tokens move linearly from `_init` to `_final` in `total_steps`. A is normalised over all
    rollouts and not again after the selection. Dropped tokens leave the token mean: kept advantages are multiplied by
    (number of tokens) / (number of kept tokens), see `selection.over_kept`. The shares and steps are
    ours, the paper's are unconfirmed; eps as in `grpo`.
    """
    registry.one_of("scope", scope, ("batch", "group"))
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1: the number of calls after which all is kept")

    def advantages(rollouts, step):
        mask = rollouts.token_mask
        scores = group_z_score(rollouts.rewards, rollouts.valid, eps=eps)
        progress = jnp.minimum(step / total_steps, 1)
        rollout_share = (1 - progress) * rollouts_init + progress * rollouts_final
        token_share = (1 - progress) * tokens_init + progress * tokens_final
        _, keep = down_sample(scores, rollouts.entropies, mask, rollout_share=rollout_share, token_share=token_share,
                              scope=scope)
        return over_kept(masked.to_tokens(scores, mask), keep, mask), step + 1

    return stateful(lambda: jnp.int32(0), advantages, needs=("rewards", "entropies"))
