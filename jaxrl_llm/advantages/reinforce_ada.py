"""Reinforce-Ada: a small balanced subset of all draws, compared with the success rate of all draws (arXiv 2510.04996)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.control import reinforce_ada as control
from jaxrl_llm.maths import masked


@estimator
def reinforce_ada(*, keep: int = 4, rule: str = "balanced", threshold: float = 0.7, norm_std: bool = False) -> Estimator:
    """`A = 1{r > threshold} - right / seen`, over all draws of the prompt; groups may differ in size.

    A prompt is sampled again until it shows both outcomes, and `keep` of its draws are trained on; `rule` decides both, see
    `jaxrl_llm.control.reinforce_ada`. The kept draws have more of the rare outcome than the policy, so their advantages do not
    sum to 0. A single draw is compared with 0. `norm_std` divides by the sample deviation of the outcomes of all draws, at
    least 1e-6, plus 1e-6: one right rollout among 512 then weighs 22 times as much as its reward, so it is off by default.
    Where all draws agree, A is 0.

    Metrics, means over prompts: `rollouts` drawn, share of those with `mixed` outcomes.
    """

    def outcome(rollouts):
        return (rollouts.rewards > threshold).astype(rollouts.rewards.dtype)

    def advantages(rollouts, state):
        right, valid = outcome(rollouts), rollouts.valid
        count = masked.group_count(valid)
        values = right - jnp.where(count > 1, masked.group_mean(right, valid), 0)
        if norm_std:
            deviation = masked.group_std(right, valid, ddof=1)
            values = values / jnp.where(count > 1, jnp.maximum(deviation, 1e-6) + 1e-6, 1)
        return values, state

    def metrics(rollouts, advantages, state):
        valid = rollouts.valid
        mean, some = masked.group_mean(outcome(rollouts), valid)[:, 0], jnp.any(valid, axis=1)
        values = {"rollouts": masked.group_count(valid)[:, 0], "mixed": ((mean > 0) & (mean < 1)).astype(mean.dtype)}
        return {f"reinforce_ada/{name}": masked.mean(x, some) for name, x in values.items()}

    def wants_more(rollouts, first, most):
        return control.wants_more(rollouts.rewards, rollouts.valid, keep=keep, rule=rule, threshold=threshold)

    def keeps(rollouts):
        return control.kept(rollouts.rewards, rollouts.valid, keep=keep, rule=rule, threshold=threshold)

    return stateful(lambda: (), advantages, metrics=metrics, wants_more=wants_more, keeps=keeps)
