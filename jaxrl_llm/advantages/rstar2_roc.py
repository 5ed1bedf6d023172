"""GRPO-RoC of rStar2-Agent: oversample, keep a mix of failures and the cleanest successes (arXiv 2508.20722)."""
import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.control.rstar2_roc import mess_penalty, resample_on_correct
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

COUNTS = ("tool_calls", "error_words", "answer_blocks", "turns", "malformed")


@estimator
def rstar2_roc(*, train_rollouts: int = 16, min_negative: int = 2, min_positive: int = 2, variant: str = "code", seed: int = 0,
               eps: float = 1e-6) -> Estimator:
    """Group z-score over the `train_rollouts` rollouts that `resample_on_correct` keeps, 0 on others.

    Sample twice as many as are kept. Reads `extras` i32[P, G] `tool_calls`, `error_words` (results that contain the word
    "error", by which the published code knows failed calls), `answer_blocks`, `turns` (of the assistant) and bool[P, G]
    `malformed`. `variant="paper"` draws at random (from `seed` and the state, a step count) where the published code,
    `"code"`, ranks. Dropped rollouts leave the token mean: kept advantages are multiplied by (number of tokens) / (number of
    kept tokens). Raises ValueError if the two minima exceed `train_rollouts`. The numbers are those of the published recipe,
    which samples 32.
    """
    registry.one_of("variant", variant, ("code", "paper"))
    if min_negative + min_positive > train_rollouts:
        raise ValueError(f"min_negative={min_negative} and min_positive={min_positive} do not fit into "
                         f"train_rollouts={train_rollouts}; lower them")

    def advantages(rollouts, key=None):
        rewards, valid, mask = rollouts.rewards, rollouts.valid, rollouts.token_mask
        penalty = mess_penalty(*(rollouts.extras[name] for name in COUNTS)).astype(rewards.dtype)
        keep = resample_on_correct(rewards, valid, penalty, size=train_rollouts, min_negative=min_negative,
                                   min_positive=min_positive, key=key)
        scores = group_z_score(rewards, keep, eps=eps)
        return over_kept(masked.to_tokens(jnp.where(keep, scores, 0), mask), mask & keep[..., None], mask)

    def sampled(rollouts, step):
        return advantages(rollouts, jax.random.fold_in(jax.random.key(seed), step)), step + 1

    needs = ("rewards", *COUNTS)
    if variant == "paper":
        return stateful(lambda: jnp.int32(0), sampled, needs=needs)
    return stateless(advantages, needs=needs)
