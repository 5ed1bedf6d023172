"""DAPO's advantage: soft punishment of overlong answers, then the z-score inside the group (arXiv 2503.14476).

The other parts of the recipe are the objective (`ppo_clip` with the higher upper bound and `token_mean`) and the filter
`jaxrl_llm.control.dynamic_sampling`, which looks at the unshaped accuracy. `objectives.dapo_overlong` removes the same rollouts
from the loss: do not combine the two.
"""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.rewards.length import soft_overlong


@estimator
def dapo(*, max_len: int = 20480, cache_len: int | None = None, factor: float = 1.0, variant: str = "paper",
         eps: float = 1e-6) -> Estimator:
    """`A_i = (r'_i - mean') / (std' + eps)` with `r' = r + penalty(length)`, sample standard deviation.

    `max_len` is the generation budget in tokens, `cache_len` the part of it that is punished (default: a fifth), up to
    `factor`; `variant` as in `rewards.length.soft_overlong`. The lengths and the factor are the paper's and verl's recipe's,
    eps as in `grpo`.
    """
    penalty = soft_overlong(max_len, max(max_len // 5, 1) if cache_len is None else cache_len, factor, variant)

    def advantages(rollouts):
        return group_z_score(rollouts.rewards + penalty(rollouts.lengths), rollouts.valid, eps=eps)

    return stateless(advantages)
