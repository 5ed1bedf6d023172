"""QwenLong-L1.5: task-wide scale, and an entropy band that switches negative rollouts off (arXiv 2512.12967).

The loss is linear in the advantage, so an advantage of 0 drops a token's gradient; the token stays in the loss's
denominator, as in the paper.
"""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.advantages.qwenlong_l15_adv import task_std
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def qwenlong_aepo(*, scope: str = "task", gate: str = "adaptive", entropy_low: float = 0.15, entropy_high: float = 0.25,
                  eps: float = 1e-6) -> Estimator:
    """`A_i = (r_i - group mean) / (std of all rewards of the same task in the batch + eps)`, then a gate on A < 0.

    `scope="task"` reads `extras["task"]` i32[P]; `"batch"` treats the whole batch as one task. Population std.
    `gate` sets negative advantages to 0:
      `adaptive`  on all tokens while switched off. H is the mean over rollouts of their mean token entropy, in nats:
                  negatives are off in batches with `H > entropy_high` and on again once `H < entropy_low`; between the
                  bounds the switch, which is the state, does not change.
      `token`     on tokens with entropy above `entropy_high`
      `sequence`  on rollouts with mean entropy above `entropy_high`
    The paper gives no eps and no bounds (these are read off its plots of a 30B model; use quantiles of the entropy at
    the start) and does not say what happens between the bounds: keeping the switch is a reconstruction.
    """
    registry.one_of("scope", scope, ("task", "batch"))
    registry.one_of("gate", gate, ("adaptive", "token", "sequence"))
    if entropy_low > entropy_high:
        raise ValueError(f"entropy_low={entropy_low} must not exceed entropy_high={entropy_high}")

    def advantages(rollouts, negatives_on):
        rewards, valid = rollouts.rewards, rollouts.valid
        task = rollouts.extras["task"] if scope == "task" else jnp.zeros(valid.shape[0], jnp.int32)
        scaled = (rewards - masked.group_mean(rewards, valid)) / (task_std(rewards, valid, task, ddof=0) + eps)
        values = masked.to_tokens(scaled, rollouts.token_mask)
        per_rollout = masked.mean(rollouts.entropies, rollouts.token_mask, axis=-1)
        if gate == "token":
            dropped = rollouts.entropies > entropy_high
        elif gate == "sequence":
            dropped = (per_rollout > entropy_high)[..., None]
        else:
            entropy = masked.mean(per_rollout, rollouts.live)
            switched = (negatives_on & (entropy <= entropy_high)) | (entropy < entropy_low)
            negatives_on = jnp.where(jnp.any(rollouts.live), switched, negatives_on)
            dropped = ~negatives_on
        return jnp.where((values < 0) & dropped, 0, values), negatives_on

    needs = ("rewards", "entropies") + (("task",) if scope == "task" else ())
    return stateful(lambda: jnp.asarray(True), advantages, needs=needs)
